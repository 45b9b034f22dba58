"""Turn the answers of init into values of the contract: observations, directory entries, errors."""

from __future__ import annotations

import asyncio
import bisect
import errno
import os
import random
import struct
from operator import attrgetter
from time import perf_counter

from dutyfree.contract import KILLED, Cut, Entry, Exec, Observation, Span, Usage
from dutyfree.contract.arguments import NOT_FOUND, NOT_RUNNABLE, not_started
from dutyfree.contract.entries import entry
from dutyfree.contract.errors import CollectError, SpecialFile, file_error
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.protocol import ExitFlag
from dutyfree.engine.sandbox.pending import PendingCommand

# Plain integers, because arithmetic with enum flags takes microseconds.
REFUSED = int(ExitFlag.NOT_STARTED | ExitFlag.NO_DIRECTORY | ExitFlag.NO_USER | ExitFlag.NO_PROCESS)
_TIMED_OUT, _OOM = int(ExitFlag.TIMED_OUT), int(ExitFlag.OOM)

PART = 2000
"""Records of an answer that are decoded before other tasks of the event loop may run."""

REASON_MAX = 1000
"""Bytes of a reason from init that an error message may contain."""


def observe(
    action: Exec,
    running: PendingCommand,
    ended: tuple[int, ...],
    asked: float,
    user: str = "",
    done: float | None = None,
) -> Observation:
    """The observation of a command that has ended; ``ended`` has the fields of its EXIT frame.

    ``user`` is the default user. Its time begins at ``asked`` and ends at ``done``, by default now.
    """
    status, flags, received, spawning, began, finished, sent, cpu, peak, _, _, cut_out, cut_err = ended
    if flags & REFUSED:
        return refusal(action, action.user or user, status, flags, perf_counter() - asked)
    code = _exit_code(status)
    done = perf_counter() if done is None else done
    # Both clocks are CLOCK_MONOTONIC, and the same one if both ends run on one kernel.
    zero = asked
    if not asked <= received / 1e9 <= sent / 1e9 <= done:
        # They do not: assume that the request and the answer took equally long.
        zero = received / 1e9 - max(0.0, done - asked - (sent - received) / 1e9) / 2
    at = [moment / 1e9 - zero for moment in (received, spawning, began, finished, sent)]
    return Observation(
        exit_code=KILLED - code if code < 0 else code,
        signal=-code if code < 0 else None,
        stdout=b"".join(running.stdout),
        stderr=b"".join(running.stderr),
        timed_out=flags & _TIMED_OUT != 0,
        oom=flags & _OOM != 0,
        cut=Cut(cut_out, cut_err) if cut_out or cut_err else _NO_CUT,
        seconds=done - asked,
        spans=(
            Span("dispatch", 0.0, at[0]),
            Span("spawn", at[1], at[2] - at[1]),
            Span("run", at[2], at[3] - at[2]),
            Span("collect", at[3], at[4] - at[3]),
            Span("return", at[4], done - asked - at[4]),
        ),
        usage=Usage(cpu / 1e6, peak << 10),
    )


_NO_CUT = Cut()


def _exit_code(status: int) -> int:
    """The exit code, or below 0 the signal. Raises CollectError for a status that no process can have."""
    try:
        return os.waitstatus_to_exitcode(status)
    except ValueError as error:
        raise CollectError(f"the sandbox sent {status} as the exit status of a command") from error


def final_code(status: int, flags: int) -> int:
    """The exit code as a shell reports it, also for a command that did not start. Raises CollectError."""
    if flags & REFUSED:
        return NOT_FOUND if status == errno.ENOENT and not flags & ExitFlag.NO_USER else NOT_RUNNABLE
    code = _exit_code(status)
    return KILLED - code if code < 0 else code


def refusal(action: Exec, user: str, number: int, flags: int, seconds: float) -> Observation:
    """The observation of a command that did not start."""
    return not_started(_reason(action, user, number, flags), final_code(number, flags), seconds)


def _reason(action: Exec, user: str, number: int, flags: int) -> str:
    if flags & ExitFlag.NO_PROCESS or number in (errno.EAGAIN, errno.ENOMEM):
        return f"cannot start a process in the sandbox: {os.strerror(number)}"
    if flags & ExitFlag.NO_USER and number == errno.EINVAL:
        remedy = "ids below 65536 need root, or newuidmap and a range in /etc/subuid: see `dutyfree doctor`"
        return f"cannot run a command as {user!r}: the sandbox does not have this user id ({remedy})"
    if flags & ExitFlag.NO_USER:
        return f"cannot run a command as {user!r}: there is no such user in the sandbox"
    if flags & ExitFlag.NO_DIRECTORY:
        return f"{action.cwd or 'the working directory'}: {os.strerror(number)}"
    program = "/bin/sh" if isinstance(action.command, str) else action.command[0]
    return f"{program}: {os.strerror(number)}"


def check(number: int, path: str) -> None:
    """Raise the error for the errno of a file operation, unless it is 0."""
    if number == protocol.ERROR_SPECIAL:
        raise SpecialFile(path)
    if number:
        raise file_error(number, path)


async def entries(data: bytes) -> tuple[Entry, ...]:
    """The entries of a directory, sorted by name. Other tasks of the event loop run in between.

    Raises CollectError for data that makes no sense.
    """
    found: list[Entry] = []
    at = 0
    while at < len(data):
        if len(found) % PART == PART - 1:
            await asyncio.sleep(0)
        try:
            size, mode, length = protocol.ENTRY.unpack_from(data, at)
        except struct.error as error:
            raise CollectError("the sandbox sent an incomplete directory listing") from error
        at += protocol.ENTRY.size
        name = os.fsdecode(data[at : at + length])
        at += length
        if at > len(data) or not name or "/" in name or "\0" in name:
            raise CollectError(f"the sandbox sent a directory listing with the name {name[:80]!r}")
        found.append(entry(name, mode, size))
    return await _ordered(found)


_NAME = attrgetter("name")


async def _ordered(found: list[Entry]) -> tuple[Entry, ...]:
    """Sort in parts, because one large sort would block the event loop and all threads."""
    if len(found) <= PART:
        return tuple(sorted(found, key=_NAME))
    # Random samples as bounds: the order in a directory is up to processes in the sandbox.
    samples = sorted(one.name for one in random.sample(found, 8 * (len(found) // PART)))
    bounds = samples[::8]
    parts: list[list[Entry]] = [[] for _ in range(len(bounds) + 1)]
    for begin in range(0, len(found), PART):
        for one in found[begin : begin + PART]:
            parts[bisect.bisect(bounds, one.name)].append(one)
        await asyncio.sleep(0)
    ordered: list[Entry] = []
    for part in parts:
        ordered += sorted(part, key=_NAME)
        await asyncio.sleep(0)
    return tuple(ordered)
