"""What a sandbox of the engine can do beyond commands and files: see the abilities in the contract."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from time import perf_counter
from typing import Any

import anyio

from dutyfree.contract import Action, Command, Found, NetworkPolicy, Result, Search
from dutyfree.contract.abilities import Change
from dutyfree.contract.arguments import check_actions, check_command
from dutyfree.contract.errors import ActionError, CollectError, UsageError
from dutyfree.contract.perform import in_order
from dutyfree.engine.launcher import network_policy, protocol
from dutyfree.engine.launcher.protocol import Frame
from dutyfree.engine.sandbox import batch, contents
from dutyfree.engine.sandbox import search as searching
from dutyfree.engine.sandbox.observation import check, observe
from dutyfree.engine.sandbox.pipes import Descriptor
from dutyfree.engine.sandbox.processes import Log, NativeProcess, Registry
from dutyfree.engine.sandbox.services import ServingSandbox
from dutyfree.engine.sandbox.terminal import NativeTerminal, check_size

EARLY = 1 << 16
"""Changes that are kept until a watch has begun."""


class NativeSandbox(ServingSandbox):
    """Terminals, background processes, edits, searches, watches and batches."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._registry = Registry()

    # --- Files --------------------------------------------------------------------------------------

    async def edit(self, path: str, old: bytes, new: bytes) -> None:
        answer = await self._usable().ask(Frame.EDIT, batch.edit_payload(self._path(path), old, new))
        batch.check_edit(answer, path)

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
        asked = Search(
            path, text, regex, ignore_case, tuple(names), tuple(skip), binary, limit, width, timeout
        )
        answer = await self._usable().ask(
            Frame.SEARCH, searching.payload(asked, self._path(path)), timeout=timeout
        )
        return await batch.search_result(asked, answer)

    @asynccontextmanager
    async def watch(
        self, path: str = ".", *, recursive: bool = False
    ) -> AsyncIterator[AsyncIterator[Change]]:
        channel = self._usable()
        flags = protocol.Watch.RECURSIVE if recursive else 0
        arrived: asyncio.Queue[bytes | None] = asyncio.Queue()
        payload = protocol.WATCH.pack(flags, searching.DIRECTORIES) + self._path(path)
        identity, answer = channel.begin(Frame.WATCH, payload, arrived.put_nowait)
        answer.done.add_done_callback(lambda _: arrived.put_nowait(None))
        records = searching.Changes()
        early: list[Change] = []

        async def take() -> tuple[list[Change], bool] | None:
            data = await arrived.get()
            if data is None:
                return None
            # Only what was taken makes room for more: a slow reader's changes wait in the sandbox.
            channel.credit(identity, len(data) + protocol.FRAME_COST)
            return records.add(data)

        async def changes() -> AsyncIterator[Change]:
            for change in early:
                yield change
            while (taken := await take()) is not None:
                for change in taken[0]:
                    yield change

        try:
            begun = False
            while not begun:
                taken = await take()
                if taken is None:
                    check(answer.done.result(), path)
                    return
                early += taken[0]
                if len(early) > EARLY:
                    raise CollectError("the sandbox reports changes of a watch that has not begun")
                begun = taken[1]
            yield changes()
        finally:
            if not answer.done.done():
                channel.kill(identity)

    # --- Processes ----------------------------------------------------------------------------------

    async def start(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bool = False,
    ) -> NativeProcess:
        asked = perf_counter()
        check_command(command, cwd=cwd, env=env)
        channel = self._usable()
        payload = self._payload(command, cwd, env, None, None, protocol.EXEC_STREAM)
        theirs, ours = contents.pipe() if stdin else (None, None)
        try:
            identity, running = channel.exec(payload, theirs)
        except BaseException:
            if ours is not None:
                os.close(ours)
            raise
        process = NativeProcess(
            f"{self.id}-{identity}",
            command,
            channel,
            identity,
            running,
            partial(observe, command, self._usual.user, cwd, running, asked=asked),
            Log(self._head + self._tail, self._registry.shelf),
            None if ours is None else Descriptor(ours),
        )
        self._registry.add(process)
        return process

    async def processes(self) -> tuple[NativeProcess, ...]:
        self._usable()
        return self._registry.all()

    async def attach(self, id: str) -> NativeProcess:  # noqa: A002
        self._usable()
        return self._registry.get(id)

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
    ) -> AsyncIterator[NativeTerminal]:
        check_size(rows, columns)
        asked = perf_counter()
        wanted: Command = ["/bin/sh", "-i"] if command is None else command
        check_command(wanted, cwd=cwd, env=env, user=user)
        channel = self._usable()
        env = {"TERM": self._recipe.env.get("TERM", "xterm-256color"), **(env or {})}
        payload = protocol.WINDOW.pack(rows, columns) + self._payload(
            wanted, cwd, env, None, user, protocol.EXEC_STREAM
        )
        identity, running = channel.exec(payload, kind=Frame.TERMINAL)
        observed = partial(observe, wanted, user or self._usual.user, cwd, running, asked=asked)
        terminal = NativeTerminal(f"{self.id}-{identity}", channel, identity, running, observed)
        try:
            await terminal.opened()
            yield terminal
        finally:
            await terminal.close()

    # --- Batches ------------------------------------------------------------------------------------

    async def batch(
        self, actions: Sequence[Action], *, stop_on_failure: bool = True
    ) -> tuple[Result | Exception, ...]:
        check_actions(actions)
        channel = self._usable()
        if not actions:
            return ()
        try:
            frames = await batch.frames(actions, self._payload, self._path, stop_on_failure)
        except ActionError:  # one that cannot be asked for: those before it are carried out all the same
            return await in_order(self, actions, stop_on_failure=stop_on_failure)
        posted = channel.post_all(frames)  # which closes their descriptors, come what may
        batch.expect(channel, actions, posted)
        try:
            await asyncio.wait([batch.ending(waiting) for _, waiting in posted])
        except asyncio.CancelledError:
            # From the last on, so that none begins because the one before it was killed.
            for identity, waiting in reversed(posted):
                ending = batch.ending(waiting)
                ending.add_done_callback(lambda ended: ended.exception())  # nobody else hears of it
                if not ending.done():
                    channel.kill(identity)
            if not channel.held:
                with anyio.CancelScope(shield=True):
                    await asyncio.wait([batch.ending(waiting) for _, waiting in posted])
            batch.discard([waiting for _, waiting in posted])
            raise
        return await batch.results(actions, [waiting for _, waiting in posted])

    async def reset(self) -> None:
        await super().reset()
        self._registry.clear()


class NetworkedSandbox(NativeSandbox):
    """One whose network can be opened and closed: made by root."""

    async def set_network(self, wanted: NetworkPolicy) -> None:
        try:
            body = network_policy.encode(wanted, self._resolvers)
        except ValueError as error:
            raise UsageError(str(error)) from error
        with self._launcher_request():
            await self._reach.change(body)
