"""The workers of a study: starts a process per substrate, sends it requests, and ends it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
import anyio.to_thread

from dutyfree.contract.errors import CleanupError, Unavailable
from dutyfree.study.messages import Close, Closed, Connection, Failed, Logged, Open, Opened, Reply, Request

STOP_SECONDS = 120.0
"""How long a worker may take to clean up. Then it is killed, and the reapers of its substrate clean up."""

R = TypeVar("R", bound=Reply)


class WorkerDied(Unavailable):
    """A worker ended without an answer."""


class Worker:
    """The study's handle of one worker."""

    def __init__(self, label: str, process: subprocess.Popen[bytes], connection: Connection[Reply]) -> None:
        self.label = label
        self._process = process
        self._connection = connection

    @classmethod
    async def start(cls, label: str) -> Self:
        """Start a process. It must be asked to open its substrate next."""
        loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
        ours, theirs = socket.socketpair()
        with anyio.CancelScope(shield=True), theirs:  # a few ms; otherwise a started process could get lost
            process = await anyio.to_thread.run_sync(_start, theirs, loop)
            connection: Connection[Reply] = await Connection.on(ours, Reply)
        return cls(label, process, connection)

    async def open(self, use: str, options: dict[str, Any]) -> str | None:
        """Open the substrate; its ``host_address``. Raises Unavailable, OptionError and WorkerDied."""
        opened = await self.request(Open(use, options, sys.path), Opened)
        return opened.host_address

    async def request(self, request: Request, answer: type[R]) -> R:
        """Send a request and return its answer. Raises the worker's error, and WorkerDied."""
        try:
            await self._connection.send(request)
        except ConnectionError:
            raise await self._died() from None
        while (reply := await self._connection.receive()) is not None:
            if isinstance(reply, Logged):
                logging.getLogger(reply.name).log(reply.level, "%s", reply.text)
            elif isinstance(reply, Failed):
                raise reply.error()
            else:
                assert isinstance(reply, answer), reply
                return reply
        raise await self._died()

    async def close(self) -> None:
        """Close the substrate and wait until the process has ended. Raises the substrate's error."""
        try:
            with anyio.fail_after(STOP_SECONDS):
                await self.request(Close(), Closed)
        except TimeoutError:
            raise CleanupError(
                f"{self.label} could not be closed within {STOP_SECONDS:g} s: its worker was ended",
                remedy="the records are complete; remove what is left with 'dutyfree gc'",
            ) from None
        await self.stop()

    def hang_up(self) -> None:
        """Let the worker cancel what it does and clean up."""
        self._connection.abort()

    async def stop(self) -> None:
        """Hang up, and wait until the process has ended."""
        self.hang_up()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(_wait, self._process)

    async def _died(self) -> WorkerDied:
        await self.stop()
        code = self._process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return WorkerDied(
            f"the worker process of {self.label} {how}",
            remedy="continue with --resume: earlier trials are kept",
        )


class Workers:
    """All workers of a study. Leaving the context ends them; after an error, they cancel what they do."""

    def __init__(self) -> None:
        self._running: dict[str, Worker] = {}

    def __getitem__(self, label: str) -> Worker:
        return self._running[label]

    @property
    def labels(self) -> list[str]:
        """The labels of the workers that run."""
        return list(self._running)

    async def start(self, labels: Iterable[str]) -> None:
        """Start a process for each label."""
        for label in labels:
            self._running[label] = await Worker.start(label)

    async def renew(self, label: str) -> None:
        """End a worker, and start another one for its label. Raises the substrate's error."""
        await self._running[label].close()
        self._running[label] = await Worker.start(label)

    async def remove(self, label: str) -> None:
        """End one worker, whatever its substrate does."""
        await self._running.pop(label).stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        workers = list(self._running.values())
        if error is not None:
            for worker in workers:
                worker.hang_up()
        failures: list[Exception] = []

        async def end(worker: Worker) -> None:
            try:
                await (worker.close() if error is None else worker.stop())
            except Exception as failure:  # noqa: BLE001 (raised again below)
                failures.append(failure)
                await worker.stop()

        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as group:
                for worker in workers:
                    group.start_soon(end, worker)
        if failures:
            raise failures[0]


def _start(end: socket.socket, loop: str) -> subprocess.Popen[bytes]:
    descriptor = end.fileno()
    return subprocess.Popen(
        # Without -P, modules in the current directory would hide those of Python.
        [sys.executable, "-P", "-m", "dutyfree.study.worker", str(descriptor), loop],
        stdin=subprocess.DEVNULL,
        stdout=2,  # standard output is for the results of the study
        pass_fds=[descriptor],
        start_new_session=True,  # Ctrl-C ends the study, which then ends its workers
    )


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
