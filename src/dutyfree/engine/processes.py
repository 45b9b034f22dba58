"""Commands in the background: what they print is kept within bounds, and they can be found again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Literal

import msgspec

from dutyfree.abilities import Piece
from dutyfree.arguments import check_bytes
from dutyfree.contract import Command, Cut, Observation
from dutyfree.engine import protocol
from dutyfree.engine.channel import Channel
from dutyfree.engine.descriptor import Descriptor
from dutyfree.engine.pacing import Debt
from dutyfree.engine.protocol import Frame
from dutyfree.engine.waiting import Running
from dutyfree.errors import ArgumentError, LimitError
from dutyfree.substrates.output import Collector

LOG = 1 << 20
"""So much of the latest output of each process can be read again."""

ENDED = 64
"""So many processes that have ended can still be found."""


class Log:
    """The latest pieces of what was printed, in the order in which they came."""

    def __init__(self, limit: int = LOG) -> None:
        self._limit = limit
        self._pieces: deque[Piece] = deque()
        self._kept = 0
        self._position = 0
        self._ended = False
        self._more: asyncio.Future[None] | None = None

    def add(self, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        self._pieces.append(Piece(self._position, stream, data))
        self._position += len(data)
        self._kept += len(data)
        while self._kept > self._limit and len(self._pieces) > 1:
            self._kept -= len(self._pieces.popleft().data)
        self._tell()

    def end(self) -> None:
        self._ended = True
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
            if self._ended:
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
        limit: int,
        stdin: Descriptor | None,
    ) -> None:
        self.id = name
        self.command = command
        self._channel = channel
        self._identity = identity
        self._running = running
        self._observe = observe
        self._stdin = stdin
        self._log = Log(min(limit, LOG))
        self._kept = (Collector(limit), Collector(limit))
        self._debt = Debt(self._pay)
        self._seen: Observation | None = None
        running.on_output = self._hear
        running.ended.add_done_callback(self._ended)

    @property
    def running(self) -> bool:
        return not self._running.ended.done()

    def _hear(self, stream: int, data: bytes) -> None:
        self._log.add("stdout" if stream == 1 else "stderr", data)
        self._kept[stream != 1].add(data)
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
            out, err = self._kept
            self._seen = self._seen or msgspec.structs.replace(
                self._observe(ended), cut=Cut(out.cut, err.cut)
            )
            if out.value() or err.value():  # else a refusal has its own words
                self._seen = msgspec.structs.replace(self._seen, stdout=out.value(), stderr=err.value())
        return self._seen

    async def kill(self) -> None:
        if self.running:
            self._channel.kill(self._identity)
            await asyncio.shield(self._running.ended)

    async def signal(self, number: int) -> None:
        """Raises LimitError for a number that is no signal's."""
        if not 0 < number < 65:
            raise LimitError(f"there is no signal {number}")
        if self.running:
            self._channel.tell(Frame.NOTIFY, self._identity, protocol.NUMBER.pack(number))

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

    def add(self, process: NativeProcess) -> None:
        ended = [name for name, one in self._all.items() if not one.running]
        for name in ended[: max(0, len(ended) - ENDED + 1)]:
            del self._all[name]
        self._all[process.id] = process

    def all(self) -> tuple[NativeProcess, ...]:
        return tuple(self._all.values())

    def get(self, name: str) -> NativeProcess:
        """Raises KeyError."""
        return self._all[name]

    def clear(self) -> None:
        self._all.clear()
