"""``InitSandbox``: what every sandbox can do whose PID 1 is our init, however its owner reaches that init.

Its parts do the work, each in a module of its own: ``lifecycle``, ``commands``, ``files``, ``processes``,
``batch``, ``shell``. ``sandbox`` adds what needs the launcher.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any

from dutyfree.contract import Action, Command, Entry, Exec, Found, Observation, Result, Search, Span
from dutyfree.contract.abilities import Change, Chunk
from dutyfree.contract.arguments import check_actions
from dutyfree.contract.errors import ActionError, SubstrateError
from dutyfree.contract.perform import in_order
from dutyfree.engine.layers.command_defaults import WORKDIR, CommandDefaults
from dutyfree.engine.sandbox import batch, contents
from dutyfree.engine.sandbox.commands import CommandRunner
from dutyfree.engine.sandbox.files import SandboxFiles
from dutyfree.engine.sandbox.lifecycle import Lifecycle
from dutyfree.engine.sandbox.processes import NativeProcess, ProcessTable
from dutyfree.engine.sandbox.request import Request
from dutyfree.engine.sandbox.shell import NativeShell, open_shell


def as_exec(command: Command, *arguments: Any, **named: Any) -> Exec:
    """The arguments of a method as an action; ``check_exec`` then checks their types."""
    return Exec(command, *arguments, **named)  # type: ignore[arg-type]  # any sequence of words will do


class InitSandbox:
    """Commands, files and background processes of one sandbox, through its init."""

    def __init__(self, identity: str, lifecycle: Lifecycle, defaults: CommandDefaults, output: int) -> None:
        """``output``: the most bytes of each stream of a command that are kept."""
        self.id = identity
        self.workdir = defaults.directory or WORKDIR
        self.spans: tuple[Span, ...] = ()
        self._lifecycle = lifecycle
        self._commands = CommandRunner(lifecycle, defaults, output)
        self._files = SandboxFiles(lifecycle, defaults.directory)
        self._processes = ProcessTable(lifecycle, self._commands)

    def __repr__(self) -> str:
        state = ""
        if self._lifecycle.closed:
            state = ", closed"
        elif not self.alive:
            state = ", dead"
        elif self._lifecycle.paused:
            state = ", paused"
        return f"<sandbox {self.id}{state}>"

    @property
    def alive(self) -> bool:
        """Whether, as far as we know, it still runs."""
        return self._lifecycle.alive

    @property
    def paused(self) -> bool:
        return self._lifecycle.paused

    # --- Commands -----------------------------------------------------------------------------------

    async def exec(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout: float | None = None,
        user: str | None = None,
    ) -> Observation:
        """Run a command to its end. A command that fails is an observation, not an error."""
        return await self._commands.exec(as_exec(command, cwd, env, stdin, timeout, user))

    def stream(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | AsyncIterable[bytes] | None = None,
        timeout: float | None = None,
        user: str | None = None,
    ) -> AsyncIterator[Chunk | Observation]:
        """Run a command, and yield its output as it arrives; the last item is the observation."""
        if isinstance(stdin, AsyncIterable):
            return self._commands.stream(as_exec(command, cwd, env, None, timeout, user), stdin)
        return self._commands.stream(as_exec(command, cwd, env, stdin, timeout, user))

    async def batch(
        self, actions: Sequence[Action], *, stop_on_failure: bool = True
    ) -> tuple[Result | Exception, ...]:
        """Run several actions, one after the other, in one round trip."""
        check_actions(actions)
        channel = self._lifecycle.channel()
        if not actions:
            return ()
        try:
            encoded = await batch.encode(
                actions, self._commands.encode, self._files.encode_path, stop_on_failure=stop_on_failure
            )
        except ActionError:  # an action that cannot be sent: those before it run all the same
            return await in_order(self, actions, stop_on_failure=stop_on_failure)
        return await batch.run(channel, actions, encoded)

    def shell(self, program: str = "/bin/sh") -> AbstractAsyncContextManager[NativeShell]:
        """A shell session: variables, functions and the working directory stay between commands."""
        return open_shell(self._lifecycle, self._commands, self._files, program)

    async def start(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bool = False,
        user: str | None = None,
    ) -> NativeProcess:
        """Start a background process."""
        return await self._processes.start(as_exec(command, cwd, env, user=user), stdin=stdin)

    async def processes(self) -> tuple[NativeProcess, ...]:
        """The background processes that run, and the latest that have ended."""
        return self._processes.all()

    async def attach(self, id: str) -> NativeProcess:  # noqa: A002
        """The background process with this id. Raises UnknownProcess."""
        return self._processes.get(id)

    # --- Files --------------------------------------------------------------------------------------

    async def read(self, path: str, *, largest: int = contents.LARGEST) -> bytes:
        """The content of a file. Raises ActionError, also for one of more than ``largest`` bytes."""
        return await self._files.read(path, largest)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Create or replace a file. Raises ActionError."""
        await self._files.write(path, data, mode)

    async def edit(self, path: str, old: bytes, new: bytes) -> None:
        """Replace ``old``, which must occur exactly once in the file, by ``new``. Raises EditError."""
        await self._files.edit(path, old, new)

    async def list(self, path: str) -> tuple[Entry, ...]:
        """The entries of a directory, sorted by name. Raises ActionError."""
        return await self._files.list(path)

    async def remove(self, path: str) -> None:
        """Remove a file or a directory tree. Raises ActionError."""
        await self._files.remove(path)

    async def upload(self, source: Path, path: str) -> None:
        """Copy a local file or tree to ``path``. Raises ActionError."""
        await self._files.upload(Path(source), path)

    async def download(self, path: str, target: Path, *, outside_links: bool = False) -> tuple[str, ...]:
        """Copy a file or tree to this machine; returns the links that were left out. Raises ActionError."""
        return await self._files.download(path, Path(target), outside_links=outside_links)

    async def unpack(self, path: str, descriptor: int) -> None:
        """Create the tree that a pipe brings (tree_stream.py) at ``path``. Closes the descriptor.

        Raises ActionError.
        """
        await self._files.unpack(path, descriptor)

    async def pack(self, path: str, descriptor: int) -> None:
        """Write a file or tree into a pipe (tree_stream.py). Closes the descriptor. Raises ActionError."""
        await self._files.pack(path, descriptor)

    async def search(
        self,
        path: str = ".",
        text: str | None = None,
        *,
        regex: bool = False,
        ignore_case: bool = False,
        names: Sequence[str] = (),
        skip: Sequence[str] = (".git",),
        binary: bool = False,
        limit: int = 1000,
        width: int = 500,
        timeout: float | None = 60.0,
    ) -> Found:
        """Search file contents or file names. See ``Search``. Raises ActionError."""
        return await self._files.search(
            Search(path, text, regex, ignore_case, tuple(names), tuple(skip), binary, limit, width, timeout)
        )

    def watch(
        self, path: str = ".", *, recursive: bool = False
    ) -> AbstractAsyncContextManager[AsyncIterator[Change]]:
        """The changes below a path, from the entry of the context on. Raises ActionError."""
        return self._files.watch(path, recursive=recursive)

    # --- Without a task -----------------------------------------------------------------------------

    def begin_exec(self, action: Exec) -> Request[Observation] | None:
        """Send a command for one who does not wait in a task; None if it has input, so that ``exec`` must.

        Raises Unrunnable, and what ``exec`` raises.
        """
        return self._commands.begin(action)

    def begin_read(self, path: str, largest: int = contents.LARGEST) -> Request[bytes]:
        """Send the request to read a file. Raises what ``read`` raises."""
        return self._files.begin_read(path, largest)

    def begin_write(self, path: str, data: bytes, mode: int) -> Request[None] | None:
        """Send the request to write a file; None for a large one. Raises what ``write`` raises."""
        return self._files.begin_write(path, data, mode)

    # --- Pause and end ------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Freeze all processes, also init. Without cgroup v2 by signals, which the processes can see."""
        await self._lifecycle.pause()

    async def resume(self) -> None:
        """Continue all processes."""
        await self._lifecycle.resume()

    def on_death(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` if the sandbox ends by itself before its first reset."""
        self._lifecycle.channel().on_death = callback

    async def end_processes(self) -> None:
        """Kill all processes, and close the channel: the sandbox is not usable any more."""
        with suppress(SubstrateError, ActionError):
            if self._lifecycle.paused:
                await self._lifecycle.resume()
            await self._lifecycle.signal(self._lifecycle.channel(), signal.SIGKILL)
        self.abandon()

    def abandon(self) -> None:
        """Close the channel: the sandbox is not usable any more, and ends. ``close`` waits for the end."""
        self._lifecycle.abandon()

    async def close(self) -> None:
        """Destroy the sandbox, and wait until nothing of it is left. Raises CleanupError."""
        await self._lifecycle.close()
