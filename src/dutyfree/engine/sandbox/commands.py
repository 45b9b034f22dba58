"""Commands in one sandbox: encode them for init, run them, stream their output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import AbstractAsyncContextManager
from time import perf_counter

from dutyfree.contract import Exec, Observation
from dutyfree.contract.abilities import Chunk
from dutyfree.contract.arguments import (
    EMPTY,
    NOT_FOUND,
    NUL,
    TOO_LONG,
    UNENCODABLE,
    Unrunnable,
    check_exec,
    not_started,
)
from dutyfree.engine.launcher import protocol
from dutyfree.engine.layers.command_defaults import CommandDefaults
from dutyfree.engine.sandbox import contents, pipes
from dutyfree.engine.sandbox.lifecycle import Lifecycle
from dutyfree.engine.sandbox.observation import observe
from dutyfree.engine.sandbox.pending import CommandNotStarted, PendingCommand
from dutyfree.engine.sandbox.request import Request

TAIL_MAX = 256 << 10
"""Bytes of the end of an output that init keeps at most: it keeps them in the sandbox's own memory."""

CREDIT = 1 << 20
"""Bytes of a streamed output that init may send before we have taken them."""

_STRINGS_MAX = protocol.FRAME_MAX - 256  # more than the kernel accepts


class CommandRunner:
    """Run commands with the defaults of one sandbox, and keep a limited amount of their output."""

    def __init__(self, lifecycle: Lifecycle, defaults: CommandDefaults, output: int) -> None:
        self.defaults = defaults
        self.limit_output(output)
        self._lifecycle = lifecycle

    def limit_output(self, limit: int) -> None:
        """Keep at most ``limit`` bytes of each stream: the beginning and the end."""
        self.output_limit = limit
        self._tail = min(limit // 2, TAIL_MAX)
        self._head = limit - self._tail

    async def exec(self, action: Exec) -> Observation:
        asked = perf_counter()
        check_exec(action)
        channel = self._lifecycle.channel()
        try:
            payload = self.encode(action)
        except Unrunnable as error:
            return error.observation
        given = None if action.stdin is None else await contents.memory_file(action.stdin)
        identity, running = channel.exec(payload, given, action.timeout)
        try:
            await running.ended
        except asyncio.CancelledError:
            await channel.kill_and_wait(identity, running)
            raise
        except CommandNotStarted:
            pass
        return self._observation(action, running, asked)

    def begin(self, action: Exec) -> Request[Observation] | None:
        """Send a command; None if it has input. Raises Unrunnable, UsageError, DispatchError."""
        asked = perf_counter()
        check_exec(action)
        if action.stdin is not None:
            return None
        channel = self._lifecycle.channel()
        identity, running = channel.exec(self.encode(action), None, action.timeout)
        return Request(channel, identity, running, lambda: self._observation(action, running, asked))

    def _observation(self, action: Exec, running: PendingCommand, asked: float) -> Observation:
        """The observation of a command that has ended. Raises the errors of the channel."""
        try:
            ended = running.ended.result()
        except CommandNotStarted as error:
            return not_started(error.message, seconds=perf_counter() - asked)
        return observe(action, running, ended, asked, self.defaults.user)

    async def stream(
        self, action: Exec, source: AsyncIterable[bytes] | None = None
    ) -> AsyncIterator[Chunk | Observation]:
        """Run a command that reads what ``source`` yields, or the action's ``stdin``."""
        asked = perf_counter()
        check_exec(action)
        channel = self._lifecycle.channel()
        arrived: asyncio.Queue[Chunk | None] = asyncio.Queue()
        try:
            payload = self.encode(action, protocol.EXEC_STREAM)
        except Unrunnable as error:
            yield error.observation
            return
        given: AbstractAsyncContextManager[int | None]
        if source is not None:
            given = pipes.fed(source)
        else:
            content = None if action.stdin is None else await contents.memory_file(action.stdin)
            given = contextlib.nullcontext(content)
        async with given as descriptor:
            identity, running = channel.exec(payload, descriptor, action.timeout)
            running.on_output = lambda stream, data: arrived.put_nowait(
                Chunk("stdout" if stream == 1 else "stderr", data)
            )
            running.ended.add_done_callback(lambda _: arrived.put_nowait(None))
            try:
                while (chunk := await arrived.get()) is not None:
                    yield chunk
                    channel.credit(identity, len(chunk.data) + protocol.FRAME_COST)
            finally:
                if not running.ended.done():
                    await channel.kill_and_wait(identity, running)
        yield observe(action, running, running.ended.result(), asked, self.defaults.user)

    def encode(self, action: Exec, flags: int = 0) -> bytes:
        """The payload of an EXEC frame. Raises Unrunnable."""
        command, cwd, env, timeout = action.command, action.cwd, action.env, action.timeout
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else [*command]
        if not argv:
            raise Unrunnable(EMPTY, NOT_FOUND)
        defaults = self.defaults
        count, variables = len(defaults.environment), defaults.packed
        if defaults.directory:
            cwd = posixpath.join(defaults.directory, cwd or "")
        try:
            words = [action.user or defaults.user, cwd or "", *argv]
            if env:
                merged = [f"{name}={value}" for name, value in {**defaults.environment, **env}.items()]
                count, variables = len(merged), b""
                words += merged
            strings = os.fsencode("\0".join(words)) + b"\0" + variables
        except UnicodeEncodeError:
            raise Unrunnable(UNENCODABLE) from None
        if strings.count(b"\0") != 2 + len(argv) + count:
            raise Unrunnable(NUL)
        if len(strings) > _STRINGS_MAX:
            raise Unrunnable(TOO_LONG)
        nanoseconds = 0 if timeout is None else max(1, int(min(protocol.FOREVER, timeout) * 1e9))
        head, tail = (CREDIT, 0) if flags else (self._head, self._tail)
        return protocol.EXEC.pack(nanoseconds, head, tail, flags, len(argv), count) + strings
