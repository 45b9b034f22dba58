"""The calls about the services of a sandbox and the servers on its ports."""

from __future__ import annotations

import contextlib

import anyio
from anyio.abc import ByteStream

from dutyfree.contract import Observation
from dutyfree.contract.services import ServiceState
from dutyfree.server.handlers.item_pipe import CHUNK
from dutyfree.server.handlers.registry import Context, handles
from dutyfree.wire import calls
from dutyfree.wire.calls import Nothing


@handles
async def services(context: Context, _: Nothing) -> tuple[ServiceState, ...]:
    return await context.held.sandbox.services()


@handles
async def restart(context: Context, wanted: calls.ServiceCall) -> None:
    await context.held.sandbox.restart(wanted.service)


@handles
async def call(context: Context, wanted: calls.ServiceCall) -> Observation:
    return await context.held.sandbox.call(
        wanted.service,
        wanted.arguments,
        cwd=wanted.cwd,
        env=wanted.env,
        stdin=wanted.stdin,
        timeout=wanted.timeout,
    )


@handles
async def connect(context: Context, wanted: calls.Port) -> None:
    """Relay a connection to a server in the sandbox, until both sides have ended."""
    async with await context.held.sandbox.connect(wanted.port) as inner:
        await context.send(b"")  # it is connected
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_send_to_port, context, inner)
            with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                while True:
                    await context.send(await inner.receive(CHUNK))
            tasks.cancel_scope.cancel()


async def _send_to_port(context: Context, inner: ByteStream) -> None:
    with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        while (item := await context.receive()) is not None:
            await inner.send(item)
        await inner.send_eof()
