"""The pool with the scripted substrate as its source, on a virtual clock."""

from __future__ import annotations

import random

import anyio
import pytest

from dutyfree.contract import Observation, Recipe, Stage, errors
from dutyfree.engine.pool.pool import Pool
from dutyfree.engine.pool.scheduler.values import Budget, Policy
from dutyfree.substrates.scripted import Scripted
from tests.awaiting import enter, together
from tests.engine import virtual
from tests.engine.pool.scripted_source import ScriptedSource

CLONE = Stage("repository", ("echo clone",))
INSTALL = Stage("dependencies", ("echo install",))
REPOSITORY = Recipe(stages=(CLONE,))
READY = Recipe(stages=(CLONE, INSTALL))
OTHER = Recipe(stages=(CLONE, Stage("dependencies", ("echo other",))))
BROKEN = Recipe(stages=(CLONE, Stage("dependencies", ("false",))))

QUIET = Policy(refill=False)
"""Refill for hints and minimums only."""


@pytest.fixture
def anyio_backend():
    return virtual.BACKEND


def source(**options):
    """Stages take a second each."""
    script = {f"echo {word}": Observation(exit_code=0, seconds=1.0) for word in ("clone", "install", "other")}
    script["false"] = Observation(exit_code=1, stderr=b"no such package", seconds=1.0)
    return ScriptedSource(Scripted(Scripted.Config(create_seconds=0.01), script=script), **options)


async def test_cold_then_warm_then_from_the_layer_then_promoted():
    made = source()
    async with Pool(made, policy=QUIET) as pool:
        async with pool.lease(READY) as first:
            (served,) = first.served
            assert (served.kind, served.stage, served.recipe) == ("cold", "none", READY.key())
            assert served.seconds == pytest.approx(2.01)
            await first.sandbox.write("trace", b"")
            async with pool.lease(READY) as second:
                (served,) = second.served
                assert (served.kind, served.stage) == ("layer", "dependencies")
                assert served.seconds == pytest.approx(0.01)
                assert served.cold_seconds > 1.9
        await anyio.sleep(1)
        assert repr(pool).startswith(
            "<Pool: 2 idle, 0 leased, 0 being made, 0 being reset, 0 being destroyed"
        )
        async with pool.lease(READY) as third:
            (served,) = third.served
            assert (served.kind, served.stage, served.seconds) == ("warm", "dependencies", 0.0)
            with pytest.raises(FileNotFoundError):
                await third.sandbox.read("trace")
        assert made.ran == ["echo clone", "echo install"]
    assert not made.existing


async def test_a_partial_match_runs_only_what_is_missing():
    made = source(layered=False)
    async with Pool(made, policy=QUIET) as pool:
        await pool.prefetch([REPOSITORY])
        await anyio.sleep(5)
        made.ran.clear()
        async with pool.lease(READY) as lease:
            assert (lease.served[0].kind, lease.served[0].stage) == ("promoted", "repository")
            assert lease.served[0].seconds == pytest.approx(1)
            assert made.ran.count("echo install") == 1


async def test_a_refill_under_way_is_taken_over():
    made = source()
    async with Pool(made, policy=QUIET) as pool:
        await pool.prefetch([READY])
        await anyio.sleep(1.5)
        async with pool.lease(READY) as lease:
            assert lease.served[0].kind == "joined"
            assert lease.served[0].seconds == pytest.approx(0.51)
        assert made.ran == ["echo clone", "echo install"]


async def test_a_group_is_one_prepared_state_and_copies_of_it():
    made = source(layered=False)
    async with Pool(made, policy=QUIET) as pool, pool.group(READY, 8) as lease:
        assert sorted(served.kind for served in lease.served) == ["cold", *["forked"] * 7]
        assert len({sandbox.id for sandbox in lease.sandboxes}) == 8
        assert made.ran == ["echo clone", "echo install"]
        assert "8 leased" in repr(pool)
    assert not made.existing


async def test_an_exhausted_pool_says_so_by_the_deadline_with_numbers():
    made = source()
    async with Pool(made, budget=Budget(sandboxes=2), policy=QUIET) as pool, pool.group(READY, 2):
        asked = anyio.current_time()
        with pytest.raises(errors.Exhausted, match="2 of 2 sandboxes are leased") as refused:
            await pool.acquire(OTHER, deadline=3)
        assert anyio.current_time() - asked == pytest.approx(3)
        assert refused.value.numbers["leased"] == refused.value.numbers["sandboxes"] == 2
        assert refused.value.phase == "pool"
        with pytest.raises(errors.Exhausted, match="can never fit: the budget is 2 sandboxes"):  # at once
            await pool.acquire(OTHER, 3)
        assert anyio.current_time() - asked == pytest.approx(3)
    with pytest.raises(errors.UsageError):
        await pool.acquire(OTHER, 0)


async def test_a_deadline_of_zero_is_for_what_is_ready_now():
    async with Pool(source(), policy=QUIET) as pool:
        await pool.prefetch([READY])
        await anyio.sleep(5)
        asked = anyio.current_time()
        async with pool.lease(READY, deadline=0) as lease:
            assert lease.served[0].kind == "warm"
            with pytest.raises(errors.Exhausted, match=r"1 of .* are leased, 0 idle") as refused:
                await pool.acquire(READY, deadline=0)
            assert refused.value.remedy == "allow more time, or prefetch the recipe"
            assert refused.value.numbers["wanted"] == 1
        assert anyio.current_time() == asked


async def test_who_waits_is_served_when_a_lease_is_given_back():
    made = source()
    async with Pool(made, budget=Budget(sandboxes=1), policy=QUIET) as pool:
        order = []

        async def one(number, recipe):
            async with pool.lease(recipe) as lease:
                order.append((number, lease.served[0].kind))
                await anyio.sleep(10)

        async with anyio.create_task_group() as tasks:
            for number, recipe in enumerate((READY, READY, OTHER, READY)):
                tasks.start_soon(one, number, recipe)
                await anyio.sleep(0.1)
        assert [number for number, _ in order] == [0, 1, 2, 3]
        assert order[1][1] == "warm"
        assert made.most == 1


async def test_a_failing_recipe_is_quarantined_and_then_tried_again():
    made = source()
    async with Pool(made, policy=Policy(refill=False, backoff=10.0)) as pool:
        for _ in range(3):
            with pytest.raises(errors.StageError, match="'false' ended with 1") as failed:
                await pool.acquire(BROKEN)
            assert failed.value.number == 2
        asked = anyio.current_time()
        with pytest.raises(errors.Quarantined, match="failed 3 times") as refused:
            await pool.acquire(BROKEN)
        assert anyio.current_time() == asked
        assert (refused.value.command, refused.value.output) == ("false", "no such package")
        await enter(pool.lease(READY))
        await anyio.sleep(refused.value.retry_in + 0.1)
        with pytest.raises(errors.StageError):
            await pool.acquire(BROKEN)
        with pytest.raises(errors.Quarantined) as again:
            await pool.acquire(BROKEN)
        assert again.value.retry_in > refused.value.retry_in
        assert (pool.ledger.events["failures"], pool.ledger.events["refused"]) == (4, 6)


async def test_what_cannot_be_reset_is_discarded_and_counted():
    made = source()
    async with Pool(made, policy=QUIET) as pool:
        async with pool.lease(READY):
            made.failures = 1.0
        await anyio.sleep(1)
        made.failures = 0.0
        assert not made.existing
        events = pool.ledger.events
        assert (events["resets"], events["discarded"], events["died"]) == (1, 1, 1)
        async with pool.lease(READY) as lease:
            assert lease.served[0].kind == "layer"


async def test_the_source_is_told_which_layers_to_forget():
    made = source()
    async with Pool(made, budget=Budget(disk=3_000, layer_disk=1_000), policy=Policy(park=False)) as pool:
        for recipe in (READY, OTHER, READY):
            async with pool.lease(recipe):
                assert len(made.layers) <= 3
        assert pool.ledger.events["layers forgotten"] == 2
        assert set(made.layers) == set(READY.keys())


async def test_refills_of_a_failing_recipe_back_off():
    made = source()
    async with Pool(made, policy=Policy(refill=False, backoff=1.0)) as pool:
        await pool.keep(BROKEN, minimum=2)
        await anyio.sleep(3600)
        assert 3 < made.ran.count("false") < 30
        await pool.keep(BROKEN, minimum=0)
        tried = made.ran.count("false")
        await anyio.sleep(3600)
        assert made.ran.count("false") <= tried + 1


async def test_leases_end_unless_kept_alive_and_nothing_is_left():
    made = source()
    async with Pool(made, policy=QUIET) as pool:
        lease = await pool.acquire(READY, lease_seconds=10)
        for _ in range(5):
            await anyio.sleep(9)
            pool.keep_alive(lease, 10)
        assert lease.sandbox.id in made.existing
        await anyio.sleep(11)
        assert lease.over
        assert not made.existing
        with pytest.raises(errors.LeaseEnded):
            pool.keep_alive(lease)
        pool.release(lease)
        assert "0 leased" in repr(pool)


async def test_the_same_key_is_the_same_lease():
    made = source()
    async with Pool(made, policy=QUIET) as pool:
        found = []

        async def one():
            found.append(await pool.acquire(READY, idempotency_key="k"))

        await together(one, one)
        found.append(await pool.acquire(READY, idempotency_key="k"))
        assert found[0] is found[1] is found[2]
        assert len(made.existing) == 1
        with pytest.raises(errors.UsageError):
            await pool.acquire(OTHER, idempotency_key="k")
        pool.release(found[0])
        with pytest.raises(errors.LeaseEnded):
            await pool.acquire(READY, idempotency_key="k")


async def test_a_key_may_be_used_again_when_nothing_came_of_it_or_it_was_long_ago():
    async with Pool(source(), budget=Budget(sandboxes=1), policy=QUIET) as pool:
        async with pool.lease(READY):
            with pytest.raises(errors.Exhausted):
                await pool.acquire(READY, idempotency_key="k", deadline=0)
        lease = await pool.acquire(READY, idempotency_key="k")
        pool.release(lease)
        await anyio.sleep(QUIET.remembered - 1)
        with pytest.raises(errors.LeaseEnded):
            await pool.acquire(READY, idempotency_key="k")
        await anyio.sleep(1)
        again = await pool.acquire(READY, idempotency_key="k")
        assert again is not lease
        assert not again.over
        pool.cancel("other")  # also forgets keys that are too old
        assert list(pool._waiters._ended) == ["other"]


async def test_a_cancelled_retry_does_not_end_what_the_first_call_got():
    made = source()
    async with Pool(made, policy=QUIET) as pool:
        lease = await pool.acquire(READY, idempotency_key="k")
        with anyio.CancelScope() as scope:
            scope.cancel()
            await pool.acquire(READY, idempotency_key="k")
        assert not lease.over
        assert pool.leases == (lease,)
        assert len(made.existing) == 1


async def test_the_leases_can_be_seen():
    async with Pool(source(), policy=QUIET) as pool:
        one = await pool.acquire(READY, labels={"run": "7"}, lease_seconds=10)
        assert one.until == anyio.current_time() + 10
        async with pool.group(READY, 2) as two:
            assert [*pool.leases] == [one, two]
            assert [lease.labels for lease in pool.leases] == [{"run": "7"}, {}]
        assert [*pool.leases] == [one]
        await anyio.sleep(11)
        assert not [*pool.leases]


@pytest.mark.parametrize(
    "terms",
    [
        {"deadline": -1},
        {"deadline": float("nan")},
        {"lease_seconds": 0},
        {"lease_seconds": float("nan")},
        {"lease_seconds": "1"},
        {"deadline": "1"},
        {"labels": ["a"]},
        {"dedline": 1},
        {"size": 0},
        {"size": 2.0},
        {"size": "2"},
    ],
)
async def test_terms_that_make_no_sense_are_refused(terms):
    async with Pool(source(), policy=QUIET) as pool:
        with pytest.raises(errors.UsageError):
            await pool.acquire(READY, **terms)
        lease = await pool.acquire(READY)
        with pytest.raises(errors.UsageError):
            pool.keep_alive(lease, float("nan"))
        for bounds in ((-1, None), (3, 2), (0.5, None), (0, 1.5)):
            with pytest.raises(errors.UsageError):
                await pool.keep(READY, *bounds)
        for each in (-1, 1.5):
            with pytest.raises(errors.UsageError):
                await pool.prefetch([READY], each)  # type: ignore[arg-type]
        assert (await pool.acquire(READY)).sandbox  # a refused request does not block others


async def test_waiting_for_stock_that_cannot_come_ends():
    made = source()
    async with Pool(made, budget=Budget(sandboxes=2), policy=QUIET) as pool:
        await pool.prefetch([BROKEN])
        with pytest.raises(errors.Quarantined, match="failed 3 times"):
            await pool.until_idle(BROKEN, 1)
        with pytest.raises(errors.UsageError, match="no room for 3 sandboxes"):
            await pool.until_idle(READY, 3)
        made.failures = 1.0  # of the machinery
        await pool.prefetch([OTHER])
        with pytest.raises(errors.CreateError, match="chance"):
            await pool.until_idle(OTHER, 1)


async def test_a_delete_never_races_a_create():
    made = source()
    async with Pool(made, policy=QUIET) as pool, anyio.create_task_group() as tasks:

        async def one():
            with pytest.raises(errors.LeaseEnded):
                await pool.acquire(READY, idempotency_key="k")

        tasks.start_soon(one)
        await anyio.sleep(0.5)
        pool.cancel("k")
        pool.cancel("early")
        with pytest.raises(errors.LeaseEnded):
            await pool.acquire(READY, idempotency_key="early")
        await anyio.sleep(5)
        assert repr(pool).startswith("<Pool: 1 idle, 0 leased")


async def test_what_cannot_be_reset_or_has_died_is_discarded():
    made = source()
    async with Pool(made, policy=QUIET) as pool:
        async with pool.lease(READY) as lease:
            made.dead.add(lease.sandbox.id)
        await anyio.sleep(1)
        assert "0 idle" in repr(pool)
        assert not made.existing
        await pool.prefetch([READY], 2)
        await anyio.sleep(5)
        made.dead |= set(made.existing)
        async with pool.lease(READY) as lease:
            assert lease.sandbox.id not in made.dead
        assert pool.ledger.events["died"] == 3


async def test_a_death_that_is_told_is_replaced_at_once():
    made = source()
    async with Pool(made, policy=QUIET) as pool:
        await pool.keep(READY, minimum=1)
        await anyio.sleep(5)
        (before,) = made.existing
        async with pool.lease(READY) as lease:
            assert lease.sandbox.id == before
        await anyio.sleep(5)
        pool.lost(lease.sandbox)
        await anyio.sleep(5)
        assert before not in made.existing
        assert "1 idle" in repr(pool)


async def test_closing_ends_everything():
    made = source()
    async with anyio.create_task_group() as tasks:
        async with Pool(made) as pool:

            async def waits():
                with pytest.raises(errors.PoolError, match="closed"):
                    await pool.acquire(READY)

            tasks.start_soon(waits)
            lease = await pool.acquire(REPOSITORY)
            await pool.prefetch([OTHER], 5)
        assert not made.existing
        assert not pool.leases
        pool.release(lease)


@pytest.mark.parametrize("moment", [0.0, 0.005, 0.5, 2.005, 2.015, 2.5, 3.0])
async def test_a_cancelled_pool_leaves_nothing(moment):
    """Cancellation, as by Ctrl-C, during creations, stages, forks, resets and destroys."""
    made = source()
    with anyio.move_on_after(moment) as scope:
        async with Pool(made, budget=Budget(sandboxes=6)) as pool:
            await pool.prefetch([OTHER, REPOSITORY], 3)
            while True:
                async with pool.group(READY, 3) as lease:
                    await lease.sandbox.write("trace", b"")
                async with pool.lease(OTHER), pool.group(REPOSITORY, 4):
                    await anyio.sleep(0.001)
    assert scope.cancelled_caught
    assert not made.existing
    assert not made.under_way


@pytest.mark.parametrize("layered", [True, False])
async def test_64_tasks_with_failures_cancellations_and_deaths(layered):
    """No request is lost, no sandbox is leased twice or leaked, and the budget holds."""
    recipes = [
        REPOSITORY,
        READY,
        OTHER,
        *(Recipe(stages=(CLONE, Stage("setup", (f"echo {n}",)))) for n in range(5)),
    ]
    holders: dict[str, int] = {}
    answered: dict[str, int] = {"served": 0, "failed": 0, "exhausted": 0, "cancelled": 0}

    made = source(layered=layered, failures=0.02)
    chance = random.Random(11)

    async def one(pool, number):
        for _ in range(20):
            with anyio.move_on_after(chance.choice([0.3, 5, 500])) as scope:
                try:
                    size = chance.choice([1, 1, 1, 4])
                    async with pool.group(chance.choice(recipes), size, deadline=60) as lease:
                        assert len(lease.sandboxes) == size
                        for sandbox in lease.sandboxes:
                            assert holders.setdefault(sandbox.id, number) == number, "leased twice"
                        try:
                            answered["served"] += 1
                            await lease.sandbox.write("trace", b"")
                            await anyio.sleep(chance.uniform(0, 4))
                            if chance.random() < 0.1:
                                made.dead.add(lease.sandbox.id)
                        finally:
                            for sandbox in lease.sandboxes:
                                del holders[sandbox.id]
                except errors.Exhausted:
                    answered["exhausted"] += 1
                except errors.CreateError:
                    answered["failed"] += 1
            answered["cancelled"] += scope.cancelled_caught

    budget = Budget(sandboxes=40, disk=4000, layer_disk=1000)
    async with Pool(made, budget=budget, policy=Policy(idle_seconds=60.0)) as pool:
        async with anyio.create_task_group() as tasks:
            for number in range(64):
                tasks.start_soon(one, pool, number)
                await anyio.sleep(0.01)
        assert not holders
        assert made.most <= 40
        await anyio.sleep(3600)
        assert "0 idle, 0 leased, 0 being made, 0 being reset, 0 being destroyed, 0 waiting; 0 of" in repr(
            pool
        )
        assert not made.existing
        executor = pool._executor
        for noted in (executor._sandboxes, executor._ids, executor._destroyed, executor._urgencies):
            assert not noted
    assert not made.existing
    assert answered["served"] > 300
    assert sum(answered.values()) >= 64 * 20
