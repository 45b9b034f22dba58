"""A sandbox on a server, as the contract and its abilities describe it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import stat
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from dutyfree.contract import (
    Action,
    Command,
    Entry,
    Exec,
    Found,
    List,
    NetworkPolicy,
    Observation,
    Read,
    Recipe,
    Result,
    Search,
    Span,
    Write,
)
from dutyfree.contract.abilities import Change, Chunk
from dutyfree.contract.action import Edit
from dutyfree.contract.arguments import (
    Unrunnable,
    check_actions,
    check_bytes,
    check_count,
    check_exec,
    check_mode,
    check_runnable,
    check_search,
    encoded_path,
)
from dutyfree.contract.entries import KINDS, Links, local_special
from dutyfree.contract.errors import FileError, SandboxClosed, UsageError
from dutyfree.contract.perform import check_edit
from dutyfree.contract.services import ServiceState
from dutyfree.engine.sandbox import tree_stream
from dutyfree.engine.sandbox.pipes import AsyncDescriptor
from dutyfree.substrates.hosted.connection import Connection, PendingCall
from dutyfree.substrates.hosted.processes import HostedProcess
from dutyfree.substrates.hosted.streams import (
    HostedShell,
    HostedStream,
    HostedTerminal,
    closed,
    ended,
    opened,
)
from dutyfree.wire import calls
from dutyfree.wire.calls import BatchResult, Nothing, SandboxInfo
from dutyfree.wire.errors import restore
from dutyfree.wire.recipes import WireRecipe, from_wire

NETWORK = "network"
"""The span of an observation that the way to the server and back took."""

Adopt = Callable[[PendingCall], AbstractAsyncContextManager[Sequence["HostedSandbox"]]]


class HostedSandbox:
    """One sandbox of a server."""

    def __init__(self, connection: Connection, info: SandboxInfo, adopt: Adopt, lease: float) -> None:
        """``adopt`` makes sandboxes of what a call of fork returns, and ends them with its context."""
        self.id = info.id
        self.workdir = info.workdir
        self.spans = info.spans
        self.program = info.program
        self.served = info.served
        self._connection = connection
        self._adopt = adopt
        self._lease = lease
        self._closed = False

    def __repr__(self) -> str:
        return f"<sandbox {self.id}{', closed' if self._closed else ''}>"

    async def _call(self, method: str, arguments: object = Nothing()) -> Any:
        self._check()
        return await self._connection.call(method, self.id, arguments)

    async def _begin(self, method: str, arguments: object = Nothing()) -> PendingCall:
        self._check()
        return await self._connection.begin(method, self.id, arguments)

    def _check(self) -> None:
        if self._closed:
            raise closed(self.id)

    async def close(self) -> None:
        """End the sandbox, and wait until nothing of it is left. Raises CleanupError."""
        if not self._closed:
            self._closed = True
            with anyio.CancelScope(shield=True), contextlib.suppress(SandboxClosed):
                await self._connection.call("release", self.id)

    # --- Commands ---------------------------------------------------------------------------------------

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
        asked = perf_counter()
        try:
            action = _action(command, cwd, env, stdin, timeout, user)
        except Unrunnable as error:
            self._check()
            return error.observation
        return _with_network(await self._call("exec", action), perf_counter() - asked)

    async def stream(
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
        source = stdin if isinstance(stdin, AsyncIterable) else None
        given = stdin if isinstance(stdin, bytes) else None
        try:
            action = _action(command, cwd, env, given if source is None else None, timeout, user)
        except Unrunnable as error:
            yield error.observation
            return
        asked = perf_counter()
        call = await self._begin("stream", calls.Stream(action, source is not None))
        feeding = None if source is None else asyncio.create_task(_feed(call, source))
        try:
            while (chunk := await call.item()) is not None:
                yield chunk
            seen = await call.finish()
            if feeding is not None and feeding.done() and not feeding.cancelled():
                feeding.result()  # raises what the iterable raised
            yield _with_network(seen, perf_counter() - asked)
        finally:
            if feeding is not None:
                feeding.cancel()
                with anyio.CancelScope(shield=True):
                    await asyncio.wait([feeding])
            await call.cancel()

    async def batch(
        self, actions: Sequence[Action], *, stop_on_failure: bool = True
    ) -> tuple[Result | Exception, ...]:
        """Run several actions, one after the other, in one round trip."""
        check_actions(actions)
        asked = perf_counter()
        found = await self._call("batch", calls.Batch(tuple(actions), stop_on_failure))
        seconds = perf_counter() - asked
        inside = sum(one.observation.seconds for one in found if one.observation is not None)
        share = max(0.0, seconds - inside) / max(1, len(found))
        return tuple(_result(one, share) for one in found)

    @asynccontextmanager
    async def shell(self) -> AsyncIterator[HostedShell]:
        """A shell session: variables, functions and the working directory stay between commands."""
        async with ended(await self._begin("shell")) as call:
            await opened(call)
            yield HostedShell(call)

    @asynccontextmanager
    async def terminal(
        self,
        command: Command | None = None,
        *,
        rows: int = 24,
        columns: int = 80,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> AsyncIterator[HostedTerminal]:
        """Run a command, by default a shell, in a terminal."""
        given = None if command is None else _action(command, cwd, env, None, None, user).command
        start = calls.TerminalStart(given, rows, columns, cwd, None if env is None else dict(env), user)
        async with ended(await self._begin("terminal", start)) as call:
            await opened(call)
            yield HostedTerminal(self.id, call)

    async def start(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bool = False,
    ) -> HostedProcess:
        """Start a background process."""
        action = _action(command, cwd, env, None, None, None)
        start = calls.Start(action.command, cwd, None if env is None else dict(env), stdin)
        return await self._process(await self._call("start", start))

    async def processes(self) -> tuple[HostedProcess, ...]:
        """The background processes that run, and the latest that have ended."""
        return tuple([await self._process(info) for info in await self._call("processes")])

    async def attach(self, id: str) -> HostedProcess:  # noqa: A002
        """The background process with this id. Raises UnknownProcess."""
        return await self._process(await self._call("attach", calls.ProcessCall(id)))

    async def _process(self, info: calls.ProcessInfo) -> HostedProcess:
        return await HostedProcess.watched(self._connection, self.id, info)

    # --- Files ------------------------------------------------------------------------------------------

    async def read(self, path: str) -> bytes:
        """The content of a file. Raises ActionError."""
        encoded_path(path)
        found: bytes = await self._call("read", Read(path))
        return found

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Create or replace a file. Raises ActionError."""
        check_mode(mode)
        check_bytes(data)
        encoded_path(path)
        await self._call("write", Write(path, bytes(data), mode))

    async def edit(self, path: str, old: bytes, new: bytes) -> None:
        """Replace ``old``, which must occur exactly once in the file, by ``new``. Raises EditError."""
        check_edit(old, new)
        encoded_path(path)
        await self._call("edit", Edit(path, bytes(old), bytes(new)))

    async def list(self, path: str) -> tuple[Entry, ...]:
        """The entries of a directory, sorted by name. Raises ActionError."""
        encoded_path(path)
        found: tuple[Entry, ...] = await self._call("list", List(path))
        return found

    async def remove(self, path: str) -> None:
        """Remove a file or a directory tree. Raises ActionError."""
        encoded_path(path)
        await self._call("remove", calls.Location(path))

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
        wanted = Search(
            path, text, regex, ignore_case, tuple(names), tuple(skip), binary, limit, width, timeout
        )
        check_search(wanted)
        encoded_path(path)
        found: Found = await self._call("search", wanted)
        return found

    @asynccontextmanager
    async def watch(
        self, path: str = ".", *, recursive: bool = False
    ) -> AsyncIterator[AsyncIterator[Change]]:
        """The changes below a path, from the entry of the context on. Raises ActionError."""
        encoded_path(path)
        async with ended(await self._begin("watch", calls.Watch(path, recursive))) as call:
            await opened(call)
            yield _changes(call)

    async def upload(self, source: Path, path: str) -> None:
        """Copy a local file or tree to ``path``. Raises ActionError."""
        source = Path(source)
        encoded_path(path)
        found = await anyio.to_thread.run_sync(source.lstat)  # raises FileNotFoundError
        if stat.S_IFMT(found.st_mode) not in KINDS:
            raise local_special(source)
        await send_tree(await self._begin("upload", calls.Location(path)), source)

    async def download(self, path: str, target: Path, *, outside_links: bool = False) -> tuple[str, ...]:
        """Copy a file or tree to this machine; returns the links that were left out. Raises ActionError."""
        encoded_path(path)
        links = Links(path, outside=outside_links)
        await _receive_tree(await self._begin("download", calls.Location(path)), Path(target), links)
        return tuple(links.left_out)

    # --- State ------------------------------------------------------------------------------------------

    async def reset(self) -> None:
        """Replace the sandbox by a new one in its first state. Raises CreateError."""
        await self._call("reset")

    async def pause(self) -> None:
        """Freeze all processes."""
        await self._call("pause")

    async def resume(self) -> None:
        """Continue all processes."""
        await self._call("resume")

    async def snapshot(self, name: str | None = None) -> Recipe:
        """Keep the present files on the server, and return a recipe that starts from them.

        Without a name they stay in memory, until ``forget`` or the end of the server. With a name they are
        stored on its disk, until ``forget``; the name belongs to your tenant. Raises UsageError.
        """
        found: WireRecipe = await self._call("snapshot", calls.Snapshot(name))
        return from_wire(found, Path)

    @asynccontextmanager
    async def fork(self, count: int) -> AsyncIterator[Sequence[HostedSandbox]]:
        """Start ``count`` sandboxes from the present files. Raises UsageError, CreateError, ActionError."""
        wanted = calls.Fork(secrets.token_hex(16), check_count(count, 0), self._lease)
        async with self._adopt(await self._begin("fork", wanted)) as children:
            yield children

    # --- Services and ports -----------------------------------------------------------------------------

    async def services(self) -> tuple[ServiceState, ...]:
        """The state of each service, in the order of the recipe."""
        found: tuple[ServiceState, ...] = await self._call("services")
        return found

    async def restart(self, service: str) -> None:
        """End a service if it runs, and start it. Raises UsageError, ActionError."""
        await self._call("restart", calls.ServiceCall(service))

    async def call(
        self,
        service: str,
        arguments: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout: float | None = None,
    ) -> Observation:
        """Run a fork of a service to its end, as ``exec`` runs a command. Raises UsageError, ActionError."""
        asked = perf_counter()
        wanted = calls.ServiceCall(
            service, tuple(arguments), cwd, None if env is None else dict(env), stdin, timeout
        )
        return _with_network(await self._call("call", wanted), perf_counter() - asked)

    async def connect(self, port: int) -> HostedStream:
        """A connection to a server in the sandbox. Raises PortClosed."""
        if not 0 < port < 65536:
            raise UsageError(f"there is no port {port}")
        call = await self._begin("connect", calls.Port(port))
        try:
            await opened(call)
        except BaseException:
            await call.cancel()
            raise
        return HostedStream(call)


class NetworkedHostedSandbox(HostedSandbox):
    """A sandbox whose network policy can change: its server runs as root."""

    async def set_network(self, policy: NetworkPolicy) -> None:
        """Change what the sandbox may reach. Raises UsageError, ActionError, DispatchError."""
        if policy not in ("on", "off"):
            if isinstance(policy, str) or not all(isinstance(entry, str) for entry in policy):
                raise UsageError(f'network must be "on", "off" or a list of strings, not {policy!r}')
            policy = tuple(policy)
        await self._call("set_network", calls.SetNetwork(policy))


# --- Observations -----------------------------------------------------------------------------------


def _action(
    command: Command,
    cwd: str | None,
    env: Mapping[str, str] | None,
    stdin: bytes | None,
    timeout: float | None,
    user: str | None,
) -> Exec:
    """A command as it travels. Raises ArgumentError, and Unrunnable if no process can have it."""
    check_exec(Exec(command, cwd, env, stdin, timeout, user))  # type: ignore[arg-type]  # any sequence of words
    check_runnable(command, cwd=cwd, env=env, user=user)
    words = command if isinstance(command, str) else tuple(command)
    data = None if stdin is None else bytes(stdin)
    return Exec(words, cwd, None if env is None else dict(env), data, timeout, user)


def _with_network(seen: Observation, seconds: float) -> Observation:
    """The observation as this client sees it: with the time of the way to the server and back."""
    network = max(0.0, seconds - seen.seconds)
    if not seen.started or not seen.spans:
        return msgspec.structs.replace(seen, seconds=seconds)
    moved = [Span(span.name, span.start + network / 2, span.seconds) for span in seen.spans]
    spans = (Span(NETWORK, 0.0, network / 2), *moved, Span(NETWORK, seconds - network / 2, network / 2))
    return msgspec.structs.replace(seen, seconds=seconds, spans=spans)


def _result(one: BatchResult, network: float) -> Result | Exception:
    if one.error is not None:
        return restore(one.error)
    if one.observation is not None:
        return _with_network(one.observation, one.observation.seconds + network)
    for value in (one.data, one.entries, one.found):
        if value is not None:
            return value
    return None


async def _changes(call: PendingCall) -> AsyncIterator[Change]:
    while (changes := await call.item()) is not None:
        for change in changes:
            yield change
    await call.finish()


async def _feed(call: PendingCall, source: AsyncIterable[bytes]) -> None:
    """Send what an iterable gives as the input of a command, no faster than the command reads it."""
    try:
        async for data in source:
            check_bytes(data, "what is written to a command")
            if not await call.send(bytes(data)):
                return
    finally:
        await call.end_input()


# --- Trees ------------------------------------------------------------------------------------------


async def send_tree(call: PendingCall, source: Path) -> None:
    """Send a file or tree as the items of a call, and wait for its end. Raises the errors of both."""
    theirs, ours = os.pipe()
    packing = asyncio.create_task(anyio.to_thread.run_sync(partial(_packed, source, ours)))
    pipe = AsyncDescriptor(theirs)
    try:
        while data := await pipe.read(lambda: False):
            if not await call.send(data):
                break
        await call.end_input()
        await asyncio.wait([call.done])
    except BaseException:
        await call.cancel()
        raise
    finally:
        pipe.close()  # the thread gets EPIPE, and ends
        with anyio.CancelScope(shield=True):
            await asyncio.wait([packing])
    error = packing.result()
    if error is not None and not isinstance(error, BrokenPipeError):
        raise error
    await call.finish()


def _packed(source: Path, pipe: int) -> Exception | None:
    try:
        tree_stream.pack(source, pipe)
    except (OSError, ValueError) as error:
        return error
    return None


async def _receive_tree(call: PendingCall, target: Path, links: Links) -> None:
    existed = await anyio.to_thread.run_sync(os.path.lexists, target)
    ours, theirs = os.pipe()
    unpacking = asyncio.create_task(anyio.to_thread.run_sync(partial(_unpacked, ours, target, links)))
    pipe = AsyncDescriptor(theirs)
    try:
        with contextlib.suppress(BrokenPipeError):  # the thread has ended with an error
            while (data := await call.item()) is not None:
                await pipe.write(data)
        pipe.close()
        await asyncio.wait([unpacking])
        error = unpacking.result()
        if isinstance(error, FileError) and error.kind == "too_large":
            raise error
        if call.done.done():
            await call.finish()
        if error is not None:
            raise error
    except BaseException:
        pipe.close()
        with anyio.CancelScope(shield=True):
            await call.cancel()
            await asyncio.wait([unpacking])
            if not existed:
                await anyio.to_thread.run_sync(tree_stream.discard, target)
        raise


def _unpacked(pipe: int, target: Path, links: Links) -> Exception | None:
    try:
        tree_stream.unpack(pipe, target, links)
    except Exception as error:  # noqa: BLE001 (the caller raises it)
        return error
    return None
