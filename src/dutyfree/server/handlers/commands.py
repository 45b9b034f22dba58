"""The calls that run commands and wait for them: exec, streams, batches, shells and terminals."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anyio

from dutyfree.contract import Exec, Found, Observation
from dutyfree.contract.errors import ActionError, DispatchError, SubstrateError, UsageError
from dutyfree.engine.sandbox.shell import NativeShell
from dutyfree.engine.sandbox.terminal import NativeTerminal
from dutyfree.server.call_events import acted
from dutyfree.server.handlers.item_pipe import first_error
from dutyfree.server.handlers.registry import Context, handles
from dutyfree.wire import calls
from dutyfree.wire.arguments import LARGEST_BATCH
from dutyfree.wire.calls import BatchResult, Nothing, ShellAnswer
from dutyfree.wire.errors import describe


@handles
async def exec_(context: Context, action: Exec) -> Observation:
    sandbox = context.held.sandbox
    return await sandbox.exec(
        action.command,
        cwd=action.cwd,
        env=action.env,
        stdin=action.stdin,
        timeout=action.timeout,
        user=action.user,
    )


@handles
async def stream(context: Context, wanted: calls.Stream) -> Observation:
    action = wanted.action
    chunks = context.held.sandbox.stream(
        action.command,
        cwd=action.cwd,
        env=action.env,
        stdin=_items(context) if wanted.fed else action.stdin,
        timeout=action.timeout,
        user=action.user,
    )
    async with contextlib.aclosing(chunks):  # type: ignore[type-var]  # an async generator
        async for item in chunks:
            if isinstance(item, Observation):
                return item
            await context.send(item)
    raise AssertionError("the last item of a stream is its observation")


async def _items(context: Context) -> AsyncIterator[bytes]:
    while (item := await context.receive()) is not None:
        yield item


@handles
async def batch(context: Context, wanted: calls.Batch) -> list[BatchResult]:
    if len(wanted.actions) > LARGEST_BATCH:
        raise UsageError(f"a batch of {len(wanted.actions)} actions: it may have {LARGEST_BATCH}")
    found = await context.held.sandbox.batch(wanted.actions, stop_on_failure=wanted.stop_on_failure)
    return [_batch_result(one) for one in found]


def _batch_result(result: object) -> BatchResult:
    match result:
        case Exception():
            return BatchResult(error=describe(result))
        case Observation():
            return BatchResult(observation=result)
        case bytes():
            return BatchResult(data=result)
        case Found():
            return BatchResult(found=result)
        case tuple():
            return BatchResult(entries=result)
    return BatchResult()


@handles
async def shell(context: Context, _: Nothing) -> None:
    """Run commands as they come, one after the other, until the input ends."""
    async with context.held.sandbox.shell() as session:
        await context.send(ShellAnswer())
        coming = asyncio.ensure_future(context.receive())
        try:
            while (command := await coming) is not None:
                coming = asyncio.ensure_future(context.receive())
                if not command.interrupt:  # otherwise it came after the end of its command
                    await context.send(await _run_in_shell(context, session, command, coming))
        finally:
            coming.cancel()


async def _run_in_shell(
    context: Context, session: NativeShell, command: calls.ShellCommand, interrupted: asyncio.Future[Any]
) -> ShellAnswer:
    work = session.run(command.command, timeout=command.timeout)
    running = asyncio.ensure_future(
        acted(context.service.events, "shell_run", command.command, context.held, work)
    )
    try:
        await asyncio.wait([running, interrupted], return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            return ShellAnswer(error=describe(DispatchError("the command was interrupted")))
        return ShellAnswer(running.result())
    except (ActionError, SubstrateError, UsageError) as error:
        return ShellAnswer(error=describe(error))
    finally:
        running.cancel()
        await asyncio.wait([running])


@handles
async def terminal(context: Context, wanted: calls.TerminalStart) -> Observation:
    opening = context.held.sandbox.terminal(
        wanted.command,
        rows=wanted.rows,
        columns=wanted.columns,
        cwd=wanted.cwd,
        env=wanted.env,
        user=wanted.user,
    )
    async with opening as opened:
        await context.send(b"")  # it is open
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_type, context, opened)
                while data := await opened.read():
                    await context.send(data)
                seen = await opened.wait()
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:  # the sandbox may end before its terminal
            raise first_error(group) from group
        return seen


async def _type(context: Context, opened: NativeTerminal) -> None:
    """Do what the client does with a terminal. The end of its input kills the command."""
    while (item := await context.receive()) is not None:
        if item.size is not None:
            await opened.resize(*item.size)
        if item.kill:
            await opened.kill()
        if item.data:
            with contextlib.suppress(BrokenPipeError):
                await opened.write(item.data)
    await opened.kill()
