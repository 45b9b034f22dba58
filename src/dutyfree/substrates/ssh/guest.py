"""Our init on the machine: copied once, then started by one ssh session for each sandbox.

The session's stdin and stdout are the stream. When it ends, for whatever reason, init kills all processes
that it started and removes the directory of the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os

import anyio
import anyio.to_thread

from dutyfree.contract.errors import CleanupError, CreateError, ExecError, Unavailable
from dutyfree.engine.launcher.client import BINARY
from dutyfree.engine.sandbox.guest import Guest
from dutyfree.substrates.ssh.config import SshConfig
from dutyfree.substrates.ssh.connection import LOST, Connection, Connections, Machine, Session, quoted
from dutyfree.substrates.ssh.errors import last_line

PREAMBLE = b"\0dutyfree\n"
"""What init writes first. The start-up files of a login shell may print something before it."""

NOISE_MAX = 1 << 16
"""Bytes that such a file may print."""

# Whether $1 is a directory that is ours, no link to one, and not writable for others: they could swap what we
# run there. One lstat says all of it, so that nothing changes in between.
OURS = r"""
ours() {
  [ -n "$(find "$1" -prune -type d -user "$(id -u)" ! -perm -020 ! -perm -002)" ] && return
  echo "$1 is a link, belongs to another user, or others can write to it" >&2
  return 1
}
"""

# The copy gets its name when it is whole, so that no one runs a part of it.
_INSTALL = (
    f'{OURS}umask 022; mkdir -p -m 711 "$1" && ours "$1" && cd "$1" && cat >"$2.$$" && chmod 755 "$2.$$"'
    ' && mv -f "$2.$$" "$2" && sha256sum "$2"'
)
_CHECK = f'{OURS}ours "$1" && cd "$1" && [ -O "$2" ] && sha256sum "$2"'

# Since the opening the directory may have vanished, and another user may have made one with its name. So
# enter it, check it from inside, and run what is in it: nobody can replace it in between.
_START = (
    'cd -P -- "$1" && [ -O . ] && [ -O "./$2" ] && exec "./$2" remote "$1" "$3";'
    ' echo "our init is gone from $1: open the substrate again" >&2; exit 70'
)


def base(config: SshConfig, machine: Machine) -> str:
    """The directory on the machine that has the sandboxes and init."""
    return config.directory.rstrip("/") or f"{machine.temporary.rstrip('/')}/dutyfree-{machine.user}"


class Program:
    """Our init, and its copy on the machine."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.digest = hashlib.sha256(data).hexdigest()
        self.name = f"init-{self.digest[:16]}"

    @classmethod
    async def load(cls) -> Program:
        """Raises Unavailable."""
        try:
            return cls(await anyio.to_thread.run_sync(BINARY.read_bytes))
        except OSError as error:
            raise Unavailable(
                f"{BINARY} is missing", remedy="install a C compiler, and dutyfree again"
            ) from error

    async def install(self, connections: Connections, machine: Machine, directory: str) -> str:
        """Copy it unless the machine has it, and compare the digest. Returns its path. Raises Unavailable."""
        ours = os.uname()
        if (machine.system, machine.architecture) != (ours.sysname, ours.machine):
            raise Unavailable(
                f"our init is for {ours.sysname} on {ours.machine}, and the machine is "
                f"{machine.system} on {machine.architecture}",
                remedy='use actions="exec", or run dutyfree on a machine of that kind',
            )
        said = ""
        for script, content in ((_CHECK, b""), (_INSTALL, self._data)):
            command = quoted(("/bin/sh", "-c", script, "sh", directory, self.name))
            code, stdout, said = await connections.run(command, content)
            if code == 0 and self.digest.encode() in stdout:
                return f"{directory}/{self.name}"
        raise Unavailable(
            f"our init cannot be copied to {directory}: {last_line(said) or 'its digest differs'}",
            remedy="name another directory with the option directory=; the machine needs sha256sum",
        )


class Preamble:
    """Drops everything before init's own bytes."""

    def __init__(self) -> None:
        self._before: bytes | None = b""

    @property
    def noise(self) -> str:
        return (self._before or b"").decode(errors="replace").strip()

    def decode(self, data: bytes) -> bytes:
        if self._before is None:
            return data
        self._before = (self._before + data)[-NOISE_MAX:]
        _, found, rest = self._before.partition(PREAMBLE)
        if not found:
            return b""
        self._before = None
        return rest


class SessionControl:
    """End one sandbox. See ``GuestControl``. Pausing stops the processes by signals, one by one."""

    freezer = False

    def __init__(
        self, name: str, connections: Connections, connection: Connection, session: Session, seconds: float
    ) -> None:
        self._name = name
        self._connections = connections
        self._connection = connection
        self._session = session
        self._seconds = seconds
        self._ending: asyncio.Task[None] | None = None
        self.preamble = Preamble()

    async def freeze(self) -> None:
        pass

    async def thaw(self) -> None:
        pass

    async def responds(self) -> bool:
        """Whether the machine answers: ``ssh`` itself notices a dead connection late."""
        return self._session.is_running and await self._connections.answers(self._connection)

    async def explain(self) -> Exception:
        """Why the stream ended."""
        code = await self._session.wait()
        said = last_line(self._session.said) or last_line(self.preamble.noise)
        if code in (LOST, -9, -15):
            return ExecError(f"the connection to the machine of sandbox {self._name} was lost: {said}")
        return ExecError(f"init of sandbox {self._name} ended with code {code}: {said}")

    def give_up(self) -> None:
        """Destroy it, without waiting for the end."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._session.end())

    async def destroy(self) -> None:
        """Wait until the machine has removed everything; the end of the stream has told it to."""
        code: int | None = None
        with anyio.move_on_after(self._seconds):
            code = await self._session.wait()
        await self._session.end()
        said = last_line(self._session.said)
        if code is None:
            raise CleanupError(f"the machine did not remove sandbox {self._name} within {self._seconds:g} s")
        if code in (LOST, -9, -15):
            raise CleanupError(
                f"the connection was lost before sandbox {self._name} was known to be removed: {said}",
                remedy="the machine removes it when its sshd notices the loss",
            )
        if code:
            raise CleanupError(f"sandbox {self._name} was not removed: {said or f'exit code {code}'}")


async def started(
    connections: Connections, connection: Connection, config: SshConfig, program: str, name: str
) -> Guest:
    """The init of a new sandbox, ready. Raises CreateError, CleanupError."""
    directory, _, file = program.rpartition("/")
    command = f"exec {quoted(('/bin/sh', '-c', _START, 'sh', directory, file, name))}"
    session, connected = await connections.session(connection, command)
    control = SessionControl(name, connections, connection, session, config.end_seconds)
    # Init is a process among others of the same user.
    guest = Guest(
        name,
        connected,
        control,
        decode=control.preamble.decode,
        explain=control.explain,
        is_protected=False,
    )
    try:
        await guest.wait_ready(config.connect_seconds)
    except BaseException as error:
        guest.close()
        with anyio.CancelScope(shield=True):
            if isinstance(error, CreateError):
                await session.end()
            else:
                with contextlib.suppress(CleanupError):
                    await control.destroy()
        raise
    return guest
