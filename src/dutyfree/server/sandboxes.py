"""The sandboxes that clients hold: who has which one, until when, and what ends them.

Each creation has a task that enters the engine's context and leaves it again, since a context must be left by
the task that entered it. A sandbox ends when its client releases it, when its lease ends, or with the server:
unless the server has ``records``, by which the next one goes on with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import anyio

from dutyfree.contract.errors import (
    CreateError,
    DutyfreeError,
    LeaseEnded,
    LimitError,
    SandboxClosed,
    UsageError,
)
from dutyfree.engine.layers.kept_state import KeptSnapshot
from dutyfree.engine.node import Node
from dutyfree.engine.sandbox.sandbox import NativeSandbox
from dutyfree.server.admission import NOTHING, Admission, Demand, given_back
from dutyfree.server.records import HeldRecord, Row, SandboxRecords

Create = Callable[[], AbstractAsyncContextManager[Sequence[NativeSandbox]]]

LONGEST_LEASE = 7 * 86400.0
"""Seconds of the longest lease."""

REMEMBERED = 3600.0
"""For how many seconds the idempotency key of an ended creation is known."""


class Held:
    """One sandbox that a client holds."""

    def __init__(
        self,
        tenant: str,
        sandbox: NativeSandbox,
        creation: Creation,
        labels: Mapping[str, str],
        until: float,
        demand: Demand = NOTHING,
    ) -> None:
        """``until``: when its lease ends, as ``time.monotonic`` counts, and the event loop with it."""
        self.id = f"sb-{secrets.token_hex(8)}"
        self.tenant = tenant
        self.demand = demand
        self.sandbox = sandbox
        self.creation = creation
        self.labels = dict(labels)
        self.created = time.time()
        self.until = until
        self.released = False
        self.access_token = secrets.token_urlsafe(24)
        """Lets clients of E2B's wire into this sandbox, who name no tenant there."""
        self.template = ""
        """What such a client asked for."""

    @property
    def expires(self) -> float:
        """Unix time of the end of its lease."""
        return time.time() + self.until - asyncio.get_running_loop().time()


class Creation:
    """The sandboxes of one request, and the task that holds their context."""

    def __init__(self, create: Create, request: tuple[str, str], fingerprint: bytes) -> None:
        """``request``: the tenant and its idempotency key."""
        self.request = request
        self.fingerprint = fingerprint
        self._create = create
        self._leave = asyncio.Event()
        self.sandboxes: Sequence[NativeSandbox] = ()
        self._entered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.members: list[Held] = []
        self._task = asyncio.create_task(self._hold())

    async def _hold(self) -> None:
        try:
            async with self._create() as sandboxes:
                self.sandboxes = sandboxes
                if not self._entered.done():
                    self._entered.set_result(None)
                await self._leave.wait()
        except BaseException as error:
            if not self._entered.done():
                self._entered.set_exception(error)
                self._entered.exception()  # its waiter may be gone; this avoids a warning
                if isinstance(error, Exception):
                    return
            raise

    async def entered(self) -> None:
        """Wait until the sandboxes are there. Raises the errors of the creation.

        If the caller is cancelled, and nobody else waits, call ``give_up``.
        """
        await asyncio.shield(self._entered)

    def give_up(self) -> None:
        """Stop the creation, or end the sandboxes that it made."""
        self._leave.set()
        if not self._entered.done():
            self._task.cancel()

    async def end(self) -> None:
        """End the sandboxes, and wait until nothing of them is left. Raises CleanupError."""
        self.give_up()
        with anyio.CancelScope(shield=True):
            await asyncio.wait([self._task])
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            raise error


class _Request:
    """A creation with an idempotency key: those who ask with the same key wait for the same one."""

    def __init__(
        self,
        key: tuple[str, str],
        fingerprint: bytes,
        task: asyncio.Task[list[Held]] | None,
        creation: Creation | None,
    ) -> None:
        """``task`` and ``creation`` are None for sandboxes that have ended."""
        self.key = key
        self.fingerprint = fingerprint
        self.task = task
        self.creation = creation
        self.waiters = 0


class Sandboxes:
    """All sandboxes of all tenants."""

    def __init__(self, records: SandboxRecords | None = None) -> None:
        self._records = records
        self._held: dict[str, Held] = {}
        self._requests: dict[tuple[str, str], _Request] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._background: set[asyncio.Task[None]] = set()
        self.on_change: Callable[[str, Held], None] = lambda _event, _held: None
        """Called with ``created``, ``adopted``, ``extended``, ``released`` or ``expired``."""

    def __len__(self) -> int:
        return len(self._held)

    def counts(self) -> Counter[str]:
        """How many each tenant holds."""
        return Counter(held.tenant for held in self._held.values())

    def all(self) -> list[Held]:
        return list(self._held.values())

    def of(self, tenant: str) -> list[Held]:
        """The sandboxes of a tenant, the oldest first."""
        return [held for held in self._held.values() if held.tenant == tenant]

    def get(self, tenant: str, name: str) -> Held:
        """The sandbox with this id. Raises SandboxClosed, also if it belongs to another tenant."""
        held = self._held.get(name)
        if held is None or held.tenant != tenant:
            raise SandboxClosed(
                f"there is no sandbox {name[:80]!r}: it was released, or its lease has ended",
                remedy="create another one; keep a lease alive for as long as you need the sandbox",
            )
        return held

    def find(self, name: str) -> Held | None:
        """The sandbox with this id, of whichever tenant. The caller must check its access token."""
        return self._held.get(name)

    async def create(
        self,
        tenant: str,
        key: str,
        fingerprint: bytes,
        create: Create,
        labels: Mapping[str, str],
        lease: float,
        demand: Demand = NOTHING,
    ) -> list[Held]:
        """Create sandboxes, or return those of the same request. Raises what the creation raises.

        ``fingerprint`` is the whole request: another one with the same key is a mistake. ``demand`` is what
        each of them counts.
        """
        check_lease(lease)
        fingerprint = hashlib.sha256(fingerprint).digest()
        request = self._requests.get((tenant, key))
        if request is not None and request.fingerprint != fingerprint:
            raise UsageError(
                f"the idempotency key {key[:80]!r} belongs to another request",
                remedy="use a new key for each",
            )
        if request is None:
            creation = Creation(create, (tenant, key), fingerprint)
            task = asyncio.create_task(self._create(tenant, creation, labels, lease, demand))
            request = self._requests[tenant, key] = _Request((tenant, key), fingerprint, task, creation)
            task.add_done_callback(lambda done: self._answered(tenant, key, done))
        request.waiters += 1
        try:
            members = [] if request.task is None else await asyncio.shield(request.task)
            if request.task is None or (members and all(member.released for member in members)):
                raise LeaseEnded(f"the lease {key[:80]!r} has ended", remedy="use a new key for a new lease")
            return members
        except asyncio.CancelledError:
            if request.waiters == 1 and request.task is not None:  # no one else wants them
                await self._abandon(request.key, request.task)
            raise
        finally:
            request.waiters -= 1

    async def _abandon(self, key: tuple[str, str], task: asyncio.Task[list[Held]]) -> None:
        """Stop a creation, or end the sandboxes that it has made."""
        self._requests.pop(key, None)  # who asks from now on gets a creation of its own
        with anyio.CancelScope(shield=True):
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled() and task.exception() is None:
                for held in task.result():
                    await self._release_quietly(held)

    def _answered(self, tenant: str, key: str, done: asyncio.Task[list[Held]]) -> None:
        """A creation that failed may be asked for again at once."""
        request = self._requests.get((tenant, key))
        if (
            request is not None
            and request.task is done
            and (done.cancelled() or done.exception() is not None)
        ):
            del self._requests[tenant, key]

    async def _create(
        self, tenant: str, creation: Creation, labels: Mapping[str, str], lease: float, demand: Demand
    ) -> list[Held]:
        try:
            await creation.entered()
            until = asyncio.get_running_loop().time() + lease
            members = [
                Held(tenant, sandbox, creation, labels, until, demand) for sandbox in creation.sandboxes
            ]
            creation.members.extend(members)
            for held in members:
                await self.save(held)
        except BaseException:  # also a full disk: without a record, no one would end them
            with contextlib.suppress(DutyfreeError):
                await creation.end()
            raise
        for held in members:
            self._add(held, "created")
        if not members:  # a fork of no copies: nothing will be released
            self._remember(creation)
            await creation.end()
        return creation.members

    def _add(self, held: Held, event: str) -> None:
        self._held[held.id] = held
        self._arm(held)
        self.on_change(event, held)

    # --- Records ----------------------------------------------------------------------------------------

    async def save(self, held: Held) -> None:
        """Write down what has changed, so that the next server goes on with it."""
        if self._records is None or held.released:
            return
        creation, kept = held.creation, held.sandbox.kept(held.labels)
        record = HeldRecord(kept, held.created, held.access_token, held.template, held.demand)
        await self._records.save(Row(held.id, *creation.request, creation.fingerprint, record))
        # After that: a sandbox with a lease that no record names would be lost.
        held.sandbox.set_lease(held.until)

    async def restore(self, node: Node, admission: Admission, snapshots: Sequence[KeptSnapshot]) -> None:
        """Go on with the sandboxes of a former server, and end all others that it left.

        ``snapshots``: those that were adopted, whose layers stay.
        """
        if self._records is None:
            return
        requests: dict[tuple[str, str], list[Row]] = {}
        for row in await anyio.to_thread.run_sync(self._records.load):
            requests.setdefault((row.tenant, row.key), []).append(row)
        for request, rows in requests.items():
            await self._restore_request(node, admission, request, rows)
        kept = [held.sandbox.kept(held.labels) for held in self._held.values()]
        await node.sweep([*kept, *snapshots])

    async def _restore_request(
        self, node: Node, admission: Admission, request: tuple[str, str], rows: list[Row]
    ) -> None:
        tenant, _ = request
        found: list[tuple[Row, HeldRecord, float]] = []

        @asynccontextmanager
        async def living() -> AsyncIterator[Sequence[NativeSandbox]]:
            async with AsyncExitStack() as stack:
                sandboxes = []
                for row in rows:
                    if row.record is None:
                        continue
                    try:
                        adopting = node.adopt(row.record.sandbox)
                        sandbox, until = await stack.enter_async_context(adopting)
                    except CreateError:
                        assert self._records is not None
                        self._records.end(row.id)
                        continue
                    stack.enter_context(given_back(admission.readmit(tenant, row.record.demand)))
                    sandboxes.append(sandbox)
                    found.append((row, row.record, until))
                yield sandboxes

        creation = Creation(living, request, rows[0].fingerprint)
        await creation.entered()
        for sandbox, (row, record, until) in zip(creation.sandboxes, found, strict=True):
            labels = record.sandbox.labels
            held = Held(tenant, sandbox, creation, labels, until, record.demand)
            held.id, held.created, held.access_token = row.id, record.created, record.access_token
            held.template = record.template
            creation.members.append(held)
            self._add(held, "adopted")
        if not creation.members:
            await creation.end()
        self._requests[request] = (
            _Request(request, rows[0].fingerprint, asyncio.create_task(_members(creation)), creation)
            if found
            else _Request(request, rows[0].fingerprint, None, None)
        )

    # --- Leases -----------------------------------------------------------------------------------------

    def keep_alive(self, held: Held, lease: float) -> None:
        """Let the lease end ``lease`` seconds from now. Raises LimitError."""
        check_lease(lease)
        until = asyncio.get_running_loop().time() + lease
        earlier = until < held.until
        held.until = until
        if self._records is not None:
            held.sandbox.set_lease(until)
        if earlier:  # the timer of a longer lease would come too late
            self._timers.pop(held.id).cancel()
            self._arm(held)
        self.on_change("extended", held)

    def extend(self, held: Held, lease: float) -> None:
        """Let the lease end no sooner than ``lease`` seconds from now. Raises LimitError."""
        check_lease(lease)
        if asyncio.get_running_loop().time() + lease > held.until:
            self.keep_alive(held, lease)

    def _arm(self, held: Held) -> None:
        self._timers[held.id] = asyncio.get_running_loop().call_at(held.until, self._expired, held)

    def _expired(self, held: Held) -> None:
        if held.until > asyncio.get_running_loop().time():  # it was kept alive
            self._arm(held)
            return
        self.on_change("expired", held)
        task = asyncio.create_task(self._release_quietly(held))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _release_quietly(self, held: Held) -> None:
        with contextlib.suppress(DutyfreeError):
            await self.release(held)

    async def release(self, held: Held) -> None:
        """End a sandbox, and wait until nothing of it is left. Raises CleanupError.

        The members of a group are one creation: their processes end at once, their rest with the last member.
        """
        if held.released:
            return
        held.released = True
        self._held.pop(held.id, None)
        if self._records is not None:
            self._records.end(held.id)
        if (timer := self._timers.pop(held.id, None)) is not None:
            timer.cancel()
        self.on_change("released", held)
        creation = held.creation
        if all(member.released for member in creation.members):
            self._remember(creation)
            await creation.end()
        else:
            await held.sandbox.end_processes()

    def _remember(self, creation: Creation) -> None:
        """Know the key of an ended creation for a while, and keep no sandbox of it."""
        request = self._requests.get(creation.request)
        if request is not None and request.creation is creation:
            request.creation = None
            if creation.members:
                request.task = None
            asyncio.get_running_loop().call_later(REMEMBERED, self._forget, request)

    def _forget(self, request: _Request) -> None:
        if self._requests.get(request.key) is request:
            del self._requests[request.key]

    def forget_key(self, tenant: str, key: str) -> None:
        """Let the idempotency key of sandboxes that have ended create others."""
        self._requests.pop((tenant, key), None)
        if self._records is not None:
            self._records.forget_key(tenant, key)

    async def leave(self) -> None:
        """Wait until all records are written, so that another server can go on."""
        if self._records is not None:
            await self._records.written()

    async def close(self) -> None:
        """End all sandboxes."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        tasks = [request.task for request in self._requests.values()]
        requests = [task for task in tasks if task is not None and not task.done()]
        for task in requests:
            task.cancel()
        if requests:
            await asyncio.wait(requests)
        await asyncio.gather(
            *(self._release_quietly(held) for held in list(self._held.values())), *self._background
        )


async def _members(creation: Creation) -> list[Held]:
    return creation.members


def check_lease(lease: float) -> None:
    """Raises LimitError."""
    if not 0 < lease <= LONGEST_LEASE:
        raise LimitError(f"a lease must be > 0 and ≤ {LONGEST_LEASE:.15g} seconds, not {lease:.15g}")
