"""Carry out the calls of clients. One function for each call of ``wire.calls.CALLS``, by its name."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeVar

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import ByteStream

from dutyfree.contract import Edit, Exec, Found, Limits, List, Observation, Read, Search, Write
from dutyfree.contract.errors import (
    ActionError,
    DispatchError,
    Exhausted,
    LimitError,
    RecipeError,
    SubstrateError,
    UsageError,
)
from dutyfree.contract.services import ServiceState
from dutyfree.engine.host import capacity
from dutyfree.engine.layers.memory_layers import SNAPSHOT_SCHEME
from dutyfree.engine.sandbox.processes import NativeProcess
from dutyfree.engine.sandbox.sandbox import NativeSandbox, NetworkedSandbox
from dutyfree.engine.sandbox.shell import NativeShell
from dutyfree.engine.sandbox.terminal import NativeTerminal
from dutyfree.server import named_snapshots, tenant_rules
from dutyfree.server.admission import Demand, given_back
from dutyfree.server.bodies import LARGEST_REQUEST
from dutyfree.server.events import acted, recorded
from dutyfree.server.files import LARGEST_TREE
from dutyfree.server.sandboxes import Held
from dutyfree.server.service import Service
from dutyfree.wire import calls, codec
from dutyfree.wire.calls import BatchResult, Nothing, ProcessCall, ProcessInfo, SandboxInfo, ShellAnswer
from dutyfree.wire.errors import describe
from dutyfree.wire.recipes import WireRecipe, to_wire

T = TypeVar("T")

LARGEST_GROUP = 4096
"""Sandboxes that one request may ask for."""
LARGEST_LIST = 16384
"""Sandboxes, recipes or files that one request may name."""
LARGEST_BATCH = 4096
"""Actions of one batch."""
PATIENCE = 60.0
"""Seconds that a creation waits for room, before the client is told to come back later."""

_CHUNK = 64 << 10


class Context(Protocol):
    """A call that runs: for whom, in which sandbox, and its streams."""

    @property
    def service(self) -> Service: ...

    @property
    def tenant(self) -> str: ...

    @property
    def held(self) -> Held:
        """The sandbox of the call. Raises SandboxClosed."""

    @property
    def sandbox_id(self) -> str:
        """The id that the call names; empty for none."""

    async def send(self, item: object) -> None:
        """Send an item to the client, when it has room."""

    async def receive(self) -> Any:
        """The next item of the client; None at the end of its input."""


class DirectCall:
    """The context of a call that a route of the server makes. It has no items."""

    def __init__(self, service: Service, tenant: str, sandbox: str = "") -> None:
        self.service = service
        self.tenant = tenant
        self.sandbox_id = sandbox

    @property
    def held(self) -> Held:
        return self.service.sandboxes.get(self.tenant, self.sandbox_id)

    async def send(self, _item: object) -> None:
        raise AssertionError("this call has no items")

    async def receive(self) -> Any:
        raise AssertionError("this call has no items")


Handler = Callable[[Context, Any], Awaitable[Any]]
HANDLERS: dict[str, Handler] = {}


def _handles(function: Handler) -> Handler:
    HANDLERS[function.__name__.rstrip("_")] = recorded(function)
    return function


# --- The node ---------------------------------------------------------------------------------------


@_handles
async def create(context: Context, wanted: calls.Create) -> list[SandboxInfo]:
    service = context.service
    tenant_rules.check_labels(wanted.labels)
    tenant_rules.check_key(wanted.key)
    limits = tenant_rules.allowed_limits(context.tenant, wanted.limits, networked=service.networked)
    recipe = await service.recipe(context.tenant, wanted.recipe)

    @asynccontextmanager
    async def one() -> AsyncIterator[Sequence[NativeSandbox]]:
        async with service.native.sandbox(recipe, limits=limits, labels=wanted.labels) as sandbox:
            yield (sandbox,)

    def several() -> AbstractAsyncContextManager[Sequence[NativeSandbox]]:
        return service.native.group(recipe, wanted.count or 0, limits=limits, labels=wanted.labels)

    demand = demand_of(service, limits, 1 if wanted.count is None else wanted.count)
    held = await in_time(
        wanted.patience,
        service.sandboxes.create(
            context.tenant,
            wanted.key,
            codec.encode(msgspec.structs.replace(wanted, patience=None)),
            admitted(context, demand, one if wanted.count is None else several, wanted.patience),
            wanted.labels,
            wanted.lease,
            demand_of(service, limits, 1),
        ),
    )
    return [info(one) for one in held]


async def in_time(patience: float | None, creating: Awaitable[T]) -> T:
    """What is created, if that takes no longer than the client is patient. Raises Exhausted."""
    if patience is not None and not patience > 0:
        raise LimitError(f"patience must be > 0, not {patience:g}")
    try:
        async with asyncio.timeout(patience):
            return await creating
    except TimeoutError:
        raise Exhausted(
            f"no sandbox within {patience:g} s, which is the patience of the request",
            remedy="give the request more time, or end some sandboxes",
            numbers={"retry_after": 1.0},
        ) from None


Enter = Callable[[], AbstractAsyncContextManager[Sequence[NativeSandbox]]]


def demand_of(service: Service, limits: Limits | None, count: int) -> Demand:
    """What a request counts: by its limits, or by those that the engine sets. Raises LimitError."""
    if not 0 <= count <= LARGEST_GROUP:
        raise LimitError(f"a request may be for 0 to {LARGEST_GROUP} sandboxes, not {count}")
    limits = limits or service.native.node.options.limits
    memory = capacity.share_of_memory() if limits.memory is None else limits.memory
    cpus = float(os.cpu_count() or 1) if limits.cpus is None else limits.cpus
    return Demand(count, count * memory, count * cpus)


def admitted(context: Context, demand: Demand, create: Enter, patience: float | None = None) -> Enter:
    """The same sandboxes, as soon as the tenant may have them."""
    seconds = PATIENCE if patience is None else min(patience, PATIENCE)

    @asynccontextmanager
    async def enter() -> AsyncIterator[Sequence[NativeSandbox]]:
        release = await context.service.admission.admit(context.tenant, demand, seconds)
        with given_back(release):
            async with create() as sandboxes:
                yield sandboxes

    return enter


def info(held: Held) -> SandboxInfo:
    """What a client gets to know about a sandbox."""
    sandbox = held.sandbox
    return SandboxInfo(
        id=held.id,
        workdir=sandbox.workdir,
        spans=sandbox.spans,
        program=tuple(sandbox.program),
        served=sandbox.served,
        can_set_network=isinstance(sandbox, NetworkedSandbox),
        labels=held.labels,
        created=held.created,
        expires=held.expires,
    )


@_handles
async def keep_alive(context: Context, wanted: calls.KeepAlive) -> list[str]:
    gone = []
    _check_many(wanted.sandboxes)
    for name in wanted.sandboxes:
        try:
            held = context.service.sandboxes.get(context.tenant, name)
        except SubstrateError:
            gone.append(name)
        else:
            context.service.sandboxes.keep_alive(held, wanted.lease)
    return gone


@_handles
async def sandboxes(context: Context, _: Nothing) -> list[str]:
    return [held.id for held in context.service.sandboxes.of(context.tenant)]


@_handles
async def prepare(context: Context, wanted: WireRecipe) -> None:
    await context.service.native.prepare(await context.service.recipe(context.tenant, wanted))


@_handles
async def prefetch(context: Context, wanted: calls.Prefetch) -> None:
    _check_many(wanted.recipes)
    demand_of(context.service, None, wanted.count)
    recipes = [await context.service.recipe(context.tenant, one) for one in wanted.recipes]
    await context.service.native.prefetch(recipes, wanted.count)


@_handles
async def facts(context: Context, _: Nothing) -> dict[str, str]:
    return await context.service.facts()


@_handles
async def missing(context: Context, wanted: calls.Files) -> list[str]:
    _check_many(wanted.digests)
    return await context.service.files.missing(context.tenant, wanted.digests)


def _check_many(names: Sequence[object]) -> None:
    """Raises UsageError for a list that would keep the server busy."""
    if len(names) > LARGEST_LIST:
        raise UsageError(f"a list of {len(names)}: a request may name {LARGEST_LIST}")


@_handles
async def put_files(context: Context, wanted: calls.Files) -> None:
    if len(wanted.digests) != 1:
        raise UsageError("files are sent one tree at a time")
    async with _fed(context, LARGEST_TREE) as descriptor:
        await context.service.files.put(context.tenant, wanted.digests[0], descriptor)


@_handles
async def forget(context: Context, wanted: WireRecipe) -> None:
    await context.service.forget_snapshot(context.tenant, wanted)


# --- Sandboxes --------------------------------------------------------------------------------------


@_handles
async def release(context: Context, _: Nothing) -> None:
    await context.service.sandboxes.release(context.held)


@_handles
async def reset(context: Context, _: Nothing) -> None:
    held = context.held
    await held.sandbox.reset()
    await context.service.sandboxes.save(held)


@_handles
async def pause(context: Context, _: Nothing) -> None:
    held = context.held
    await held.sandbox.pause()
    await context.service.sandboxes.save(held)


@_handles
async def resume(context: Context, _: Nothing) -> None:
    held = context.held
    await held.sandbox.resume()
    await context.service.sandboxes.save(held)


@_handles
async def snapshot(context: Context, wanted: calls.Snapshot) -> WireRecipe:
    held = context.held
    name = None if wanted.name is None else named_snapshots.store_name(context.tenant, wanted.name)
    recipe = await held.sandbox.snapshot(name)
    await context.service.sandboxes.save(held)  # its files may be in a layer now
    if wanted.name is None:
        return await context.service.own_snapshot(context.tenant, recipe)
    return msgspec.structs.replace(to_wire(recipe)[0], image=SNAPSHOT_SCHEME + wanted.name)


@_handles
async def fork(context: Context, wanted: calls.Fork) -> list[SandboxInfo]:
    parent = context.held
    tenant_rules.check_key(wanted.key)

    def children() -> AbstractAsyncContextManager[Sequence[NativeSandbox]]:
        return parent.sandbox.fork(wanted.count)

    limits = parent.sandbox.limits  # the copies have the same
    demand = demand_of(context.service, limits, wanted.count)
    held = await in_time(
        wanted.patience,
        context.service.sandboxes.create(
            context.tenant,
            wanted.key,
            parent.id.encode() + codec.encode(msgspec.structs.replace(wanted, patience=None)),
            admitted(context, demand, children, wanted.patience),
            parent.labels,
            wanted.lease,
            demand_of(context.service, limits, 1),
        ),
    )
    await context.service.sandboxes.save(parent)  # a fork may have moved its files into a layer
    return [info(one) for one in held]


@_handles
async def set_network(context: Context, wanted: calls.SetNetwork) -> None:
    held = context.held
    sandbox = held.sandbox
    if not isinstance(sandbox, NetworkedSandbox):
        raise UsageError(
            "the network of a sandbox cannot change on this host", remedy="run the server as root"
        )
    policy = tenant_rules.allowed_network(context.tenant, wanted.policy, networked=True)
    await sandbox.set_network(policy)
    await context.service.sandboxes.save(held)


# --- Commands ---------------------------------------------------------------------------------------


@_handles
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


@_handles
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


@_handles
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


@_handles
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


@_handles
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
            raise _first(group) from group
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


# --- Background processes ---------------------------------------------------------------------------


@_handles
async def start(context: Context, wanted: calls.Start) -> ProcessInfo:
    held = context.held
    process = await held.sandbox.start(wanted.command, cwd=wanted.cwd, env=wanted.env, stdin=wanted.stdin)
    await context.service.sandboxes.save(held)
    return _process_info(process)


def _process_info(process: NativeProcess) -> ProcessInfo:
    command = process.command if isinstance(process.command, str) else tuple(process.command)
    return ProcessInfo(process.id, command, process.running)


@_handles
async def processes(context: Context, _: Nothing) -> list[ProcessInfo]:
    return [_process_info(process) for process in await context.held.sandbox.processes()]


@_handles
async def attach(context: Context, wanted: ProcessCall) -> ProcessInfo:
    return _process_info(await context.held.sandbox.attach(wanted.process))


@_handles
async def process_wait(context: Context, wanted: ProcessCall) -> Observation:
    return await (await context.held.sandbox.attach(wanted.process)).wait()


@_handles
async def process_kill(context: Context, wanted: ProcessCall) -> None:
    await (await context.held.sandbox.attach(wanted.process)).kill()


@_handles
async def process_signal(context: Context, wanted: ProcessCall) -> None:
    await (await context.held.sandbox.attach(wanted.process)).signal(wanted.signal)


@_handles
async def process_write(context: Context, wanted: ProcessCall) -> None:
    await (await context.held.sandbox.attach(wanted.process)).write(wanted.data)


@_handles
async def process_close(context: Context, wanted: ProcessCall) -> None:
    await (await context.held.sandbox.attach(wanted.process)).close_stdin()


@_handles
async def process_output(context: Context, wanted: ProcessCall) -> None:
    process = await context.held.sandbox.attach(wanted.process)
    async for piece in process.output(wanted.after):
        await context.send(piece)


# --- Files ------------------------------------------------------------------------------------------


@_handles
async def read(context: Context, wanted: Read) -> bytes:
    return await context.held.sandbox.read(wanted.path, largest=LARGEST_REQUEST)


@_handles
async def write(context: Context, wanted: Write) -> None:
    await context.held.sandbox.write(wanted.path, wanted.data, mode=wanted.mode)


@_handles
async def list_(context: Context, wanted: List) -> tuple[Any, ...]:
    return await context.held.sandbox.list(wanted.path)


@_handles
async def remove(context: Context, wanted: calls.Location) -> None:
    await context.held.sandbox.remove(wanted.path)


@_handles
async def edit(context: Context, wanted: Edit) -> None:
    await context.held.sandbox.edit(wanted.path, wanted.old, wanted.new)


@_handles
async def search(context: Context, wanted: Search) -> Found:
    return await context.held.sandbox.search(
        wanted.path,
        wanted.text,
        regex=wanted.regex,
        ignore_case=wanted.ignore_case,
        names=wanted.names,
        skip=wanted.skip,
        binary=wanted.binary,
        limit=wanted.limit,
        width=wanted.width,
        timeout=wanted.timeout,
    )


@_handles
async def watch(context: Context, wanted: calls.Watch) -> None:
    async with context.held.sandbox.watch(wanted.path, recursive=wanted.recursive) as changes:
        await context.send(())  # from now on every change is reported
        async for change in changes:
            await context.send((change,))


@_handles
async def upload(context: Context, wanted: calls.Location) -> None:
    """Unpack a tree stream. The bytes go through a pipe straight to the sandbox's init."""
    async with _fed(context) as descriptor:
        await context.held.sandbox.unpack(wanted.path, descriptor)


@_handles
async def download(context: Context, wanted: calls.Location) -> None:
    """Pack a tree stream."""
    ours, theirs = os.pipe()
    stream = await anyio.to_thread.run_sync(os.fdopen, ours, "rb", 0)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_send_all, context, stream.fileno())
            await context.held.sandbox.pack(wanted.path, theirs)
    except BaseExceptionGroup as group:
        raise _first(group) from group
    finally:
        stream.close()


async def _send_all(context: Context, descriptor: int) -> None:
    os.set_blocking(descriptor, False)
    while True:
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            await anyio.wait_readable(descriptor)
            continue
        if not data:
            return
        await context.send(data)


@asynccontextmanager
async def _fed(context: Context, largest: int | None = None) -> AsyncIterator[int]:
    """The read end of a pipe into which the client's items go. The receiver closes it.

    After ``largest`` bytes it ends, and the receiver sees a stream that is cut off.
    """
    theirs, ours = os.pipe()
    os.set_blocking(ours, False)
    room = largest

    async def feed() -> None:
        nonlocal room
        try:
            while (item := await context.receive()) is not None:
                rest = memoryview(item)
                if room is not None and (room := room - len(rest)) < 0:
                    return
                while rest:
                    try:
                        rest = rest[os.write(ours, rest) :]
                    except BlockingIOError:
                        await anyio.wait_writable(ours)
        except BrokenPipeError:
            pass  # the receiver has ended, and says why
        finally:
            os.close(ours)

    feeding = asyncio.create_task(feed())
    try:
        yield theirs
    except (ActionError, RecipeError, OSError) as error:
        if room is not None and room < 0:
            raise RecipeError(f"the files have more than {largest} bytes") from error
        raise
    finally:
        feeding.cancel()
        await asyncio.wait([feeding])


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    found = group.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found


# --- Services and ports -----------------------------------------------------------------------------


@_handles
async def services(context: Context, _: Nothing) -> tuple[ServiceState, ...]:
    return await context.held.sandbox.services()


@_handles
async def restart(context: Context, wanted: calls.ServiceCall) -> None:
    await context.held.sandbox.restart(wanted.service)


@_handles
async def call(context: Context, wanted: calls.ServiceCall) -> Observation:
    return await context.held.sandbox.call(
        wanted.service,
        wanted.arguments,
        cwd=wanted.cwd,
        env=wanted.env,
        stdin=wanted.stdin,
        timeout=wanted.timeout,
    )


@_handles
async def connect(context: Context, wanted: calls.Port) -> None:
    """Relay a connection to a server in the sandbox, until both sides have ended."""
    async with await context.held.sandbox.connect(wanted.port) as inner:
        await context.send(b"")  # it is connected
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_send_to_port, context, inner)
            with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                while True:
                    await context.send(await inner.receive(_CHUNK))
            tasks.cancel_scope.cancel()


async def _send_to_port(context: Context, inner: ByteStream) -> None:
    with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        while (item := await context.receive()) is not None:
            await inner.send(item)
        await inner.send_eof()
