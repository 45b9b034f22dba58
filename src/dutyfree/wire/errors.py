"""Errors as data: a closed set of codes, each of which stands for one class of ``contract.errors``.

A client that has these classes gets the same exception as in-process. Other clients read the code, and what
to do about it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from dutyfree.contract import errors
from dutyfree.contract.errors import (
    ActionError,
    DutyfreeError,
    ExecError,
    FileError,
    Phase,
    SubstrateError,
    Verdict,
    verdict,
)

INTERNAL = "internal"
"""The code of an error that the server did not expect: a defect of dutyfree."""


class WireError(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error, for any client."""

    code: str
    """The name of its class, as in ``path_not_found``."""
    message: str
    verdict: Verdict
    """Who caused it: the task, the infrastructure, or the calling program."""
    retryable: bool
    """Whether the same request may succeed later, without a change."""
    remedy: str = ""
    phase: Phase | None = None
    kind: str | None = None
    arguments: tuple[Any, ...] = ()
    """What Python's OSError has: number, reason and path."""
    fields: dict[str, Any] = {}
    """The attributes of this kind of error."""


def _classes(base: type[DutyfreeError]) -> Iterator[type[DutyfreeError]]:
    yield base
    for child in base.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _classes(child)


def code_of(kind: type[DutyfreeError]) -> str:
    """The code of a class: its name in lower case, without Error at its end."""
    name = kind.__name__.removesuffix("Error") or "Error"
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


CLASSES = {code_of(kind): kind for kind in _classes(DutyfreeError)}
"""Every error that can be sent, by its code."""

RETRYABLE = (errors.PoolError, errors.Unavailable, errors.CreateError, errors.DispatchError)
"""Errors after which the same request did not take effect."""

FINAL = (errors.LeaseEnded, errors.SandboxClosed, errors.StageError)
"""Those among them that stay as they are."""


def describe(error: BaseException) -> WireError:
    """An error as data. An unexpected one tells its type only: its text may be about this host."""
    if not isinstance(error, DutyfreeError):
        return WireError(INTERNAL, f"the server failed: {type(error).__name__}", "infrastructure", False)
    known = next(kind for kind in type(error).__mro__ if CLASSES.get(code_of(kind)) is kind)
    arguments = (error.errno, error.strerror, error.filename) if isinstance(error, FileError) else ()
    return WireError(
        code=code_of(known),
        message=error.message,
        verdict=verdict(error),
        retryable=isinstance(error, RETRYABLE) and not isinstance(error, FINAL),
        remedy=error.remedy,
        phase=error.phase if isinstance(error, SubstrateError) else None,
        kind=error.kind if isinstance(error, ActionError) else None,
        arguments=arguments,
        fields=_plain({name: value for name, value in vars(error).items() if name not in _OWN}),
    )


_OWN = ("message", "remedy", "kind", "observation")


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that can be sent. An attribute that the class does not declare may be anything."""
    found = {}
    for name, value in fields.items():
        try:
            found[name] = msgspec.to_builtins(value)
        except TypeError:
            continue
    return found


def restore(found: WireError) -> Exception:
    """The exception of an error that a server sent."""
    kind = CLASSES.get(found.code)
    if kind is None:
        return ExecError(found.message, remedy=found.remedy)
    error = kind.__new__(kind)
    if isinstance(error, FileError) and len(found.arguments) == 3:
        OSError.__init__(error, *found.arguments)
    else:
        Exception.__init__(error, found.message)
    error.message, error.remedy = found.message, found.remedy
    if isinstance(error, ActionError) and found.kind is not None:
        error.kind = found.kind  # type: ignore[assignment]  # a newer server may have more kinds
    for name, value in found.fields.items():
        setattr(error, name, tuple(value) if isinstance(value, list) else value)
    return error


HTTP: dict[Verdict, Literal[422, 400, 503]] = {"task": 422, "program": 400, "infrastructure": 503}
"""The status of an answer over HTTP by who caused the error, where no rule below fits better."""


def retry_headers(error: DutyfreeError) -> dict[str, str]:
    """Retry-After in whole seconds, if the error says when to come back."""
    after = error.numbers.get("retry_after") if isinstance(error, errors.Exhausted) else None
    if isinstance(error, errors.Overloaded):
        after = error.retry_after
    return {"Retry-After": str(max(1, math.ceil(after)))} if isinstance(after, int | float) else {}


def status_of(found: WireError) -> int:
    """The HTTP status of an error."""
    if found.code in ("path_not_found", "unknown_process", "sandbox_closed"):
        return 404
    if found.code in ("exhausted", "overloaded", "quarantined"):
        return 429
    return 500 if found.code == INTERNAL else HTTP[found.verdict]
