"""Background processes of one sandbox: their output is kept within a bound, and they can be found by id."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from time import perf_counter
from typing import Literal

import msgspec

from dutyfree.contract import Cut, Exec, Observation
from dutyfree.contract.abilities import Piece
from dutyfree.contract.arguments import check_bytes, check_exec
from dutyfree.contract.errors import ArgumentError, LimitError, UnknownProcess
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.protocol import Frame
from dutyfree.engine.sandbox.channel import Channel
from dutyfree.engine.sandbox.commands import CommandRunner
from dutyfree.engine.sandbox.kept import KeptProcess
from dutyfree.engine.sandbox.lifecycle import Lifecycle
from dutyfree.engine.sandbox.observation import observe
from dutyfree.engine.sandbox.output_credit import OutputCredit
from dutyfree.engine.sandbox.pending import PendingCommand
from dutyfree.engine.sandbox.pipes import AsyncDescriptor, create_pipe

SHARED_OUTPUT = 1 << 20
"""Bytes of output that all processes of a sandbox may keep together, plus twice the limit of one process."""

ENDED_MAX = 64
"""Processes that have ended and can still be found by id."""


class OutputBudget:
    """A bound on the kept output of all background processes of one sandbox.

    Above the bound, processes that have ended lose output first, the oldest before the others; then the
    process with the most.
    """

    def __init__(self) -> None:
        self._limit = SHARED_OUTPUT
        self._logs: list[OutputLog] = []
        self._kept = 0

    @property
    def kept(self) -> int:
        """Bytes, with the overhead of each piece."""
        return self._kept

    def add(self, log: OutputLog) -> None:
        self._logs.append(log)
        self._limit = 2 * log.limit + SHARED_OUTPUT

    def clear(self) -> None:
        self._logs.clear()
        self._kept = 0

    def grew(self, size: int) -> None:
        self._kept += size
        while self._kept > self._limit and (victim := self._victim()) is not None:
            victim.shorten()

    def shrank(self, size: int) -> None:
        self._kept -= size

    def _victim(self) -> OutputLog | None:
        self._logs = [log for log in self._logs if log.kept or not log.ended]
        ended = next((log for log in self._logs if log.ended), None)
        return ended or max(self._logs, key=lambda log: log.kept, default=None)


class OutputLog:
    """The latest output of one process, in the order in which it arrived."""

    def __init__(self, limit: int, budget: OutputBudget) -> None:
        self.limit = limit
        """Bytes of both streams together."""
        self._budget = budget
        self._pieces: deque[Piece] = deque()
        self._totals = {"stdout": 0, "stderr": 0}
        self.kept = 0
        """Bytes, with the overhead of each piece."""
        self._position = 0
        self.ended = False
        self._more: asyncio.Future[None] | None = None
        budget.add(self)

    def add(self, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        self._pieces.append(Piece(self._position, stream, data))
        self._position += len(data)
        self._totals[stream] += len(data)
        self.kept += len(data) + protocol.FRAME_COST
        while self.kept - len(self._pieces) * protocol.FRAME_COST > self.limit and len(self._pieces) > 1:
            self.shorten()
        self._budget.grew(len(data) + protocol.FRAME_COST)
        self._wake()

    def shorten(self) -> None:
        """Drop the oldest piece."""
        size = len(self._pieces.popleft().data) + protocol.FRAME_COST
        self.kept -= size
        self._budget.shrank(size)

    def of(self, stream: str) -> tuple[bytes, int]:
        """The kept output of one stream, and the number of bytes that were dropped."""
        kept = b"".join(piece.data for piece in self._pieces if piece.stream == stream)
        return kept, self._totals[stream] - len(kept)

    def end(self) -> None:
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)
        self._more = None

    def following(self, after: int) -> list[Piece]:
        """The kept output from position ``after`` on."""
        found = []
        for piece in reversed(self._pieces):
            if piece.position + len(piece.data) <= after:
                break
            begin = max(0, after - piece.position)
            found.append(
                piece if not begin else Piece(piece.position + begin, piece.stream, piece.data[begin:])
            )
        return found[::-1]

    async def read(self, after: int) -> AsyncIterator[Piece]:
        while True:
            for piece in self.following(after):
                after = piece.position + len(piece.data)
                yield piece
            if self.following(after):
                continue
            if self.ended:
                return
            if self._more is None:
                self._more = asyncio.get_running_loop().create_future()
            # Shielded, because several readers may wait for it.
            await asyncio.shield(self._more)


class NativeProcess:
    """A background process. See ``abilities.ManagedProcess``."""

    def __init__(
        self,
        kept: KeptProcess,
        channel: Channel,
        running: PendingCommand,
        observe: Callable[[tuple[int, ...]], Observation],
        log: OutputLog,
        stdin: AsyncDescriptor | None,
    ) -> None:
        self.kept = kept
        """It on record, for a new owner."""
        self.id = kept.id
        self.command = kept.action.command
        self._channel = channel
        self._identity = kept.identity
        self._running = running
        self._observe = observe
        self._stdin = stdin
        self._log = log
        self._credit = OutputCredit(self._give_credit)
        self._seen: Observation | None = None
        running.on_output = self._add_output
        running.ended.add_done_callback(self._ended)

    @property
    def running(self) -> bool:
        return not self._running.ended.done()

    def _add_output(self, stream: int, data: bytes) -> None:
        self._log.add("stdout" if stream == 1 else "stderr", data)
        self._credit.use(len(data) + protocol.FRAME_COST)

    def _give_credit(self, size: int) -> None:
        if self.running:
            self._channel.credit(self._identity, size)

    def _ended(self, _: asyncio.Future[tuple[int, ...]]) -> None:
        self._log.end()
        if self._stdin is not None:
            self._stdin.close()

    def output(self, after: int = 0) -> AsyncIterator[Piece]:
        return self._log.read(after)

    async def wait(self) -> Observation:
        if self._seen is None:
            # Shielded, because several callers may wait, and one may be cancelled.
            ended = await asyncio.shield(self._running.ended)
            self._seen = self._seen or self._observe(ended)
        (out, out_cut), (err, err_cut) = self._log.of("stdout"), self._log.of("stderr")
        if not (out or err or out_cut or err_cut):  # keeps the message of a command that did not start
            return self._seen
        return msgspec.structs.replace(self._seen, stdout=out, stderr=err, cut=Cut(out_cut, err_cut))

    async def kill(self) -> None:
        if self.running:
            self._channel.kill(self._identity)
            await asyncio.shield(self._running.ended)

    async def signal(self, number: int) -> None:
        """Raises LimitError for a number that is not a signal."""
        if not 0 < number < 65:
            raise LimitError(f"there is no signal {number}")
        if self.running:
            self._channel.tell(Frame.SIGNAL_COMMAND, self._identity, protocol.NUMBER.pack(number))

    async def write(self, data: bytes) -> None:
        if self._stdin is None:
            raise ArgumentError("the process was started without a stdin", remedy="give start(stdin=True)")
        check_bytes(data, "what is written to a process")
        await self._stdin.write(data)

    async def close_stdin(self) -> None:
        if self._stdin is not None:
            self._stdin.close()


class ProcessTable:
    """The background processes of one sandbox: all that run, and the latest that have ended."""

    def __init__(self, lifecycle: Lifecycle, commands: CommandRunner) -> None:
        self._lifecycle = lifecycle
        self._commands = commands
        self._processes: dict[str, NativeProcess] = {}
        self.budget = OutputBudget()

    async def start(self, action: Exec, *, stdin: bool) -> NativeProcess:
        asked = perf_counter()
        check_exec(action)
        channel = self._lifecycle.channel()
        payload = self._commands.encode(action, protocol.EXEC_STREAM)
        theirs, ours = create_pipe() if stdin else (None, None)
        try:
            identity, running = channel.exec(payload, theirs)
        except BaseException:
            if ours is not None:
                os.close(ours)
            raise
        kept = KeptProcess(f"{self._lifecycle.name}-{identity}", identity, action)
        process = self._made(kept, channel, running, asked, None if ours is None else AsyncDescriptor(ours))
        self._add(process)
        return process

    def kept(self) -> tuple[KeptProcess, ...]:
        """Those that run, on record."""
        return tuple(one.kept for one in self._processes.values() if one.running)

    def adopt(self, kept: KeptProcess) -> None:
        """A process that a former owner started. Its output so far is lost, and so is its stdin."""
        channel = self._lifecycle.channel()
        payload = self._commands.encode(kept.action, protocol.EXEC_STREAM)
        self._add(self._made(kept, channel, channel.claim(kept.identity, payload), perf_counter(), None))

    def _made(
        self,
        kept: KeptProcess,
        channel: Channel,
        running: PendingCommand,
        asked: float,
        stdin: AsyncDescriptor | None,
    ) -> NativeProcess:
        return NativeProcess(
            kept,
            channel,
            running,
            partial(observe, kept.action, running, asked=asked, user=self._commands.defaults.user),
            OutputLog(self._commands.output_limit, self.budget),
            stdin,
        )

    def _add(self, process: NativeProcess) -> None:
        ended = [name for name, one in self._processes.items() if not one.running]
        for name in ended[: max(0, len(ended) - ENDED_MAX + 1)]:
            del self._processes[name]
        self._processes[process.id] = process

    def all(self) -> tuple[NativeProcess, ...]:
        self._lifecycle.channel()
        return tuple(self._processes.values())

    def get(self, name: str) -> NativeProcess:
        """Raises UnknownProcess."""
        self._lifecycle.channel()
        if name not in self._processes:
            raise UnknownProcess(name)
        return self._processes[name]

    def clear(self) -> None:
        self._processes.clear()
        self.budget.clear()
