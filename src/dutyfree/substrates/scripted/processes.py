"""Commands under way in a scripted sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

import anyio
import anyio.lowlevel
import msgspec

from dutyfree.contract import KILLED, Command, Observation
from dutyfree.contract.abilities import Piece
from dutyfree.contract.errors import ArgumentError, InputClosed, LimitError


class Collecting(Protocol):
    id: str

    async def awake(self) -> None: ...

    async def collect(
        self, process: ScriptedProcess, answer: Observation, dispatch: float
    ) -> Observation: ...


class ScriptedProcess:
    """A command under way; it "runs" whether or not somebody waits."""

    def __init__(
        self,
        sandbox: Collecting,
        command: Command,
        answer: Observation,
        dispatch: float,
        answered: Callable[[bytes], Observation] | None = None,
    ) -> None:
        self.id = f"{sandbox.id}-{id(self):x}"
        self.command = command
        self._sandbox = sandbox
        self._answer = answer
        self._answered = answered
        self._input = b""
        self._dispatch = dispatch
        self._begun = anyio.current_time()
        self._changed = anyio.Event()
        self._stopped = False

    @property
    def running(self) -> bool:
        return not self._stopped and anyio.current_time() < self._begun + self._answer.seconds

    async def wait(self) -> Observation:
        while self.running:
            with anyio.move_on_after(self._begun + self._answer.seconds - anyio.current_time()):
                await self._changed.wait()
        await self._sandbox.awake()
        return await self._sandbox.collect(self, self._answer, self._dispatch)

    async def kill(self) -> None:
        await self.signal(9)

    async def signal(self, number: int) -> None:
        if not 0 < number < 65:
            raise LimitError(f"there is no signal {number}")
        await anyio.lowlevel.checkpoint()
        self.stop(number)

    def stop(self, number: int = 9) -> None:
        if self.running:
            lived = anyio.current_time() - self._begun
            self._answer = msgspec.structs.replace(killed(self._answer, number), seconds=lived)
            self._stopped = True
            self._wake()

    async def output(self, after: int = 0) -> AsyncIterator[Piece]:
        """All at its end, as the whole answer is known only then."""
        seen = await self.wait()
        for position, stream, data in (
            (0, "stdout", seen.stdout),
            (len(seen.stdout), "stderr", seen.stderr),
        ):
            begin = max(0, after - position)
            if data[begin:]:
                yield Piece(position + begin, stream, data[begin:])  # type: ignore[arg-type]

    async def write(self, data: bytes) -> None:
        await anyio.lowlevel.checkpoint()
        if self._answered is None:
            raise ArgumentError("the process was started without a stdin", remedy="give start(stdin=True)")
        if not self.running:
            raise InputClosed("the process has ended")
        self._input += data

    async def close_stdin(self) -> None:
        await anyio.lowlevel.checkpoint()
        if self._answered is not None and self.running:
            self._answer = self._answered(self._input)
            self._begun = anyio.current_time()
            self._wake()
        self._answered = None

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def killed(answer: Observation, number: int = 9) -> Observation:
    return msgspec.structs.replace(answer, exit_code=KILLED + number, signal=number)
