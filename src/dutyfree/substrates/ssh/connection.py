"""Run the ``ssh`` program: connections that are kept, and sessions over them.

A connection is one ``ssh`` process with a control socket. Its own session waits until its stdin ends, so the
process ends with its owner. A session is another ``ssh`` process, which finds the connection by the socket.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import posixpath
import shlex
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import anyio
import anyio.to_thread

from dutyfree.contract.errors import Unavailable
from dutyfree.substrates.ssh.config import SshConfig
from dutyfree.substrates.ssh.errors import unavailable

PROGRAM = "ssh"
LOST = 255
"""The exit code of ``ssh`` if the connection failed."""

SAID = 2000
"""Bytes of stderr that are kept."""

KILL_SECONDS = 5.0
END_SECONDS = 1.0

PROBE_SECONDS = 5.0
"""How long a machine may take to answer when something in it has not answered already."""

ANSWER_MAX = 1 << 20
"""Bytes of an answer of our own tools on the machine."""

CHUNK = 1 << 18

FIRST_SECONDS = 4.0
"""How long the first attempt to reach a machine that boots may take; each further one twice as long."""

RETRY_SECONDS = 0.5

MARK = "dutyfree-machine"

_POSIX = ("sh", "ash", "bash", "busybox", "dash", "ksh", "mksh", "yash", "zsh")

# One line, and no single quotes: the login shell of the user reads it, whichever it is.
_HOLD = (
    f"echo; echo {MARK} $(uname -s) $(uname -m) $(id -u) ${{SHELL:-sh}} ${{TMPDIR:-/tmp}};"
    " exec cat >/dev/null"
)


class Machine(NamedTuple):
    """What a machine says about itself."""

    system: str
    architecture: str
    user: str
    shell: str
    """The login shell of the user, which reads all remote commands."""
    temporary: str


class Session:
    """One ``ssh`` process that runs a remote command."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._said = b""
        self._listening = asyncio.create_task(self._listen())

    @property
    def said(self) -> str:
        """The end of its stderr."""
        return self._said.decode(errors="replace").strip()

    @property
    def is_running(self) -> bool:
        return self.process.returncode is None

    async def _listen(self) -> None:
        assert self.process.stderr is not None
        while data := await self.process.stderr.read(4096):
            self._said = (self._said + data)[-SAID:]

    async def exchange(self, stdin: bytes, most: int) -> bytes | None:
        """Write its stdin, and read its stdout to the end. More than ``most`` bytes kill it: then None."""
        process = self.process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(stdin)
        process.stdin.close()
        pieces, size = [], 0
        while piece := await process.stdout.read(CHUNK):  # asyncio sees no exit before the end
            size += len(piece)
            if size <= most:
                pieces.append(piece)
            else:
                pieces.clear()
                self._kill()
        with contextlib.suppress(ConnectionError):
            await process.stdin.wait_closed()
        return b"".join(pieces) if size <= most else None

    async def wait(self) -> int:
        """Wait for its end. Returns the exit code: that of the command, or LOST."""
        code = await self.process.wait()
        # A process that was started in the background may hold stderr.
        await asyncio.wait([self._listening], timeout=1.0)
        return code

    async def end(self) -> None:
        """Kill the process. The machine then sees the end of the command's stdin."""
        self._kill()
        # A connection that hangs has the pipes, too, and asyncio sees no exit before they are closed.
        with anyio.move_on_after(END_SECONDS, shield=True):
            await self.wait()
        self._listening.cancel()

    def _kill(self) -> None:
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()


class Connection:
    """One kept connection, and the number of its sessions."""

    def __init__(self, session: Session, socket_path: Path, machine: Machine) -> None:
        self.session = session
        self.socket_path = socket_path
        self.machine = machine
        self.used = 1  # its own

    @property
    def is_open(self) -> bool:
        return self.session.is_running


class Connections:
    """The connections to one machine. ``environment`` is that of all ``ssh`` processes."""

    def __init__(self, config: SshConfig, directory: Path, environment: dict[str, str]) -> None:
        """``directory`` is for the control sockets; only this process uses it."""
        self._config = config
        self._directory = directory
        self._environment = environment
        self._open: list[Connection] = []
        self._count = 0
        self._opening = anyio.Lock()
        self._failure: Unavailable | None = None
        """Why the latest attempt to connect failed."""

    async def machine(self, patience: float = 0.0) -> Machine:
        """Open a connection if there is none; try again for ``patience`` seconds. Raises Unavailable."""
        until, seconds = monotonic() + patience, FIRST_SECONDS if patience else self._config.connect_seconds
        while True:
            try:
                async with self.slot(min(seconds, self._config.connect_seconds)) as found:
                    return found.machine
            except Unavailable:
                if monotonic() > until:
                    raise
            await anyio.sleep(RETRY_SECONDS)
            seconds *= 2

    @asynccontextmanager
    async def slot(self, seconds: float | None = None) -> AsyncIterator[Connection]:
        """A connection that has room for one more session, for as long as the context. Raises Unavailable.

        A new one may take ``seconds``; by default as long as the options say.
        """
        found = self._with_room()
        if found is None:
            earlier = self._failure
            async with self._opening:
                found = self._with_room()
                if found is None:
                    failure = self._failure
                    if failure is not None and failure is not earlier:
                        # Another task tried while this one waited. One attempt for each takes too long.
                        raise Unavailable(failure.message, remedy=failure.remedy)
                    found = await self._opened(seconds or self._config.connect_seconds)
                found.used += 1
        else:
            found.used += 1
        try:
            yield found
        finally:
            found.used -= 1

    async def _opened(self, seconds: float) -> Connection:
        try:
            found = await self._connect(seconds)
        except Unavailable as error:
            self._failure = error
            raise
        self._open.append(found)
        return found

    def _with_room(self) -> Connection | None:
        self._open = [one for one in self._open if one.is_open]
        return next((one for one in self._open if one.used < self._config.sessions), None)

    async def _connect(self, seconds: float) -> Connection:
        self._count += 1
        path = self._directory / str(self._count)
        argv = self._argv(path, "yes", f"exec /bin/sh -c '{_HOLD}'", seconds)
        session = await self._start(argv, asyncio.subprocess.PIPE, asyncio.subprocess.PIPE)
        try:
            with anyio.fail_after(seconds):
                machine = await _greeting(session)
        except TimeoutError:
            await session.end()
            raise await self._unavailable("the connection timed out") from None
        except BaseException:
            await session.end()
            raise
        if machine is None:
            await session.end()
            raise await self._unavailable(session.said)
        return Connection(session, path, machine)

    async def _unavailable(self, said: str) -> Unavailable:
        return await anyio.to_thread.run_sync(unavailable, self._config, said)

    async def session(self, connection: Connection, command: str) -> tuple[Session, socket.socket]:
        """Run a remote command whose stdin and stdout are the socket. The caller closes the socket."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                return await self._start(self._over(connection, command), theirs, theirs), ours
        except BaseException:
            ours.close()
            raise

    async def piped(self, connection: Connection, command: str) -> Session:
        """Run a remote command whose stdin and stdout are pipes."""
        argv = self._over(connection, command)
        return await self._start(argv, asyncio.subprocess.PIPE, asyncio.subprocess.PIPE)

    async def run(self, command: str, stdin: bytes = b"") -> tuple[int, bytes, str]:
        """Run a remote command: its exit code, stdout, and what ``ssh`` or it said. Raises Unavailable."""
        async with self.slot() as connection:
            session = await self.piped(connection, command)
            try:
                with anyio.fail_after(self._config.connect_seconds):
                    stdout = await session.exchange(stdin, ANSWER_MAX)
                    if stdout is None:
                        return LOST, b"", f"the answer has more than {ANSWER_MAX} bytes"
                    return await session.wait(), stdout, session.said
            except TimeoutError:
                return LOST, b"", f"no answer within {self._config.connect_seconds:g} s"
            finally:
                await session.end()

    async def answers(self, connection: Connection) -> bool:
        """Whether the sshd of a connection answers soon; an answer that it cannot start a program counts."""
        if not connection.is_open:
            return False
        null = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            *self._over(connection, "true"), stdin=null, stdout=null, stderr=null, env=self._environment
        )
        try:
            with anyio.move_on_after(PROBE_SECONDS):
                await process.wait()
                return connection.is_open
            return False
        finally:
            if process.returncode is None:
                process.kill()
            with anyio.CancelScope(shield=True):
                await process.wait()

    async def _start(self, argv: list[str], stdin: object, stdout: object) -> Session:
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=stdin,  # type: ignore[arg-type]
                stdout=stdout,  # type: ignore[arg-type]
                stderr=asyncio.subprocess.PIPE,
                env=self._environment,
                start_new_session=True,  # Ctrl-C must not end it before the sandboxes are removed
            )
        except FileNotFoundError as error:
            raise missing() from error
        return Session(process)

    def _over(self, connection: Connection, command: str) -> list[str]:
        return self._argv(connection.socket_path, "no", for_shell(command, connection.machine.shell))

    def _argv(self, path: Path, master: str, command: str, seconds: float | None = None) -> list[str]:
        config = self._config
        seconds = seconds or config.connect_seconds
        settings = (
            "BatchMode=yes",
            f"ControlMaster={master}",
            f"ControlPath={path}",
            "ControlPersist=no",
            f"ServerAliveInterval={config.alive_seconds}",
            f"ConnectTimeout={max(1, int(seconds))}",
            "ForwardAgent=no",
            "ForwardX11=no",
            "ClearAllForwardings=yes",
            "RequestTTY=no",
            "RemoteCommand=none",
            "EscapeChar=none",
            "LogLevel=ERROR",
        )
        words = [PROGRAM]
        for setting in settings:
            words += ["-o", setting]
        return [*words, *config.flags, "--", config.host, command]

    async def close(self) -> None:
        """Close all connections."""
        for one in self._open:
            if one.session.process.stdin is not None:
                one.session.process.stdin.close()
        for one in self._open:
            with anyio.move_on_after(KILL_SECONDS):
                await one.session.wait()
            await one.session.end()
        self._open.clear()


async def _greeting(session: Session) -> Machine | None:
    """What the machine says when it is reached; None if the process ended. Other lines are noise."""
    stdout = session.process.stdout
    assert stdout is not None
    while line := await stdout.readline():
        words = line.decode(errors="replace").split(None, 5)
        if len(words) == 6 and words[0] == MARK:
            return Machine(words[1], words[2], words[3], words[4], words[5].strip())
    await session.wait()
    return None


def missing() -> Unavailable:
    return Unavailable("there is no ssh program", remedy="install it: apt-get install openssh-client")


def environment(mark: str) -> dict[str, str]:
    """That of this process, which has the address of the agent; ``mark`` is ``NAME=value``."""
    name, _, value = mark.partition("=")
    return {**os.environ, name: value}


def for_shell(command: str, shell: str) -> str:
    """A command that this login shell passes on as it is. Others than those of POSIX quote differently."""
    if posixpath.basename(shell) in _POSIX or not {"\\", "\n", "!"} & {*command}:
        return command
    coded = base64.b64encode(command.encode(errors="surrogateescape")).decode()
    return f"exec /bin/sh -c 'eval \"$(echo {coded} | base64 -d)\"'"


def quoted(words: Sequence[str]) -> str:
    return shlex.join(words)
