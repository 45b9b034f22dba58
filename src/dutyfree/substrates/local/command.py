"""Run a command on this host from the event loop, without a thread.

A pidfd reports the end of the process, so a child in the background that keeps the output open does not delay
the result. Children inherit a mark in their environment. It finds the whole process tree, also processes that
left the process group.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import itertools
import os
import pwd
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter

import anyio
import anyio.to_thread

from dutyfree.contract import KILLED, Cut, Observation, Span, Usage
from dutyfree.contract.arguments import not_started
from dutyfree.contract.errors import DispatchError, ExecError
from dutyfree.contract.output import Collector
from dutyfree.substrates.local.reaper import Moment, kill_marked

_CHUNK = 1 << 18


class Commands:
    """Runs the commands of one sandbox on this host, and can kill each with all its descendants.

    ``sandbox`` is the id of the sandbox; ``directory`` is a directory that only its commands use. Each
    command gets two variables that its children inherit: ``mark``, and one of its own. They find processes
    that left the session or lost their parent. The working directory finds processes that emptied their
    environment, if it is in ``directory``.
    """

    def __init__(self, sandbox: str, directory: str) -> None:
        self._sandbox = sandbox
        self.mark = {"DUTYFREE_SANDBOX": sandbox}
        """The variable to give to other processes that ``kill`` must find."""
        self._directory = directory
        self._since = Moment.now()
        self._numbers = itertools.count(1)
        self._running = 0

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        stdin: bytes | None = None,
        timeout: float | None = None,
        user: str | None = None,
        output: int = sys.maxsize,
    ) -> Observation:
        """Run a command to its end, its timeout or a cancellation; keep ``output`` bytes of each stream.

        Raises DispatchError if no process can start, and ExecError if the process cannot be watched.
        """
        mark = f"{self._sandbox}-{next(self._numbers)}"
        self._running += 1
        try:
            return await run(
                argv,
                cwd=cwd,
                env={**env, **self.mark, "DUTYFREE_EXEC": mark},
                kill=partial(self._kill_one, f"DUTYFREE_EXEC={mark}"),
                stdin=stdin,
                timeout=timeout,
                user=user,
                output=output,
            )
        finally:
            self._running -= 1

    def _kill_one(self, marker: str) -> int:
        # While another command runs, a process without a mark could belong to that one.
        return kill_marked(marker, self._since, self._directory if self._running == 1 else "")

    def kill(self) -> int:
        """Kill all processes of the sandbox. Returns how many. Blocks."""
        return kill_marked(f"DUTYFREE_SANDBOX={self._sandbox}", self._since, self._directory)


async def run(
    argv: Sequence[str],
    *,
    cwd: str,
    env: Mapping[str, str],
    kill: Callable[[], object],
    stdin: bytes | None,
    timeout: float | None,
    user: str | None = None,
    output: int,
) -> Observation:
    """Run a command to its end, its timeout or a cancellation; the last two kill its whole process tree.

    ``kill`` kills the processes that left the session; it may block. Raises DispatchError, and ExecError if
    the command cannot be watched.
    """
    asked = perf_counter()
    streams = _Streams(output, stdin)
    try:
        streams.make()
        process = _spawn(argv, cwd, env, user, streams)
        spawned = perf_counter()
        streams.listen()
        timed_out = await _finish(process, kill, timeout)
        # The process has ended, so the rest of its output is already in the pipes.
        ended = perf_counter()
        streams.drain()
    except _NotStarted as error:
        return not_started(error.reason, error.exit_code, perf_counter() - asked)
    finally:
        streams.close()
    return _observe(process, streams, timed_out, asked, spawned, ended)


class _NotStarted(Exception):  # noqa: N818 (internal; a result, not an error)
    """The command cannot start, for a reason that the caller gets as an observation."""

    def __init__(self, exit_code: int, reason: str) -> None:
        super().__init__(reason)
        self.exit_code = exit_code
        self.reason = reason


class _Streams:
    """The pipes of one command: they collect its output and send its input."""

    def __init__(self, output: int, stdin: bytes | None) -> None:
        self._loop = asyncio.get_running_loop()
        self.stdout, self.stderr = Collector(output), Collector(output)
        self._input = memoryview(stdin or b"")
        self._open: set[int] = set()
        self._feeds = stdin is not None
        self._readers: dict[int, Collector] = {}
        self._writer: int | None = None
        self.child_stdin: int | None = None

    def make(self) -> None:
        """Make the pipes. Call ``close`` in any case. Raises DispatchError."""
        try:
            out, self.child_stdout = self._pipe()
            err, self.child_stderr = self._pipe()
            if self._feeds:
                self.child_stdin, self._writer = self._pipe()
        except OSError as error:
            raise DispatchError(f"cannot make a pipe: {error.strerror}") from error
        self._readers = {out: self.stdout, err: self.stderr}
        for fd in (out, err, self._writer):
            if fd is not None:
                os.set_blocking(fd, False)

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        self._open.update(ends)
        return ends

    def listen(self) -> None:
        """Close the command's ends of the pipes, and watch ours."""
        self._close(self.child_stdout, self.child_stderr)
        if self.child_stdin is not None:
            self._close(self.child_stdin)
        for fd in self._readers:
            self._loop.add_reader(fd, self._read, fd)
        if self._writer is not None:
            self._loop.add_writer(self._writer, self._write, self._writer)

    def _read(self, fd: int) -> int:
        """Read once. Returns the number of bytes; 0 at the end, or if nothing is there now."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if not data:
            self._close(fd)
            return 0
        self._readers[fd].add(data)
        return len(data)

    def _write(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                self._input = self._input[os.write(fd, self._input[:_CHUNK]) :]
            except OSError:
                self._input = self._input[:0]  # the command does not read any more
        if not self._input:
            self._close(fd)

    def drain(self) -> None:
        """Read what the ended command wrote: at most the size of the pipe, because a child may go on."""
        for fd in self._readers:
            if fd not in self._open:
                continue
            left = fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)
            while left > 0 and (count := self._read(fd)):
                left -= count

    def close(self) -> None:
        self._close(*self._open)

    def _close(self, *fds: int) -> None:
        """Close those that are open: the number of a closed one may already belong to another command."""
        for fd in fds:
            if fd in self._open:
                self._open.discard(fd)
                if fd in self._readers:
                    self._loop.remove_reader(fd)
                elif fd == self._writer:
                    self._loop.remove_writer(fd)
                os.close(fd)


def _spawn(
    argv: Sequence[str], cwd: str, env: Mapping[str, str], user: str | None, streams: _Streams
) -> subprocess.Popen[bytes]:
    identity = _identity(user) if user is not None else {}
    try:
        process: subprocess.Popen[bytes] = subprocess.Popen(
            argv,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL if streams.child_stdin is None else streams.child_stdin,
            stdout=streams.child_stdout,
            stderr=streams.child_stderr,
            start_new_session=True,
            **identity,  # type: ignore[call-overload]
        )
        return process
    except FileNotFoundError as error:
        raise _NotStarted(127, f"{error.filename}: no such file or directory") from None
    except (PermissionError, NotADirectoryError) as error:
        if user is not None and os.geteuid() != 0:
            raise DispatchError(f"only root may run a command as {user!r}", remedy="run as root") from error
        raise _NotStarted(126, f"{error.filename}: {error.strerror}") from None
    except OSError as error:
        if error.filename is not None:  # "Exec format error", "Argument list too long", ...
            raise _NotStarted(126, f"{error.filename}: {error.strerror}") from None
        if error.errno in (errno.EAGAIN, errno.ENOMEM):
            raise _NotStarted(126, f"cannot start a process: {error.strerror}") from None
        raise DispatchError(f"cannot start a process: {error.strerror}") from error


def _identity(user: str) -> dict[str, object]:
    try:
        entry = pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)
    except KeyError:
        raise _NotStarted(126, f"cannot run a command as {user!r}: there is no such user") from None
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": ()}


async def _finish(
    process: subprocess.Popen[bytes], kill: Callable[[], object], timeout: float | None
) -> bool:
    """Wait for the end of the process. Returns whether the timeout killed it."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError as error:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(_destroy, process, kill)
        raise ExecError(f"cannot watch the command: {error.strerror}") from error
    loop.add_reader(pidfd, ended.set)
    try:
        if timeout is None:
            await ended.wait()
            return False
        with anyio.move_on_after(timeout):
            await ended.wait()
        if ended.is_set():
            return False
        await _kill_and_wait(process, kill, ended)
        return True
    except BaseException:
        await _kill_and_wait(process, kill, ended)
        process.wait()
        raise
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def _destroy(process: subprocess.Popen[bytes], kill: Callable[[], object]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(OSError):  # the resource that was missing may still be missing
        kill()
    process.wait()


async def _kill_and_wait(
    process: subprocess.Popen[bytes], kill: Callable[[], object], ended: asyncio.Event
) -> None:
    with anyio.CancelScope(shield=True):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await anyio.to_thread.run_sync(kill)
        await ended.wait()


def _observe(
    process: subprocess.Popen[bytes],
    streams: _Streams,
    timed_out: bool,
    asked: float,
    spawned: float,
    ended: float,
) -> Observation:
    _, status, resources = os.wait4(process.pid, 0)
    code = process.returncode = os.waitstatus_to_exitcode(status)
    done = perf_counter()
    return Observation(
        exit_code=KILLED - code if code < 0 else code,
        signal=-code if code < 0 else None,
        stdout=streams.stdout.value(),
        stderr=streams.stderr.value(),
        timed_out=timed_out,
        cut=Cut(streams.stdout.cut, streams.stderr.cut),
        seconds=done - asked,
        spans=(
            Span("spawn", 0.0, spawned - asked),
            Span("run", spawned - asked, ended - spawned),
            Span("collect", ended - asked, done - ended),
        ),
        usage=Usage(resources.ru_utime + resources.ru_stime, _peak(resources)),
    )


def _peak(resources: resource.struct_rusage) -> int | None:
    # Until exec a child shares our memory, which the kernel counts in its peak. Then the peak is unknown.
    ours = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resources.ru_maxrss << 10 if resources.ru_maxrss > ours else None
