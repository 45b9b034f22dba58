"""The process of one substrate in a study: ``python -m dutyfree.study.worker DESCRIPTOR EVENT_LOOP``.

Each substrate has a process of its own, so that the background work, the memory and the threads of one do not
disturb the measurements of another. This process imports little: ``bare`` starts its commands from here.

The study asks over a socket (``messages``), and this process answers. If the socket closes, the study was
stopped or killed: the worker cancels what it does, cleans up and ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import traceback
from contextlib import AsyncExitStack, suppress

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from dutyfree import substrates
from dutyfree.contract import Limits, Substrate
from dutyfree.contract.abilities import Settling, Warmed
from dutyfree.contract.errors import SubstrateError
from dutyfree.study import trial
from dutyfree.study.messages import (
    Close,
    Closed,
    Connection,
    Ended,
    Failed,
    Logged,
    Open,
    Opened,
    Prepare,
    Prepared,
    Reply,
    Request,
    RunBatch,
)
from dutyfree.study.plan import Batch
from dutyfree.study.records import Trial
from dutyfree.workloads.workload import Workload

SETTLE_SECONDS = 60.0
"""How long the study waits for the background work of a substrate."""


ORPHAN_SECONDS = 150
"""How long the clean-up may take after the study has gone; longer than a living study waits for it."""


def main(descriptor: int, event_loop: str, orphan_seconds: int = ORPHAN_SECONDS) -> None:
    """Serve the study at the other end of a socket until it has no more requests."""
    os.set_inheritable(descriptor, False)
    factory = None
    if event_loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve(socket.socket(fileno=descriptor), orphan_seconds))


async def _serve(end: socket.socket, orphan_seconds: int) -> None:
    connection: Connection[Request] = await Connection.on(end, Request)
    given, requests = anyio.create_memory_object_stream[Request](1)

    async def read() -> None:
        while (request := await connection.receive()) is not None:
            await given.send(request)
        # A killed study cannot end a worker whose substrate hangs, so the kernel does.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(orphan_seconds)
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group, requests, given:
        group.start_soon(read)
        await _Worker(connection, requests).serve()
        group.cancel_scope.cancel()
    await connection.close()


class _Worker:
    """Answers the requests of a study about one substrate."""

    def __init__(self, connection: Connection[Request], requests: MemoryObjectReceiveStream[Request]) -> None:
        self._connection = connection
        self._requests = requests
        self._log = _LogHandler(connection)
        self._workloads: dict[str, Workload] = {}

    async def serve(self) -> None:
        logger = logging.getLogger("dutyfree")
        logger.setLevel(logging.INFO)
        logger.addHandler(self._log)
        try:
            async with AsyncExitStack() as stack:
                opening = await self._requests.receive()
                assert isinstance(opening, Open)
                sys.path[:] = opening.path
                opened = substrates.open(opening.use, **opening.options)
                substrate = await stack.enter_async_context(opened)
                await self._send(Opened(substrate.host_address))
                async for request in self._requests:
                    if isinstance(request, Close):
                        break
                    await self._send(await self._answer(substrate, request))
        except Exception as error:  # noqa: BLE001 (a third-party substrate may raise anything)
            await self._send(_failed(error))
        else:
            await self._send(Closed())

    async def _send(self, reply: Reply) -> None:
        # If the study is gone, the reader notices it too, and cancels everything.
        with suppress(ConnectionError):
            await self._connection.send(reply)

    async def _answer(self, substrate: Substrate, request: Request) -> Reply:
        try:
            match request:
                case Prepare():
                    return Prepared(await self._prepare(substrate, request.workloads, request.limits))
                case RunBatch():
                    self._log.setLevel(logging.WARNING)  # nothing must disturb the measurement
                    return Ended(await self._run(substrate, request.batch, request.timeout))
        except Exception as error:  # noqa: BLE001 (as above)
            return _failed(error)
        raise AssertionError(request)

    async def _prepare(
        self, substrate: Substrate, workloads: list[Workload], limits: Limits | None
    ) -> dict[str, str]:
        if isinstance(substrate, Warmed):
            workloads = [workload.with_setup_in_recipe() for workload in workloads]
        for workload in workloads:
            await substrate.prepare(workload.recipe)
        facts = await substrate.facts()
        limited = (workload.limited(limits, facts.get("enforces")) for workload in workloads)
        self._workloads = {workload.name: workload for workload in limited}
        return facts

    async def _run(self, substrate: Substrate, batch: Batch, timeout: float) -> list[Trial]:
        workload = self._workloads[batch.workload]
        ended: list[Trial] = []

        async def one(index: int) -> None:
            ended.append(await trial.run(substrate, workload, batch, index, timeout))

        async with anyio.create_task_group() as group:
            for index in batch.indices:
                group.start_soon(one, index)
        if isinstance(substrate, Settling):
            # Its background work must not disturb the next trial, which may be another substrate's.
            with anyio.move_on_after(SETTLE_SECONDS), suppress(SubstrateError):
                await substrate.settle()
        return ended


def _failed(error: Exception) -> Failed:
    from dutyfree.contract.errors import DutyfreeError

    if not isinstance(error, DutyfreeError):
        traceback.print_exception(error)
    return Failed.of(error)


class _LogHandler(logging.Handler):
    """Sends what the library logs to the study."""

    def __init__(self, connection: Connection[Request]) -> None:
        super().__init__(logging.INFO)
        self._connection = connection
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        line = Logged(record.name, record.levelno, record.getMessage())
        self._loop.call_soon_threadsafe(self._connection.write, line)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
