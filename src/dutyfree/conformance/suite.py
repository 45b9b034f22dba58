"""Define and run checks, without a test framework.

A check is a function of a Substrate. It raises AssertionError, with a message, if the substrate breaks a
promise of the contract, and Skipped if the substrate does not have the ability.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import traceback
import unittest
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import anyio
import msgspec

from dutyfree.contract import Sandbox, Substrate
from dutyfree.contract.errors import UsageError
from dutyfree.validation import suggestion

Needs: TypeAlias = Literal["nothing", "commands", "python"]
"""What a check needs in a sandbox: nothing, real commands, or also ``python3``."""

Outcome: TypeAlias = Literal["passed", "failed", "not offered"]

T = TypeVar("T")

_PROBES = {
    "commands": ("echo $((6 * 7))", "runs no real commands"),
    "python": ("python3 -c 'print(6 * 7)'", "has no python3"),
}


class Skipped(unittest.SkipTest):
    """The substrate does not have the ability. Test frameworks know the base class."""


class Check(msgspec.Struct, frozen=True):
    """One promise of the contract. Await it with an open substrate."""

    name: str
    promise: str
    """The promise, in one sentence."""
    subject: str
    function: Callable[[Substrate], Awaitable[None]]
    deadline: float

    async def __call__(self, substrate: Substrate) -> None:
        """Raises AssertionError, Skipped, or an error of the substrate that the check did not expect."""
        place = ""
        with anyio.move_on_after(self.deadline) as scope:
            try:
                await self.function(substrate)
            except anyio.get_cancelled_exc_class() as cancelled:
                place = where(traceback.extract_tb(cancelled.__traceback__))
                raise
        if scope.cancelled_caught:
            raise AssertionError(f"did not end within {self.deadline:g} s ({place})")

    @property
    def full_name(self) -> str:
        return f"{self.subject}.{self.name}"

    def __str__(self) -> str:
        return self.name


class CheckResult(msgspec.Struct, frozen=True):
    """The outcome of one check."""

    check: str
    outcome: Outcome
    seconds: float
    reason: str = ""


CHECKS: list[Check] = []
"""Every check, in the order of the subjects."""


def on_substrate(
    needs: Needs = "nothing", *, deadline: float = 120
) -> Callable[[Callable[[Substrate], Awaitable[None]]], Callable[[Substrate], Awaitable[None]]]:
    """Register a check that creates its own sandboxes."""

    def register(function: Callable[[Substrate], Awaitable[None]]) -> Callable[[Substrate], Awaitable[None]]:
        @functools.wraps(function)
        async def check(substrate: Substrate) -> None:
            known = _Probed.of(substrate)
            if needs not in known:
                async with substrate.sandbox() as sandbox:
                    known[needs] = await _lacking(sandbox, needs)
            _skip(known[needs])
            await function(substrate)

        _register(function, check, deadline)
        return function

    return register


def in_sandbox(
    needs: Needs = "nothing", *, deadline: float = 120
) -> Callable[[Callable[[Sandbox], Awaitable[None]]], Callable[[Sandbox], Awaitable[None]]]:
    """Register a check that gets a fresh sandbox."""

    def register(function: Callable[[Sandbox], Awaitable[None]]) -> Callable[[Sandbox], Awaitable[None]]:
        @functools.wraps(function)
        async def check(substrate: Substrate) -> None:
            known = _Probed.of(substrate)
            _skip(known.get(needs, ""))
            async with substrate.sandbox() as sandbox:
                if needs not in known:
                    known[needs] = await _lacking(sandbox, needs)
                    _skip(known[needs])
                await function(sandbox)

        _register(function, check, deadline)
        return function

    return register


def _register(
    function: Callable[..., Awaitable[None]], check: Callable[[Substrate], Awaitable[None]], deadline: float
) -> None:
    promise = " ".join((function.__doc__ or "").split())
    subject = function.__module__.rpartition(".")[2]
    CHECKS.append(Check(function.__name__, promise, subject, check, deadline))


class _Probed:
    """What the tested substrate lacks: a sentence for each need, empty if it lacks nothing."""

    substrate: Substrate | None = None
    lacking: dict[Needs, str]

    @classmethod
    def of(cls, substrate: Substrate) -> dict[Needs, str]:
        if cls.substrate is not substrate:
            cls.substrate, cls.lacking = substrate, {"nothing": ""}
        return cls.lacking


async def require(sandbox: Sandbox, needs: Needs) -> None:
    """Raises Skipped if the sandbox lacks what the check needs."""
    _skip(await _lacking(sandbox, needs))


async def _lacking(sandbox: Sandbox, needs: Needs) -> str:
    command, lacking = _PROBES[needs]
    seen = await sandbox.exec(command)
    if seen.stdout == b"42\n":
        return ""
    said = seen.stderr.decode(errors="replace").strip()[-200:]
    return f"the substrate {lacking}: {command!r} ended with {seen.exit_code}{': ' * bool(said)}{said}"


def _skip(lacking: str) -> None:
    if lacking:
        raise Skipped(lacking)


async def at_once(function: Callable[[T], Coroutine[Any, Any, None]], items: Iterable[T]) -> None:
    """Run the function for all items at the same time. Raises the first error, without its group."""
    try:
        async with anyio.create_task_group() as tasks:
            for item in items:
                tasks.start_soon(function, item)
    except ExceptionGroup as group:
        error: Exception = group
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        raise error from None


async def judge(substrate: Substrate, check: Check) -> CheckResult:
    """Run one check. Every error becomes a result."""
    begun = perf_counter()
    outcome: Outcome = "passed"
    reason = ""
    try:
        await check(substrate)
    except Skipped as skipped:
        outcome, reason = "not offered", str(skipped)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the suite reports anything a substrate may do)
        outcome, reason = "failed", complaint(error)
    return CheckResult(check.name, outcome, perf_counter() - begun, reason)


def named(names: Iterable[str], checks: Iterable[Check] = CHECKS) -> set[str]:
    """The names of the checks with these names or subjects. Raises UsageError."""
    found: set[str] = set()
    for name in names:
        fitting = {check.name for check in checks if name in (check.subject, check.name, check.full_name)}
        if not fitting:
            known = [word for check in checks for word in (check.name, check.subject)]
            hint = suggestion(name, known)
            raise UsageError(f"there is no check {name!r}", remedy=hint or "--list names them all")
        found |= fitting
    return found


def select(expression: str) -> list[Check]:
    """The checks whose subject or name matches: words with ``and``, ``or`` and ``not``, as in pytest's -k."""

    def matches(check: Check, term: str) -> bool:
        word = term.removeprefix("not ").strip()
        return (word in check.full_name) != term.startswith("not ")

    alternatives = [part.split(" and ") for part in expression.split(" or ")]
    return [
        check
        for check in CHECKS
        if any(all(matches(check, term.strip()) for term in terms) for terms in alternatives)
    ]


def tally(results: Iterable[CheckResult], left_out: int = 0) -> str:
    """The last line of a run: how many checks passed, failed, and so on."""
    counts = Counter(result.outcome for result in results)
    told = [f"{counts[outcome]} {outcome}" for outcome in get_args(Outcome)]
    return ", ".join([*told, f"{left_out} left out"])


def complaint(error: BaseException) -> str:
    """The reason of a failure in one line, with the place in the code if the check gives no message."""
    if isinstance(error, AssertionError) and str(error):
        return str(error)
    said = f"{type(error).__name__}: {error}".removesuffix(": ")
    return f"{said} ({where(traceback.extract_tb(error.__traceback__))})"


def where(frames: Iterable[traceback.FrameSummary]) -> str:
    """The line of the check, and the innermost place in the code of the substrate."""
    seen = [frame for frame in frames if frame.filename not in _PLUMBING]
    lines = [frame for frame in seen if Path(frame.filename).parent == _HERE]
    inner = [frame for frame in seen if not frame.filename.startswith(_LIBRARIES)][-1:]
    told = [f"in: {frame.line}" for frame in lines[-1:]]
    told += [f"at {frame.filename}:{frame.lineno} in {frame.name}" for frame in inner if frame not in lines]
    return ", ".join(told) or "no check in the traceback"


_HERE = Path(__file__).parent
_PLUMBING = (__file__, str(_HERE / "expect.py"), str(_HERE / "supervision.py"))
_LIBRARIES = tuple(f"{Path(str(module.__file__)).parent}/" for module in (anyio, asyncio)) + tuple(
    str(module.__file__) for module in (contextlib, threading)
)
