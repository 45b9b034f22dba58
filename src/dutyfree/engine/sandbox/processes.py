"""Commands in the background: what they print is kept within bounds, and they can be found again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Literal

import msgspec

from dutyfree.contract import Command, Cut, Observation
from dutyfree.contract.abilities import Piece
from dutyfree.contract.arguments import check_bytes
from dutyfree.contract.errors import ArgumentError, LimitError, UnknownProcess
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.protocol import Frame
from dutyfree.engine.sandbox.channel import Channel
from dutyfree.engine.sandbox.output_credit import Debt
from dutyfree.engine.sandbox.pending import Running
from dutyfree.engine.sandbox.pipes import Descriptor

MOST = 1 << 20
"""Bytes of output that all processes of a sandbox may have kept together, beyond twice what one may have."""

ENDED = 64
"""So many processes that have ended can still be found."""


class Shelf:
    """What the background processes of one sandbox printed, within a bound for all of them together.

    If it is reached, those that have ended lose their output first, the oldest of them before others; then
    whichever has the most.
    """

    def __init__(self) -> None:
        self._limit = MOST
        self._logs: list[Log] = []
        self._kept = 0

    @property
    def kept(self) -> int:
        """Bytes, with what each piece costs."""
        return self._kept

    def add(self, log: Log) -> None:
        self._logs.append(log)
        self._limit = 2 * log.limit + MOST

    def clear(self) -> None:
        self._logs.clear()
        self._kept = 0

    def grew(self, size: int) -> None:
        self._kept += size
        while self._kept > self._limit and (victim := self._victim()) is not None:
            victim.shorten()

    def shrank(self, size: int) -> None:
        self._kept -= size

    def _victim(self) -> Log | None:
        self._logs = [log for log in self._logs if log.kept or not log.ended]
        ended = next((log for log in self._logs if log.ended), None)
        return ended or max(self._logs, key=lambda log: log.kept, default=None)


class Log:
    """The latest pieces of what was printed, in the order in which they came."""

    def __init__(self, limit: int, shelf: Shelf) -> None:
        self.limit = limit
        """Bytes of both streams."""
        self._shelf = shelf
        self._pieces: deque[Piece] = deque()
        self._totals = {"stdout": 0, "stderr": 0}
        self.kept = 0
        """Bytes, with what each piece costs."""
        self._position = 0
        self.ended = False
        self._more: asyncio.Future[None] | None = None
        shelf.add(self)

    def add(self, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        self._pieces.append(Piece(self._position, stream, data))
        self._position += len(data)
        self._totals[stream] += len(data)
        self.kept += len(data) + protocol.FRAME_COST
        while self.kept - len(self._pieces) * protocol.FRAME_COST > self.limit and len(self._pieces) > 1:
            self.shorten()
        self._shelf.grew(len(data) + protocol.FRAME_COST)
        self._tell()

    def shorten(self) -> None:
        """Drop the oldest piece."""
        size = len(self._pieces.popleft().data) + protocol.FRAME_COST
        self.kept -= size
        self._shelf.shrank(size)

    def of(self, stream: str) -> tuple[bytes, int]:
        """What is kept of it, and how much is not."""
        kept = b"".join(piece.data for piece in self._pieces if piece.stream == stream)
        return kept, self._totals[stream] - len(kept)

    def end(self) -> None:
        self.ended = True
        self._tell()

    def _tell(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)
        self._more = None

    def following(self, after: int) -> list[Piece]:
        """All that is kept from position ``after`` on."""
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
            # Several may wait for it.
            await asyncio.shield(self._more)


class NativeProcess:
    """A command in the background."""

    def __init__(
        self,
        name: str,
        command: Command,
        channel: Channel,
        identity: int,
        running: Running,
        observe: Callable[[tuple[int, ...]], Observation],
        log: Log,
        stdin: Descriptor | None,
    ) -> None:
        self.id = name
        self.command = command
        self._channel = channel
        self._identity = identity
        self._running = running
        self._observe = observe
        self._stdin = stdin
        self._log = log
        self._debt = Debt(self._pay)
        self._seen: Observation | None = None
        running.on_output = self._hear
        running.ended.add_done_callback(self._ended)

    @property
    def running(self) -> bool:
        return not self._running.ended.done()

    def _hear(self, stream: int, data: bytes) -> None:
        self._log.add("stdout" if stream == 1 else "stderr", data)
        self._debt.add(len(data) + protocol.FRAME_COST)

    def _pay(self, owed: int) -> None:
        if self.running:
            self._channel.credit(self._identity, owed)

    def _ended(self, _: asyncio.Future[tuple[int, ...]]) -> None:
        self._log.end()
        if self._stdin is not None:
            self._stdin.close()

    def output(self, after: int = 0) -> AsyncIterator[Piece]:
        return self._log.read(after)

    async def wait(self) -> Observation:
        if self._seen is None:
            # Several may wait, and one that is cancelled must not cancel the others.
            ended = await asyncio.shield(self._running.ended)
            self._seen = self._seen or self._observe(ended)
        (out, out_cut), (err, err_cut) = self._log.of("stdout"), self._log.of("stderr")
        if not (out or err or out_cut or err_cut):  # a refusal has its own words
            return self._seen
        return msgspec.structs.replace(self._seen, stdout=out, stderr=err, cut=Cut(out_cut, err_cut))

    async def kill(self) -> None:
        if self.running:
            self._channel.kill(self._identity)
            await asyncio.shield(self._running.ended)

    async def signal(self, number: int) -> None:
        """Raises LimitError for a number that is no signal's."""
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


class Registry:
    """The processes of one sandbox: all that run, and the latest that ended."""

    def __init__(self) -> None:
        self._all: dict[str, NativeProcess] = {}
        self.shelf = Shelf()

    def add(self, process: NativeProcess) -> None:
        ended = [name for name, one in self._all.items() if not one.running]
        for name in ended[: max(0, len(ended) - ENDED + 1)]:
            del self._all[name]
        self._all[process.id] = process

    def all(self) -> tuple[NativeProcess, ...]:
        return tuple(self._all.values())

    def get(self, name: str) -> NativeProcess:
        """Raises UnknownProcess."""
        if name not in self._all:
            raise UnknownProcess(name)
        return self._all[name]

    def clear(self) -> None:
        self._all.clear()
        self.shelf.clear()
