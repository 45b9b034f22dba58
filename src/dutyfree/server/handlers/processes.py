"""The calls about background processes."""

from __future__ import annotations

from dutyfree.contract import Observation
from dutyfree.engine.sandbox.processes import NativeProcess
from dutyfree.server.handlers.registry import Context, handles
from dutyfree.wire import calls
from dutyfree.wire.calls import Nothing, ProcessCall, ProcessInfo


@handles
async def start(context: Context, wanted: calls.Start) -> ProcessInfo:
    held = context.held
    process = await held.sandbox.start(wanted.command, cwd=wanted.cwd, env=wanted.env, stdin=wanted.stdin)
    await context.service.sandboxes.save(held)
    return _process_info(process)


def _process_info(process: NativeProcess) -> ProcessInfo:
    command = process.command if isinstance(process.command, str) else tuple(process.command)
    return ProcessInfo(process.id, command, process.running)


@handles
async def processes(context: Context, _: Nothing) -> list[ProcessInfo]:
    return [_process_info(process) for process in await context.held.sandbox.processes()]


@handles
async def attach(context: Context, wanted: ProcessCall) -> ProcessInfo:
    return _process_info(await context.held.sandbox.attach(wanted.process))


@handles
async def process_wait(context: Context, wanted: ProcessCall) -> Observation:
    return await (await context.held.sandbox.attach(wanted.process)).wait()


@handles
async def process_kill(context: Context, wanted: ProcessCall) -> None:
    await (await context.held.sandbox.attach(wanted.process)).kill()


@handles
async def process_signal(context: Context, wanted: ProcessCall) -> None:
    await (await context.held.sandbox.attach(wanted.process)).signal(wanted.signal)


@handles
async def process_write(context: Context, wanted: ProcessCall) -> None:
    await (await context.held.sandbox.attach(wanted.process)).write(wanted.data)


@handles
async def process_close(context: Context, wanted: ProcessCall) -> None:
    await (await context.held.sandbox.attach(wanted.process)).close_stdin()


@handles
async def process_output(context: Context, wanted: ProcessCall) -> None:
    process = await context.held.sandbox.attach(wanted.process)
    async for piece in process.output(wanted.after):
        await context.send(piece)
