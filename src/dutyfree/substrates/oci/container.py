"""One container: made from directories, watched, paused, ended and removed.

The runtime runs in the foreground, in a mount namespace that has the overlay (``bundle.c``). PID 1 of the
container is our init, whose stream we hold. When the stream ends, for whatever reason, init exits; then the
runtime removes the container, and the kernel the mounts.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
from pathlib import Path
from time import perf_counter

import anyio
import anyio.to_thread

from dutyfree.contract import Limits, Span
from dutyfree.contract.errors import (
    CleanupError,
    CreateError,
    ExecError,
    SandboxClosed,
    SandboxGone,
    SubstrateError,
)
from dutyfree.engine.launcher.client import BINARY
from dutyfree.engine.layers.lower_directories import LowerDirectories
from dutyfree.engine.sandbox.guest import Guest
from dutyfree.substrates.local.reaper import remove_tree
from dutyfree.substrates.local.runtime_environment import runtime_environment
from dutyfree.substrates.oci import spec
from dutyfree.substrates.oci.config import OciConfig
from dutyfree.substrates.oci.groups import Group
from dutyfree.substrates.oci.runtime import Runtime

SAID = 1000
"""Bytes of the runtime's messages that an error contains."""

STOP_SECONDS = 3.0
"""How long a runtime may take to notice the end of its container."""

CHECK_SECONDS = 10.0
"""How long init may take to say that the container still runs."""

KILLED = 128 + signal.SIGKILL


class Container:
    """One container. Use it once: ``start``, then ``destroy`` in any case. See ``GuestControl``."""

    freezer = True

    def __init__(
        self, name: str, directory: Path, runtime: Runtime, config: OciConfig, group: Group, first_id: int
    ) -> None:
        self.name = name
        self.directory = directory
        self.runtime = runtime
        self.group = group
        self.spans: tuple[Span, ...] = ()
        self._config = config
        self._first_id = first_id
        self._process: asyncio.subprocess.Process | None = None
        self._guest: Guest | None = None
        self._ending: asyncio.Task[None] | None = None
        self._frozen = False

    @property
    def guest(self) -> Guest:
        assert self._guest is not None
        return self._guest

    # --- Start ------------------------------------------------------------------------------------------

    async def start(
        self, lower: LowerDirectories, limits: Limits, marks: dict[str, str], image: Path | None = None
    ) -> None:
        """Raises CreateError. ``marks`` are in the environment of the runtime's process.

        ``image``: a checkpoint of a container with the same lower directories.
        """
        clock = [perf_counter()]
        try:
            groups = await anyio.to_thread.run_sync(self._prepare, lower, limits)
        except OSError as error:
            raise CreateError(f"the bundle of {self.name} cannot be made: {error}") from error
        clock.append(perf_counter())
        ours, theirs = socket.socketpair()
        try:
            with theirs, open(self.directory / "said", "wb") as said:  # noqa: ASYNC230 (in a new directory)
                self._process = await asyncio.create_subprocess_exec(
                    *self._command(lower, limits, groups, image),
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=said,
                    env=runtime_environment(marks),
                    start_new_session=True,  # Ctrl-C must not end it before the sandbox is removed
                )
        except BaseException as error:
            ours.close()
            if isinstance(error, OSError):
                raise CreateError(f"{self.runtime.kind} cannot be started: {error}") from error
            raise
        self._guest = Guest(self.name, ours, self, explain=self.explain)
        if image is None:
            await self._guest.wait_ready(self._config.start_seconds)
        else:
            await self._restored(self._guest)
        if limits.memory is not None and not self.runtime.is_gvisor:
            await anyio.to_thread.run_sync(self.group.watch)
        self.spans = await anyio.to_thread.run_sync(self._measured, clock)

    async def _restored(self, guest: Guest) -> None:
        """Wait until init answers: it said that it is ready before the checkpoint. Raises CreateError."""
        try:
            with anyio.fail_after(self._config.start_seconds):
                await guest.ping()
        except (SubstrateError, SandboxGone, TimeoutError) as error:
            raise CreateError(f"{self.name} was not restored: {error}") from error

    async def checkpoint(self, image: Path) -> None:
        """Write the container to a directory, and end it. Raises CreateError."""
        seconds = self._config.start_seconds
        code, said = await self.runtime.call(
            "checkpoint", "--image-path", str(image), self.name, seconds=seconds
        )
        if code:
            raise CreateError(f"{self.runtime.kind} cannot checkpoint {self.name}: {said}")

    def _prepare(self, lower: LowerDirectories, limits: Limits) -> str:
        # runc enters this directory of ours for an exec; the container's own is in another mount namespace.
        (self.directory / spec.ROOT).mkdir(parents=True)
        if self._config.storage == "disk":
            (self.directory / "disk").mkdir(mode=0o700)
        init = self.directory.parent / spec.INIT
        environment = lower.defaults.environment
        wanted = spec.config(self.runtime, init, self.group.name, self._first_id, limits, environment)
        spec.write(self.directory / "config.json", wanted)
        return self.group.make(limits) if self.runtime.is_gvisor and self.runtime.host.version else ""

    def _command(self, lower: LowerDirectories, limits: Limits, groups: str, image: Path | None) -> list[str]:
        upper = ",".join(("mode=755", *(spec.bounds(limits.disk) if limits.disk is not None else ())))
        return [
            *(
                str(BINARY),
                "bundle",
                str(self.directory),
                str(self._first_id),
                upper,
                self.runtime.hidden,
                groups,
            ),
            *map(str, lower.paths),
            "--",
            *(
                self.runtime.run(self.directory, self.name)
                if image is None
                else self.runtime.restore(self.directory, self.name, image)
            ),
        ]

    def _measured(self, clock: list[float]) -> tuple[Span, ...]:
        """The parts of the creation: our own files, the mounts, and the runtime until init answered."""
        mounted = int((self.directory / "mounted").read_text()) / 1e9
        times = [*clock, mounted, perf_counter()]
        names = ("bundle", "overlay", "start")
        return tuple(
            Span(name, begin - times[0], end - begin)
            for name, begin, end in zip(names, times, times[1:], strict=False)
        )

    async def known(self) -> None:
        """Wait until the runtime answers questions about the container. Raises CreateError."""
        status = self.runtime.status(self.name)
        with anyio.move_on_after(self._config.start_seconds):
            # crun writes it after the start, and tells nobody.
            while status is not None and not await anyio.to_thread.run_sync(status.exists):  # noqa: ASYNC110
                await anyio.sleep(0.001)
            return
        raise CreateError(f"{self.runtime.kind} does not know the container {self.name}")

    # --- While it runs ----------------------------------------------------------------------------------

    async def responds(self) -> bool:
        """Whether the runtime's process is there."""
        return self._process is not None and self._process.returncode is None

    async def is_running(self) -> bool:
        """Whether init answers. A paused container does not."""
        with anyio.move_on_after(CHECK_SECONDS), contextlib.suppress(SubstrateError, SandboxGone):
            return await self.guest.ping()
        return False

    async def freeze(self) -> None:
        await self.known()
        self._frozen = True
        code, said = await self.runtime.call("pause", self.name)
        if code:
            raise ExecError(f"{self.runtime.kind} could not pause {self.name}: {said}")

    async def thaw(self) -> None:
        code, said = await self.runtime.call("resume", self.name)
        # A container that has ended needs none, which its stream says; nor does one that was not paused.
        if code and await self.responds() and not await self.is_running():
            raise ExecError(f"{self.runtime.kind} could not resume {self.name}: {said}")
        self._frozen = False

    async def explain(self) -> Exception:
        """Why the stream of init ended: by a limit, by the agent, or by somebody outside."""
        refused = await anyio.to_thread.run_sync(self.group.refused_processes)
        code: int | None = None
        if self._process is not None:
            with anyio.move_on_after(STOP_SECONDS):
                code = await self._process.wait()
        said = await anyio.to_thread.run_sync(self._said)
        name = f"the container {self.name}"
        if await anyio.to_thread.run_sync(self.group.ran_out_of_memory):
            return SandboxGone(f"{name} was killed by its memory limit")
        if refused and self.runtime.is_gvisor:  # its kernel cannot go on without a thread
            return SandboxGone(f"{name} ended because of its limit of processes")
        if code is None:
            return ExecError(f"the stream to {name} ended, though {self.runtime.kind} still runs")
        if code == KILLED and self.runtime.is_gvisor:
            # Its commands can kill PID 1. If somebody outside kills it, this looks the same, and is rarer: an
            # agent must not get a second attempt whenever it wants one.
            return SandboxGone(f"{name} ended: its PID 1 was killed")
        if code in (KILLED, -signal.SIGKILL, -signal.SIGTERM):
            return SandboxClosed(f"{name} was killed from outside")
        return ExecError(f"{name} ended with code {code}: {said}")

    def _said(self) -> str:
        with contextlib.suppress(OSError):
            return (self.directory / "said").read_bytes()[-SAID:].decode(errors="replace").strip()
        return ""

    # --- End --------------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Destroy it, without waiting for the end."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._give_up())

    async def _give_up(self) -> None:
        with contextlib.suppress(CleanupError):
            await self.destroy()

    async def destroy(self) -> None:
        """Raises CleanupError."""
        if self._guest is not None:
            self._guest.close()
        process = self._process
        if process is not None and process.returncode is None and not self._frozen:
            with anyio.move_on_after(STOP_SECONDS):
                await process.wait()
        try:
            await anyio.to_thread.run_sync(self._kill)
            if process is not None and process.returncode is None:
                # The runtime has seen the end of its container, and cleans up.
                with anyio.move_on_after(self._config.end_seconds):
                    await process.wait()
            if process is not None and process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            await anyio.to_thread.run_sync(self._remove)
        except OSError as error:
            raise CleanupError(f"the container {self.name} was not removed: {error}") from error

    def _kill(self) -> None:
        """Kill what is left in the group: all processes of the container, and gVisor itself."""
        self.group.remove(self._config.end_seconds)

    def _remove(self) -> None:
        self.group.remove(self._config.end_seconds)
        state = self.runtime.root / self.name
        if state.exists():  # the runtime was killed before it could do this
            shutil.rmtree(state, ignore_errors=True)
        for left in self.runtime.root.glob(f"{self.name}*") if self.runtime.is_gvisor else ():
            left.unlink(missing_ok=True)
        remove_tree(str(self.directory))
