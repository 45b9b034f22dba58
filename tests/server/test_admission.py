"""Who is admitted: limits, fairness between tenants, and honest refusals."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import weakref
from collections import deque
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dutyfree.contract import Limits
from dutyfree.contract.errors import ActionTimeout, Exhausted, LeaseEnded, LimitError
from dutyfree.server.admission import Admission, Bucket, Demand, Queue, TenantLimits
from dutyfree.server.handlers import HANDLERS, DirectCall
from dutyfree.server.handlers.creation import in_time
from dutyfree.server.records import Row
from dutyfree.server.service import Service
from dutyfree.wire import calls
from dutyfree.wire.errors import retry_headers
from tests.awaiting import until
from tests.server.in_process import served

TENANTS = ("a", "b", "c")


def unlimited(_tenant: str) -> TenantLimits:
    return TenantLimits()


def test_the_tenant_with_the_fewest_sandboxes_is_next() -> None:
    queue = Queue(most=3)
    for request in range(4):
        queue.arrive("greedy", request, Demand(1))
    queue.arrive("modest", 9, Demand(1))
    assert queue.decide(unlimited) == [0, 9, 1]
    queue.release("modest", Demand(1))
    queue.arrive("modest", 10, Demand(1))
    assert queue.decide(unlimited) == [10]


def test_a_large_group_is_not_overtaken() -> None:
    queue = Queue(most=4)
    queue.arrive("one", 1, Demand(3))
    assert queue.decide(unlimited) == [1]
    queue.arrive("group", 2, Demand(4))
    queue.arrive("one", 3, Demand(1))
    assert queue.decide(unlimited) == []
    queue.release("one", Demand(3))
    assert queue.decide(unlimited) == [2]


def test_a_tenant_at_its_limit_keeps_no_other_waiting() -> None:
    queue = Queue()
    limits = {"a": TenantLimits(sandboxes=1), "b": TenantLimits()}
    for request, tenant in enumerate("aab"):
        queue.arrive(tenant, request, Demand(1))
    assert sorted(queue.decide(limits.__getitem__)) == [0, 2]
    queue.release("a", Demand(1))
    assert queue.decide(limits.__getitem__) == [1]


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 4), st.booleans()), max_size=40),
)
def test_limits_hold_and_everyone_is_served_in_the_end(
    most: int, events: list[tuple[str, int, bool]]
) -> None:
    queue, numbers = Queue(most=most), count()
    limits = {tenant: TenantLimits(sandboxes=3) for tenant in TENANTS}
    asked: dict[int, tuple[str, Demand]] = {}
    held: list[int] = []

    def decide() -> None:
        held.extend(queue.decide(limits.__getitem__))
        assert queue.total <= most
        assert all(used.sandboxes <= 3 for used in queue.used.values())

    for tenant, size, end_one in events:
        if end_one and held:
            queue.release(*asked[held.pop(0)])
        elif size <= min(3, most):
            asked[number := next(numbers)] = tenant, Demand(size)
            queue.arrive(tenant, number, Demand(size))
        decide()
    served = len(held)
    while held:
        queue.release(*asked[held.pop(0)])
        decide()
        served += 1
    assert not queue.used
    assert not any(queue.waiting(tenant) for tenant in TENANTS)


def test_a_bucket_lets_through_what_its_rate_allows() -> None:
    bucket = Bucket()
    assert [bucket.delay(2, 100.0, 1) for _ in range(3)] == [0, 0, 0.5]
    assert bucket.delay(2, 100.5, 1) == 0
    assert bucket.delay(2, 200.0, 50) == 0, "a group larger than the bucket is let through when it is empty"
    assert bucket.delay(2, 201.0, 1) > 10


async def test_a_request_waits_for_room() -> None:
    admission = Admission(lambda _: TenantLimits(sandboxes=1))
    release = await admission.admit("a", Demand(1), 1)
    waiting = asyncio.create_task(admission.admit("a", Demand(1), 10))
    await asyncio.sleep(0)
    assert not waiting.done()
    release()
    release()  # a second time does nothing
    (await waiting)()


async def test_refusals_say_why() -> None:
    admission = Admission(lambda _: TenantLimits(sandboxes=1, creates_per_second=1))
    await admission.admit("a", Demand(1), 1)
    with pytest.raises(Exhausted, match="too fast: its limit is 1 per second") as fast:
        await admission.admit("a", Demand(1), 0.05)
    assert fast.value.numbers["retry_after"] > 0  # type: ignore[operator]
    with pytest.raises(LimitError, match="a request for 2 sandboxes: a may have 1 at most"):
        await admission.admit("a", Demand(2), 1)


async def test_a_sandbox_without_a_limit_is_refused_with_what_it_counts_as() -> None:
    admission = Admission(lambda _: TenantLimits(memory=1 << 30, cpus=4))
    wanted = Demand(2, 8 << 30, 1.0, unlimited=("memory", "cpus"))
    with pytest.raises(LimitError) as refused:
        await admission.admit("a", wanted, 1)
    assert refused.value.message == (
        "a request for 8.00 GiB of memory: a may have 1.00 GiB at most; a sandbox without a limit of memory "
        "counts as 4.00 GiB"
    )
    assert "memory of at most 536870912 bytes (0.50 GiB)" in refused.value.remedy
    with pytest.raises(LimitError, match="without a limit of cpus counts as 8"):
        await admission.admit("a", Demand(1, 0, 8.0, unlimited=("cpus",)), 1)
    with pytest.raises(LimitError) as refused:
        await admission.admit("a", Demand(1, 2 << 30), 1)
    assert "without" not in str(refused.value)


async def test_a_refusal_names_what_the_tenant_has_and_may_have() -> None:
    admission = Admission(lambda _: TenantLimits(sandboxes=1, memory=4 << 30))
    await admission.admit("a", Demand(1, 1 << 30), 1)
    counts = r"a has 1 sandbox \(its limit is 1\), 1.00 GiB of memory \(its limit is 4.00 GiB\); 0 more"
    with pytest.raises(Exhausted, match=f"no room for 1 sandbox within 0.05 s: {counts}"):
        await admission.admit("a", Demand(1), 0.05)


async def test_the_wait_is_estimated_from_what_happened() -> None:
    admission = Admission(lambda _: TenantLimits(sandboxes=1))
    admission._given_back["a"] = deque([0.0, 10.0, 20.0])
    await admission.admit("a", Demand(1), 1)
    with pytest.raises(Exhausted) as full:
        await admission.admit("a", Demand(1), 0.01)
    assert full.value.numbers["retry_after"] == 10
    assert retry_headers(full.value) == {"Retry-After": "10"}


async def test_a_request_that_gives_up_is_in_nobodys_way() -> None:
    admission = Admission(unlimited, most=2)
    release = await admission.admit("a", Demand(1), 1)
    with pytest.raises(Exhausted, match="no room"):
        await admission.admit("b", Demand(2), 0.05)
    other = asyncio.create_task(admission.admit("b", Demand(2), 10))
    await asyncio.sleep(0)
    third = asyncio.create_task(admission.admit("c", Demand(1), 10))
    await asyncio.sleep(0)
    assert not third.done(), "the group of b is first"
    other.cancel()
    await asyncio.wait([other])
    (await third)()
    release()


@pytest.fixture(scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    async with served(tmp_path_factory.mktemp("state")) as (service, _):
        yield service


@pytest.mark.native
async def test_copies_count_what_their_parent_counts(service: Service) -> None:
    limits = Limits(memory=64 << 20, cpus=0.5)
    (made,) = await HANDLERS["create"](DirectCall(service, "local"), calls.Create("a", limits=limits))
    await HANDLERS["fork"](DirectCall(service, "local", made.id), calls.Fork("b", 2))
    assert service.admission._queue.used["local"] == Demand(3, 3 * (64 << 20), 1.5)


@pytest.mark.native
@pytest.mark.parametrize("patience", [None, 60.0])
async def test_a_timeout_of_the_sandbox_is_not_that_of_the_client(
    service: Service, patience: float | None
) -> None:
    async def fork() -> None:
        raise ActionTimeout("the sandbox cannot be frozen within 5 s")

    with pytest.raises(ActionTimeout, match="cannot be frozen"):
        await in_time(DirectCall(service, "local"), patience, fork())


# --- What is left of a creation ---------------------------------------------------------------------


@pytest.mark.native
async def test_of_a_sandbox_that_has_ended_only_its_key_is_known(tmp_path: Path) -> None:
    async with served(tmp_path) as (service, _):
        context, wanted = DirectCall(service, "local"), calls.Create("key")
        (made,) = await HANDLERS["create"](context, wanted)
        kept = weakref.ref(service.sandboxes.get("local", made.id))
        await HANDLERS["release"](DirectCall(service, "local", made.id), calls.Nothing())

        def is_gone() -> bool:
            gc.collect()
            return kept() is None

        await until(is_gone)
        with pytest.raises(LeaseEnded):
            await HANDLERS["create"](context, wanted)


@pytest.mark.native
async def test_a_fork_of_no_copies_keeps_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as (service, _):
        (made,) = await HANDLERS["create"](DirectCall(service, "local"), calls.Create("key"))
        parent = DirectCall(service, "local", made.id)
        for _ in range(2):  # the same key has the same answer
            assert await HANDLERS["fork"](parent, calls.Fork("none", 0)) == []
        assert service.native.snapshots() == ()
        assert service.admission._queue.total == 1


class FullDisk:
    """Records of sandboxes for which there is no room."""

    async def save(self, _row: Row) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.native
async def test_a_sandbox_that_cannot_be_recorded_ends(tmp_path: Path) -> None:
    """No one could find it, and no lease would end it."""
    async with served(tmp_path) as (service, _):
        service.sandboxes._records = FullDisk()  # type: ignore[assignment]
        with pytest.raises(OSError, match="No space left"):
            await HANDLERS["create"](DirectCall(service, "local"), calls.Create("key"))
        assert not service.native.node.factory.held
        assert len(service.sandboxes) == 0
