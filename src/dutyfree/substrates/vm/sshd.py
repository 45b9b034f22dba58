"""Actions over ssh, as people reach virtual machines: an sshd in the guest, and a session for each action.

QEMU forwards a port of this host's loopback to the guest. If the image has no sshd, a disk with Debian's
packages lies above its layers; another disk has the keys, which are new for each opening of the substrate.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from dutyfree.contract import Command, Limits, Observation
from dutyfree.contract.errors import CreateError, SandboxClosed, SandboxGone, SubstrateError, Unavailable
from dutyfree.engine.layers.command_defaults import ENVIRONMENT, WORKDIR
from dutyfree.engine.layers.lower_directories import LowerDirectories
from dutyfree.engine.sandbox.guest import Guest
from dutyfree.engine.sandbox.init_sandbox import InitSandbox
from dutyfree.engine.store import overlay
from dutyfree.engine.store.locks import locked
from dutyfree.substrates.ssh.config import SshConfig
from dutyfree.substrates.ssh.connection import Connections
from dutyfree.substrates.ssh.execution import ExecSandbox, Request
from dutyfree.substrates.vm import disks
from dutyfree.substrates.vm.kernel import folder
from dutyfree.substrates.vm.qemu import Qemu

FORWARD = ",hostfwd=tcp:127.0.0.1:0-:22"
PLACE = "etc/dutyfree-sshd"
PROGRAM = "usr/sbin/sshd"
MERGED = "usr/bin/sshd"
"""The same in an image where usr/sbin is a link to usr/bin."""
FILES = "/run/dutyfree"
"""Where actions keep their output in the guest."""

SETTINGS = f"""
HostKey /{PLACE}/host_key
AuthorizedKeysFile /{PLACE}/user_key.pub
PidFile none
StrictModes no
UsePAM no
UseDNS no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
MaxSessions 100
MaxStartups 100
PrintMotd no
PrintLastLog no
"""
START = f"mkdir -p /run/sshd {FILES} && exec /{PROGRAM} -D -e -f /{PLACE}/sshd_config"
LISTENS = b"Server listening on 0.0.0.0"
START_SECONDS = 60.0
LATE_SECONDS = 20.0
"""How long after its timeout a command may go on, until the whole machine is ended."""

USERS = "etc/passwd"
USER = "sshd:x:74:65534:sshd:/run/sshd:/usr/sbin/nologin"
"""Without rights; sshd runs as this user before the login."""


class SshdSandbox(ExecSandbox):
    """A machine; every action is an ssh session.

    Only the count of processes that the guest's kernel killed for want of memory comes from init.
    """

    def __init__(
        self, guest: Guest, name: str, connections: Connections, config: SshConfig, *given: Any
    ) -> None:
        super().__init__(name, connections, FILES, config, *given)
        self.ssh = config
        """The options with which the substrate ``ssh`` reaches this machine too."""
        self._guest = guest
        self._gone: SandboxGone | None = None

    async def exec(self, command: Command, **given: Any) -> Observation:
        seen = await super().exec(command, **given)
        if self._gone is None and await self._guest.ran_out_of_memory():
            return msgspec.structs.replace(seen, oom=True)
        return seen

    async def _run(self, request: Request) -> Observation | None:
        if self._gone is not None:
            raise self._gone
        late = None
        if request.timeout is not None:
            loop = asyncio.get_running_loop()
            late = loop.call_later(request.timeout + LATE_SECONDS, self._end, "no answer")
        try:
            return await super()._run(request)
        except SandboxClosed:
            raise
        except SubstrateError as error:
            if self._gone is None:
                await self._guest.ping()  # raises SandboxGone if a process in it stopped the machine
            # The machine works, and nothing but its processes is between it and us.
            raise self._end(error.message) from error
        finally:
            if late is not None:
                late.cancel()

    def _end(self, said: str) -> SandboxGone:
        """End the machine, in which commands cannot be run any more. Every later action gets the error."""
        if self._gone is None:
            self._gone = SandboxGone(
                f"a process in sandbox {self.id} broke the way of the commands, sshd or its network: {said}"
            )
            self._guest.give_up()
        return self._gone

    @property
    def workdir(self) -> str:
        return WORKDIR

    @property
    def strays(self) -> str:
        return WORKDIR


class Keys:
    """The keys of one opening, and how sandboxes are reached with them."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        """``environment`` is that of the ssh processes."""
        self._directory = directory
        self._environment = environment

    def disks(self, found: LowerDirectories) -> Iterator[int]:
        """Open the disks to put above the layers of a recipe; the caller closes them.

        Blocks. Raises CreateError.
        """
        with tempfile.TemporaryDirectory(prefix="keys-", dir=self._directory) as own:
            self._write(found, Path(own))
            disk = disks.private(Path(own))
        yield disk
        if not any(overlay.lookup(found.paths, name) for name in (PROGRAM, MERGED)):
            yield _packages(found)

    def _write(self, found: LowerDirectories, own: Path) -> None:
        own.chmod(0o755)
        place = own / PLACE
        place.mkdir(parents=True)
        for name in ("host_key", "user_key.pub"):
            shutil.copy(self._directory / name, place / name)
        (place / "sshd_config").write_text(SETTINGS)
        users = _users(found).decode(errors="surrogateescape")
        if "\nsshd:" not in users:
            users = f"{users.rstrip()}\n{USER}\n".lstrip()
        (own / USERS).write_text(users, errors="surrogateescape")

    @asynccontextmanager
    async def reached(
        self,
        guest: Guest,
        inside: InitSandbox,
        qemu: Qemu,
        environment: Mapping[str, str],
        limits: Limits,
    ) -> AsyncIterator[SshdSandbox]:
        """Start sshd in a machine, and connect. Raises CreateError."""
        sockets = self._directory / inside.id
        connections: Connections | None = None
        try:
            await anyio.to_thread.run_sync(partial(sockets.mkdir, mode=0o700))
            await qemu.greet()
            config = await self._configured(await qemu.forwarded(), sockets)
            await _listening(inside)
            connections = Connections(config, sockets, self._environment)
            try:
                await connections.machine()
                code, _, said = await connections.run(f"mkdir -p {FILES}/{inside.id}")
            except Unavailable as error:
                raise CreateError(error.message, remedy=error.remedy) from error
            if code:
                raise CreateError(f"sshd in {inside.id} does not run commands: {said}")
            # Our own tools do not get the variables of the image and the recipe.
            sandbox = SshdSandbox(guest, inside.id, connections, config, ENVIRONMENT, limits)
            sandbox.variables = environment
            yield sandbox
        finally:
            with anyio.CancelScope(shield=True):
                inside.abandon()
                await qemu.kill()
                if connections is not None:
                    await connections.close()
                await anyio.to_thread.run_sync(partial(shutil.rmtree, sockets, ignore_errors=True))

    async def _configured(self, port: int, sockets: Path) -> SshConfig:
        key = (await anyio.Path(self._directory / "host_key.pub").read_text()).split()[:2]
        known = sockets / "known_hosts"
        await anyio.Path(known).write_text(f"[127.0.0.1]:{port} {' '.join(key)}\n")
        return SshConfig(
            host="root@127.0.0.1",
            port=port,
            identity=str(self._directory / "user_key"),
            config="none",
            options=(f"UserKnownHostsFile={known}", "IdentitiesOnly=yes", "StrictHostKeyChecking=yes"),
            actions="exec",
            sessions=90,
            connect_seconds=START_SECONDS,
        )


async def prepare(directory: Path, environment: dict[str, str]) -> Keys:
    """Make new keys in a directory. Raises Unavailable."""
    for name in ("host_key", "user_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(directory / name)]
        try:
            await anyio.run_process(command)
        except (OSError, subprocess.CalledProcessError) as error:
            raise Unavailable(
                f"vm: ssh-keygen failed: {error}", remedy="apt-get install openssh-client"
            ) from error
    return Keys(directory, environment)


async def _listening(inside: InitSandbox) -> None:
    """Start sshd by init. Raises CreateError."""
    said = b""
    try:
        with anyio.fail_after(START_SECONDS):
            process = await inside.start(START, cwd="/", env={"PATH": ENVIRONMENT["PATH"]})
            async for piece in process.output():
                said += piece.data
                if LISTENS in said:
                    return
    except TimeoutError:
        said += b" (no answer in time)"
    except SubstrateError as error:
        raise CreateError(f"sshd in {inside.id} did not start: {error}") from error
    raise CreateError(f"sshd in {inside.id} did not start: {said.decode(errors='replace').strip()}")


# --- The files of the image -------------------------------------------------------------------------------


def _find(found: LowerDirectories, name: str) -> Path | None:
    """A file of the image. Raises CreateError for a link, which could lead to a file of this host."""
    entry = overlay.lookup(found.paths, name)
    if entry is None:
        return None
    if not stat.S_ISREG(entry.paths[0].lstat().st_mode):
        raise CreateError(f"/{name} of the image is not a plain file", remedy='use actions="init"')
    return entry.paths[0]


def _users(found: LowerDirectories) -> bytes:
    """The image's /etc/passwd. Raises CreateError."""
    return overlay.read(found.paths, USERS) if _find(found, USERS) is not None else b""


def _packages(found: LowerDirectories) -> int:
    """A disk with what the image lacks to run sshd, of this host's Debian. Blocks. Raises CreateError."""
    status = _find(found, "var/lib/dpkg/status")
    if status is None:
        raise CreateError("the image has no sshd, and is not of Debian", remedy='use actions="init"')
    with status.open("rb") as file:
        name = f"sshd-{hashlib.file_digest(file, 'sha256').hexdigest()[:32]}"
    if (disk := disks.kept(name)) is not None:
        return disk
    with locked(folder() / "lock", fcntl.LOCK_EX):
        scratch = Path(tempfile.mkdtemp(prefix="fetch-", dir=folder()))
        try:
            archives = scratch / "archives"
            (archives / "partial").mkdir(parents=True)
            settings = (
                f"Dir::State::status={status}",
                f"Dir::Cache::archives={archives}",
                "Debug::NoLocking=1",
                "APT::Sandbox::User=root",
                "APT::Install-Recommends=0",
            )
            command = ["apt-get", "-qq", "-y", "--download-only", "install", "openssh-server"]
            command[1:1] = [word for setting in settings for word in ("-o", setting)]
            _run(command)
            files = scratch / "files"
            files.mkdir(mode=0o755)
            for archive in sorted(archives.glob("*.deb")):
                _run(["dpkg-deb", "-x", str(archive), str(files)])
            for part in ("usr/share", "lib/systemd", "etc/init.d"):
                shutil.rmtree(files / part, ignore_errors=True)
            for part in ("bin", "lib", "lib64", "sbin"):
                # A directory would hide the image's link to usr.
                if (files / part).is_dir() and any((path / part).is_symlink() for path in found.paths):
                    shutil.copytree(files / part, files / "usr" / part, symlinks=True, dirs_exist_ok=True)
                    shutil.rmtree(files / part)
            return disks.named(name, files)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _run(command: list[str]) -> None:
    """Raises CreateError."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(command, capture_output=True, check=False, env=environment)
    except FileNotFoundError as error:
        raise CreateError(f"there is no {command[0]}, which fetches sshd for the image") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise CreateError(
            f"openssh-server cannot be fetched for the image: {said}",
            remedy='apt-get update; or use actions="init"',
        )
