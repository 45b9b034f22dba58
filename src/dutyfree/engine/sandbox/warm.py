"""One service in one sandbox: its process, what it says, and how it ended."""

from __future__ import annotations

import asyncio
import os
from functools import partial

import anyio

from dutyfree.contract.arguments import NOT_RUNNABLE
from dutyfree.contract.services import Service, ServiceState
from dutyfree.engine.launcher import protocol
from dutyfree.engine.sandbox.channel import Channel
from dutyfree.engine.sandbox.observation import REFUSED, final_code
from dutyfree.engine.sandbox.output_credit import Debt
from dutyfree.engine.sandbox.pending import Running, Unstarted

TAIL = 2000
"""Bytes of a service's output that are kept, and told."""


class Warm:
    def __init__(self, service: Service) -> None:
        self.service = service
        self.lock = anyio.Lock()
        """Of whoever starts it."""
        self.forget()

    def forget(self) -> None:
        """Its sandbox is another one now."""
        self.identity = 0
        self.settled = False
        """Whether it became ready."""
        self._starts = 0
        self._running: Running | None = None
        self._tail = b""

    def began(self, channel: Channel, identity: int, running: Running) -> None:
        self.identity, self._running, self._channel = identity, running, channel
        self.settled = False
        self._starts += 1
        self._tail = b""
        self._debt = Debt(partial(self._pay, running))
        self._unmatched = {1: b"", 2: b""}
        self._wanted = (self.service.ready.line or "").encode()
        self.printed = asyncio.get_running_loop().create_future()
        """Done when it has printed the line that it is ready by."""
        running.on_output = self._hear

    def _hear(self, stream: int, data: bytes) -> None:
        self._tail = (self._tail + data)[-TAIL:]
        if not self.printed.done():
            seen = self._unmatched[stream] + data
            self._unmatched[stream] = seen[max(0, len(seen) - len(self._wanted) + 1) :]
            if self._wanted in seen:
                self.printed.set_result(None)
        self._debt.add(len(data) + protocol.FRAME_COST)

    def _pay(self, running: Running, owed: int) -> None:
        if running is self._running and self.running:
            self._channel.credit(self.identity, owed)

    @property
    def running(self) -> bool:
        return self._running is not None and not self._running.ended.done()

    async def wait(self) -> None:
        """Until it has ended. Raises SubstrateError if its sandbox has."""
        if self._running is not None:
            await asyncio.shield(self._running.ended)

    async def end(self) -> None:
        if self.running:
            self._channel.kill(self.identity)
            await self.wait()

    def said(self) -> str:
        """The end of what it printed, or why it did not run."""
        text = self._tail.decode(errors="replace").strip()
        return text or self._refusal()

    def _refusal(self) -> str:
        if self._running is None or not self._running.ended.done():
            return ""
        if error := self._running.ended.exception():
            return error.message if isinstance(error, Unstarted) else ""
        status, flags = self._running.ended.result()[:2]
        return os.strerror(status) if flags & REFUSED else ""

    def exit_code(self) -> int | None:
        """127 or 126 if it could not be started; None while it runs, or if its sandbox is gone."""
        if self._running is None or not self._running.ended.done():
            return None
        if error := self._running.ended.exception():
            return NOT_RUNNABLE if isinstance(error, Unstarted) else None
        return final_code(*self._running.ended.result()[:2])

    def state(self) -> ServiceState:
        return ServiceState(self.service.name, self.running, self._starts, self.exit_code(), self._tail)
