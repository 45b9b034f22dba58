"""What comes back from a sandbox, in the contract's words: observations, entries, errors."""

from __future__ import annotations

import errno
import os
from time import perf_counter

from dutyfree.contract import KILLED, Command, Cut, Entry, Observation, Span, Usage
from dutyfree.engine import protocol
from dutyfree.engine.protocol import Exit
from dutyfree.engine.waiting import Running
from dutyfree.errors import DispatchError
from dutyfree.substrates.kinds import entry, special

# Plain numbers: arithmetic with those of an enumeration takes microseconds.
_REFUSED = int(Exit.NOT_STARTED | Exit.NO_DIRECTORY | Exit.NO_USER | Exit.NO_PROCESS)
_EXHAUSTED = (errno.ENOMEM, errno.EAGAIN)  # no answer of the command, which never ran
_TIMED_OUT = int(Exit.TIMED_OUT)


def observe(
    command: Command,
    user: str | None,
    cwd: str | None,
    running: Running,
    ended: tuple[int, ...],
    asked: float,
) -> Observation:
    """``ended`` is what the last frame of the command said. Raises DispatchError."""
    status, flags, received, spawning, began, finished, sent, cpu, peak, _, _, cut_out, cut_err = ended
    if flags & _REFUSED:
        return refusal(command, user, cwd, status, flags, asked)
    code = os.waitstatus_to_exitcode(status)
    done = perf_counter()
    # Both clocks are CLOCK_MONOTONIC.
    at = [moment / 1e9 - asked for moment in (received, spawning, began, finished, sent)]
    return Observation(
        exit_code=KILLED - code if code < 0 else code,
        signal=-code if code < 0 else None,
        stdout=b"".join(running.stdout),
        stderr=b"".join(running.stderr),
        timed_out=flags & _TIMED_OUT != 0,
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


def refusal(
    command: Command, user: str | None, cwd: str | None, number: int, flags: int, asked: float
) -> Observation:
    """Of a command that was not run: a result if it is the command's own fault. Raises DispatchError."""
    reason = os.strerror(number)
    if flags & Exit.NO_PROCESS or number in _EXHAUSTED:
        raise DispatchError(f"cannot start a process in the sandbox: {reason}")
    if flags & Exit.NO_USER:
        if number == errno.EINVAL:
            raise DispatchError(
                f"cannot run a command as {user!r}: the sandbox has no such id",
                remedy="those below 65536 need root, or newuidmap and a range in /etc/subuid: "
                "see `dutyfree doctor`",
            )
        raise DispatchError(f"cannot run a command as {user!r}: there is no such user in the sandbox")
    name = "/bin/sh" if isinstance(command, str) else command[0]
    if flags & Exit.NO_DIRECTORY:
        name = cwd or "the image's directory"
    seconds = perf_counter() - asked
    return Observation(
        exit_code=127 if number == errno.ENOENT else 126,
        stderr=f"{name}: {reason}\n".encode(errors="surrogateescape"),
        seconds=seconds,
        spans=(Span("spawn", 0.0, seconds),),
    )


def check(number: int, path: str) -> None:
    """Raises what the errno of a file operation says."""
    if number == protocol.ERROR_SPECIAL:
        raise special(path)
    if number:
        raise OSError(number, os.strerror(number), path)


def entries(data: bytes) -> tuple[Entry, ...]:
    found: list[Entry] = []
    at = 0
    while at < len(data):
        size, mode, length = protocol.ENTRY.unpack_from(data, at)
        at += protocol.ENTRY.size
        name = os.fsdecode(data[at : at + length])
        at += length
        found.append(entry(name, mode, size))
    return tuple(sorted(found, key=lambda one: one.name))
