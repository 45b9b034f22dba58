"""Checks of the arguments of a sandbox's methods, the same for every substrate.

A wrong type or a number out of range is the program's mistake: ArgumentError or LimitError, at once. An agent
may have written a NUL byte, an empty command or a text that cannot be encoded. Such a command gets an
observation that says why it did not start, and such a path raises RequestError.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from operator import index

from dutyfree.contract.action import Action, Command, Exec, Search
from dutyfree.contract.errors import ActionKind, ArgumentError, LimitError, RequestError, UsageError
from dutyfree.contract.observation import Observation, Span

NOT_RUNNABLE = 126
"""The exit code of a command that could not start, as in shells."""

NOT_FOUND = 127
"""The exit code of a command whose program or directory does not exist."""

_WORD_MAX = 128 << 10  # bytes of one argument or variable, as in the kernel

NAMES = 256
"""How many patterns a search may have, ``names`` and ``skip`` together."""

_BYTES = (bytes, bytearray, memoryview)


def check_command(
    command: Command,
    *,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    stdin: object = None,
    timeout: float | None = None,
    user: str | None = None,
) -> None:
    """Check the arguments of ``exec``. Raises ArgumentError. It takes about a microsecond."""
    if type(command) is not str:
        _check_words(command)
    if cwd is not None and not isinstance(cwd, str):
        raise ArgumentError(f"cwd must be a str, not {_named(cwd)}")
    if env is not None:
        _check_env(env)
    if stdin is not None:
        check_bytes(stdin, "stdin")
    if timeout is not None:
        check_timeout(timeout)
    if user is not None and not isinstance(user, str):
        raise ArgumentError(f"user must be a str, not {_named(user)}", remedy="give the name, or str(uid)")


def check_exec(action: Exec) -> None:
    """Check the fields of an action. Raises ArgumentError."""
    check_command(
        action.command,
        cwd=action.cwd,
        env=action.env,
        stdin=action.stdin,
        timeout=action.timeout,
        user=action.user,
    )


def _check_words(command: object) -> None:
    if isinstance(command, str):
        return
    if isinstance(command, _BYTES) or not isinstance(command, Sequence):
        raise ArgumentError(f"a command must be a str or a list of them, not {_named(command)}")
    for word in command:
        if not isinstance(word, str):
            raise ArgumentError(f"every word of a command must be a str, not {_named(word)}")


def _check_env(env: object) -> None:
    if not isinstance(env, Mapping):
        raise ArgumentError(f"env must be a mapping of str to str, not {_named(env)}")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            wrong = value if isinstance(name, str) else name
            raise ArgumentError(f"env must be a mapping of str to str: {name!r} has {_named(wrong)}")
        if not name or "=" in name:
            raise ArgumentError(f"{name!r} cannot be the name of a variable: it is empty, or has a '='")


def check_actions(actions: object) -> None:
    """Check that it is a list of actions. Raises ArgumentError."""
    if isinstance(actions, str) or not isinstance(actions, Sequence):
        raise ArgumentError(f"a batch must be a list of actions, not {_named(actions)}")
    for action in actions:
        if not isinstance(action, Action):
            raise ArgumentError(
                f"an action must be one of Exec, Read, Write, Edit, List and Search, not {_named(action)}"
            )


def check_timeout(timeout: object) -> None:
    """Check that it is a number of seconds. Raises ArgumentError."""
    # Only NaN is not equal to itself.
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout != timeout:
        shown = "nan" if isinstance(timeout, float) else _named(timeout)
        raise ArgumentError(f"a timeout must be a number of seconds, or None, not {shown}")


def check_bytes(data: object, name: str = "the contents of a file") -> None:
    """Check that it is bytes. Raises ArgumentError."""
    if not isinstance(data, _BYTES):
        remedy = "give text.encode()" if isinstance(data, str) else ""
        raise ArgumentError(f"{name} must be bytes, not {_named(data)}", remedy=remedy)


def check_mode(mode: object) -> None:
    """Check the permissions of a file. Raises LimitError, and ArgumentError if it is not an int."""
    if isinstance(mode, bool) or not isinstance(mode, int):
        raise ArgumentError(f"a mode must be an int, such as 0o644, not {_named(mode)}")
    if not 0 <= mode <= 0o7777:
        raise LimitError(f"a mode must be from 0 to 0o7777, not {mode}", remedy="give one such as 0o644")


def check_count(count: int, least: int) -> int:
    """A number of sandboxes as an int. Raises UsageError below ``least``, and for a float like 8.0."""
    try:
        found = index(count)
    except TypeError as error:
        raise UsageError(f"the number of sandboxes must be an int, not {count!r}") from error
    if found < least:
        raise UsageError(f"the number of sandboxes must be ≥ {least}, not {found}")
    return found


def check_search(request: Search) -> None:
    """Check the arguments of a search. Raises RequestError, LimitError, ArgumentError."""
    for word in (request.path, request.text or "", *request.names, *request.skip):
        if not isinstance(word, str):
            raise ArgumentError(f"the texts and patterns of a search must be str, not {_named(word)}")
    if request.timeout is not None:
        check_timeout(request.timeout)
    if request.text == "":
        raise RequestError(
            "the text to search for is empty", kind="pattern", remedy="leave it out to search for names"
        )
    if len(request.names) + len(request.skip) > NAMES:
        raise RequestError(f"a search may have at most {NAMES} patterns of names", kind="pattern")
    if request.limit < 1 or request.width < 0:
        raise LimitError("a search needs limit ≥ 1 and width ≥ 0")


def encoded_path(path: object) -> bytes:
    """Encode a path for the operating system. Raises ArgumentError, RequestError."""
    if not isinstance(path, str):
        raise ArgumentError(f"a path in a sandbox must be a str, not {_named(path)}")
    return encoded(path, "a path", "bad_path")


def encoded(text: str, what: str, kind: ActionKind = "pattern") -> bytes:
    """Encode a text of the agent. Raises RequestError if it has a NUL byte or cannot be encoded."""
    try:
        data = os.fsencode(text)
    except UnicodeEncodeError:
        raise RequestError(f"{what} cannot be encoded: {text[:100]!a}", kind=kind) from None
    if b"\0" in data:
        raise RequestError(f"{what} has a NUL byte: {text[:100]!a}", kind=kind)
    return data


class Unrunnable(RequestError):  # noqa: N818 (names the state)
    """No process can have this command. ``observation`` is the result that the caller gets."""

    def __init__(self, reason: str, exit_code: int = NOT_RUNNABLE) -> None:
        super().__init__(reason)
        self.observation = not_started(reason, exit_code)


def check_runnable(
    command: Command, *, cwd: str | None = None, env: Mapping[str, str] | None = None, user: str | None = None
) -> None:
    """Check that a command can be encoded, for substrates that do not encode it. Raises Unrunnable."""
    words = [command] if isinstance(command, str) else command
    variables = () if env is None else (text for pair in env.items() for text in pair)
    if not words:
        raise Unrunnable(EMPTY, NOT_FOUND)
    for text in (*words, cwd or "", user or "", *variables):
        try:
            data = os.fsencode(text)
        except UnicodeEncodeError:
            raise Unrunnable(UNENCODABLE) from None
        if b"\0" in data:
            raise Unrunnable(NUL)
        if len(data) >= _WORD_MAX:
            raise Unrunnable(TOO_LONG)


EMPTY = "cannot run the command: it is empty"
NUL = "cannot run the command: it has a NUL byte"
UNENCODABLE = "cannot run the command: it has characters that cannot be encoded"
TOO_LONG = f"cannot run the command: {os.strerror(errno.E2BIG)}"


def not_started(reason: str, exit_code: int = NOT_RUNNABLE, seconds: float = 0.0) -> Observation:
    """The observation of a command that could not start: the reason is on stderr, as in a shell."""
    return Observation(
        exit_code=exit_code,
        stderr=f"{reason}\n".encode(errors="surrogateescape"),
        seconds=seconds,
        spans=(Span("spawn", 0.0, seconds),),
    )


def _named(value: object) -> str:
    return type(value).__name__
