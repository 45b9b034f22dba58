"""The pool with real sandboxes: how requests are served, what is reused, discarded and left behind."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

import dutyfree
from dutyfree import Ready, Service
from dutyfree.contract import Limits, Recipe, Stage, errors
from dutyfree.contract.abilities import Pooling
from dutyfree.engine.pool.scheduler.values import Budget, Policy
from tests.awaiting import enter, service_ended, together, until, until_not
from tests.engine import counts
from tests.processes import eventually, speaking_python

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("cache")]


@pytest.fixture
async def pooled() -> AsyncIterator[Any]:
    async with opened("native") as substrate:
        yield substrate


def opened(name: str, **options: Any) -> Any:
    return dutyfree.open(name, **options)


def recipe(name: str = "one", *, seconds: float = 0.0) -> Recipe:
    """A recipe whose stages write to ``log`` each time they run."""
    clone = Stage("repository", (f"mkdir -p repository; echo clone >> log; sleep {seconds}",))
    install = Stage("dependencies", (f"echo {name} >> log; date +%s%N > stamp; sleep {seconds}",))
    return Recipe(stages=(clone, install))


async def idle(substrate: Any, wanted: Recipe, count: int) -> None:
    with anyio.fail_after(60):
        await substrate.pool.until_idle(wanted, count)


LEAST = {"cpu.shares 2", "cpu.weight 1"}


def weights() -> set[str]:
    """The CPU weights of the control groups of our sandboxes."""
    found = set()
    for group in counts.Family(os.getpid()).groups():
        for name in ("cpu.shares", "cpu.weight"):
            with contextlib.suppress(OSError):
                found.add(f"{name} {Path(group, name).read_text().strip()}")
    return found


# --- How requests are served --------------------------------------------------------------------------------


async def test_the_sandboxes_of_a_lease_say_how_they_were_served(pooled):
    pool = await pooled.pooled()
    for first in ("cold", "warm"):
        lease = await pool.acquire(recipe(), 2)
        assert tuple(sandbox.served for sandbox in lease.sandboxes) == lease.served
        assert lease.served[0].kind == first
        assert all(served.waited == 0 for served in lease.served), "there was room"
        assert [span.name for span in lease.sandbox.spans][:1] == ["pool"]
        pool.release(lease)
        await idle(pooled, recipe(), 2)
    with pytest.raises(errors.UsageError, match="an idempotency key must be a str, not 7"):
        await pool.acquire(recipe(), idempotency_key=7)


async def test_what_is_no_recipe_is_told_how_to_write_one(pooled):
    with pytest.raises(
        errors.RecipeError, match=r"'python:3.12' is not a recipe \(write Recipe\('python:3.12'\)\)"
    ):
        pooled.sandbox("python:3.12")
    with pytest.raises(errors.RecipeError, match="7 is not a recipe"):
        await pooled.prepare(7)
    with pytest.raises(errors.RecipeError, match="is not a recipe"):
        await enter(pooled.group("host", 2))
    with pytest.raises(errors.RecipeError, match="is not a recipe"):
        await pooled.prefetch(["host"], 2)
    with pytest.raises(
        errors.RecipeError, match=r"prefetch takes a list of recipes, not one recipe \(write \[recipe\]\)"
    ):
        await pooled.prefetch(recipe(), 2)
    with pytest.raises(errors.RecipeError, match="is not a recipe"):
        await (await pooled.pooled()).acquire("host")


async def test_it_is_used_between_entering_and_leaving():
    native = opened("native")
    for _ in range(2):
        with pytest.raises(errors.UsageError, match=r"not open \(use it inside of: async with"):
            native.sandbox()
        with pytest.raises(errors.UsageError, match="not open"):
            await enter(native.group(recipe(), 2))
        with pytest.raises(errors.UsageError, match="not open"):
            await native.prefetch([recipe()], 2)
        with pytest.raises(errors.UsageError, match="not open"):
            await native.prepare(recipe())
    async with native:
        await native.prefetch([recipe()], 1)
        await idle(native, recipe(), 1)
    with pytest.raises(errors.UsageError, match="not open"):
        await native.prefetch([recipe()], 1)
    with pytest.raises(errors.UsageError, match="not open"):
        native.sandbox()
    with pytest.raises(errors.PoolError, match="closed"):
        await native.pool.keep(recipe(), 1)


async def test_a_group_with_limits_of_its_own_says_how_it_was_served(pooled):
    wanted, limits = recipe(seconds=0.2), Limits(pids=100)
    for first in (("cold", "none"), ("layer", "dependencies")):
        async with pooled.group(wanted, 3, limits=limits) as group:
            served = [sandbox.served for sandbox in group]
        assert (served[0].kind, served[0].stage) == first
        assert {(one.kind, one.stage) for one in served[1:]} == {("forked", "dependencies")}
        assert [one.sandbox for one in served] == [sandbox.id for sandbox in group]
        assert first[0] != "cold" or all(one.seconds >= 0.4 for one in served), "with its stages"
        assert all(one.cold_seconds >= 0.4 for one in served)


async def test_nothing_is_kept_until_somebody_wants_it(pooled: Any) -> None:
    wanted = recipe(seconds=0.2)
    async with pooled.sandbox(wanted) as sandbox:
        assert (sandbox.served.kind, sandbox.served.stage) == ("cold", "none")
    async with pooled.sandbox(wanted) as sandbox:
        assert (sandbox.served.kind, sandbox.served.stage) == ("layer", "dependencies")
        assert sandbox.served.cold_seconds >= 0.4
    async with opened("native") as another:
        await another.prepare(Recipe(stages=wanted.stages[:1]))  # in use; the other layers are on disk
        async with another.sandbox(wanted) as sandbox:
            assert (sandbox.served.kind, sandbox.served.stage) == ("layer", "dependencies")
    async with opened("native") as another, another.sandbox(wanted) as sandbox:
        assert (sandbox.served.kind, sandbox.served.stage) == ("layer", "dependencies")
    assert pooled.pool is None
    offered: object = pooled
    assert isinstance(offered, Pooling)
    await until_not(lambda: anyio.to_thread.run_sync(counts.sandboxes, os.getpid()))


async def test_what_was_prefetched_is_warm_and_never_used_twice(pooled: Any) -> None:
    wanted = recipe()
    await pooled.prefetch([wanted], 2)
    await idle(pooled, wanted, 2)
    seen = set()
    for _ in range(4):
        async with pooled.sandbox(wanted) as sandbox:
            assert (sandbox.served.kind, sandbox.served.stage) == ("warm", "dependencies")
            assert sandbox.id not in seen
            seen.add(sandbox.id)
            assert await sandbox.read("log") == b"clone\none\n"
            assert await pooled.sandboxes() == [sandbox.id]
            await sandbox.write("trace", b"")
            await sandbox.exec("sleep 100 & echo > /dev/shm/trace; echo > /tmp/trace")
        with pytest.raises(errors.SandboxClosed):
            await sandbox.exec("true")
        assert await pooled.sandboxes() == []
        await idle(pooled, wanted, 2)
    assert pooled.pool.ledger.served["warm", "dependencies"] == 4
    assert pooled.pool.ledger.events["resets"] == 4


async def test_a_sandbox_of_the_pool_is_as_any_other(pooled: Any) -> None:
    await pooled.prefetch([Recipe()])
    await idle(pooled, Recipe(), 1)
    look = "env; id; umask; hostname; pwd; ls -A . /tmp /dev/shm; ulimit -a; cat /proc/self/cgroup | wc -l"
    async with pooled.sandbox() as warm, pooled.sandbox(limits=Limits(pids=2048)) as new:
        assert (warm.served.kind, new.served.kind) == ("warm", "layer")
        assert (await warm.exec(look)).stdout == (await new.exec(look)).stdout


async def test_limits_of_its_own_are_not_the_pools(pooled: Any) -> None:
    await pooled.prefetch([Recipe()])
    await idle(pooled, Recipe(), 1)
    async with pooled.sandbox(limits=Limits(memory=64 << 20)) as sandbox:
        assert sandbox.served.kind == "layer"
    async with pooled.sandbox(limits=Limits(output=10)) as sandbox:
        assert sandbox.served.kind == "warm"
        assert (await sandbox.exec("seq 1000")).cut.stdout > 0


@pytest.mark.root("the network is changed in life with root only")
async def test_the_network_is_opened_at_the_hand_out_and_closed_after(pooled: Any) -> None:
    await pooled.prefetch([Recipe()], 1)
    await idle(pooled, Recipe(), 1)
    connects = "import socket; socket.create_connection(('{}', {}), 100)"
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        command = ["python3", "-c", connects.format(pooled.host_address, server.sockets[0].getsockname()[1])]
        async with pooled.sandbox(limits=Limits(network="on")) as sandbox:
            assert (await sandbox.exec(command)).ok
        await idle(pooled, Recipe(), 1)
        async with pooled.sandbox() as sandbox:
            assert sandbox.served.kind == "warm"
            assert not (await sandbox.exec(command)).ok


@pytest.mark.root("without root there are no lists")
async def test_a_network_that_cannot_be_is_refused_as_without_a_pool(pooled: Any) -> None:
    told = []
    for _ in range(2):
        with pytest.raises(errors.CreateError) as refused:
            await enter(pooled.sandbox(limits=Limits(network=("not a/name",))))
        told.append(str(refused.value))
        await pooled.pooled()
    assert told[0] == told[1]
    assert await pooled.sandboxes() == []


async def test_a_shorter_prefix_is_promoted_by_what_is_missing() -> None:
    wanted = recipe()
    shorter = Recipe(stages=wanted.stages[:1])
    # Only images have layers here, so a repository exists in an idle sandbox only.
    async with opened("native", policy={"deepest_layer": 1, "refill": False}) as substrate:
        await substrate.prefetch([shorter])
        await idle(substrate, shorter, 1)
        async with substrate.sandbox(wanted) as sandbox:
            assert (sandbox.served.kind, sandbox.served.stage) == ("promoted", "repository")
            assert await sandbox.read("log") == b"clone\none\n"
            assert [span.name for span in sandbox.spans] == ["pool", "stage dependencies"]
            await sandbox.write("log", b"")
            await sandbox.reset()
            assert await sandbox.read("log") == b"clone\none\n"
        await idle(substrate, wanted, 1)
        async with substrate.sandbox(wanted) as sandbox:
            assert sandbox.served.kind == "warm"
            assert await sandbox.read("log") == b"clone\none\n"


async def test_two_cold_requests_of_one_prefix_run_its_stages_once(pooled: Any) -> None:
    pool, supply = await pooled.pooled(), pooled.node.source
    wanted, stamps, kinds = recipe(seconds=0.3), set(), []
    create = supply.create

    async def once_all_have_asked(*what: Any, **how: Any) -> Any:
        while len(pool._state.claims) < 8:
            await pool.changed()
        return await create(*what, **how)

    supply.create = once_all_have_asked

    async def one() -> None:
        async with pooled.sandbox(wanted) as sandbox:
            stamps.add(await sandbox.read("stamp"))
            kinds.append(sandbox.served.kind)

    await together(*[one] * 8)
    assert len(stamps) == 1
    assert sorted(kinds) == ["cold", *["joined"] * 7]


@pytest.mark.root("a stage reaches this machine with root only")
async def test_a_stage_made_for_the_stock_hurries_once_somebody_waits(pooled: Any) -> None:
    """The stage ends only after its CPU weight was raised."""
    begun, released = asyncio.Event(), asyncio.Event()

    async def hold(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.set()
        await released.wait()
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    address = (pooled.host_address, server.sockets[0].getsockname()[1])
    waits = f"import socket; socket.create_connection({address}).recv(1)"
    wanted = Recipe(stages=(Stage("setup", (("python3", "-c", waits),)),))

    async def ask() -> None:
        async with pooled.sandbox(wanted) as sandbox:
            assert sandbox.served.kind == "joined"

    async with server:
        await pooled.prefetch([wanted])
        with anyio.fail_after(60):
            await begun.wait()
            assert LEAST & await anyio.to_thread.run_sync(weights)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                while LEAST & await anyio.to_thread.run_sync(weights):
                    pass
                released.set()


async def test_a_group_is_one_prepared_state() -> None:
    wanted = recipe()
    async with opened("native", policy={"deepest_layer": 1}) as substrate:
        async with substrate.group(wanted, 8) as group:
            assert len({sandbox.id for sandbox in group}) == 8
            assert len({await sandbox.read("stamp") for sandbox in group}) == 1
            assert sorted(sandbox.served.kind for sandbox in group) == ["cold", *["forked"] * 7]
            await group[0].write("mine", b"")
            with pytest.raises(FileNotFoundError):
                await group[1].read("mine")
        with pytest.raises(errors.SandboxClosed):
            await group[7].exec("true")
        with pytest.raises(errors.UsageError):
            await enter(substrate.group(wanted, 0))


async def test_a_group_with_limits_of_its_own(pooled: Any) -> None:
    async with pooled.group(recipe(), 3, limits=Limits(pids=100)) as group:
        assert len({await sandbox.read("stamp") for sandbox in group}) == 1
    assert pooled.pool is None


# --- What fails ---------------------------------------------------------------------------------------------


async def test_a_stage_that_fails_is_told_and_at_last_not_tried(pooled: Any) -> None:
    await pooled.pooled()
    broken = Recipe(stages=(*recipe().stages, Stage("setup", ("echo what went wrong >&2; exit 3",))))
    for _ in range(3):
        with pytest.raises(errors.StageError, match="ended with 3: what went wrong") as failed:
            await enter(pooled.sandbox(broken))
        assert (failed.value.number, failed.value.command) == (3, "echo what went wrong >&2; exit 3")
        assert failed.value.output == "what went wrong"
        assert "all that it printed is in" in failed.value.remedy
    with pytest.raises(errors.Quarantined, match="what went wrong"):
        await enter(pooled.sandbox(broken))
    async with pooled.sandbox(recipe()) as sandbox:
        assert (await sandbox.exec("true")).ok


async def test_an_image_that_is_not_there_is_at_last_not_asked_for(pooled: Any) -> None:
    await pooled.pooled()
    broken = Recipe("localhost:1/absent:1", recipe().stages)
    for _ in range(3):
        with pytest.raises(errors.StageError, match="localhost:1") as failed:
            await enter(pooled.sandbox(broken))
        assert failed.value.number == 0
    with pytest.raises(errors.Quarantined, match="stage 'image' failed 3 times") as refused:
        await enter(pooled.sandbox(broken))
    assert refused.value.stage == "image"
    async with pooled.sandbox(recipe()) as sandbox:
        assert (await sandbox.exec("true")).ok


async def test_an_exhausted_pool_says_so() -> None:
    async with opened("native", budget=Budget(sandboxes=1), patience=1) as substrate:
        pool = await substrate.pooled()
        async with pool.lease(Recipe(), deadline=600):
            with pytest.raises(errors.Exhausted, match="1 of 1 sandboxes are leased"):
                await enter(substrate.sandbox())
        async with pool.lease(Recipe(), deadline=600) as lease:
            assert (await lease.sandbox.exec("true")).ok


DIRT = {
    "processes": "sleep 100 & true",
    "files": "echo > file",
    "files elsewhere": "rm /etc/hosts",
    "files of a size": "truncate -s 0 /etc/hosts",
    "files in memory": "echo > /dev/shm/file",
    "shared memory": "ipcmk -M 4096",
}


@pytest.mark.parametrize("dirt", DIRT)
async def test_a_sandbox_that_is_not_as_new_is_discarded(pooled: Any, dirt: str) -> None:
    """If a reset leaves something behind, the error names it, and the sandbox is discarded."""
    pool, supply = await pooled.pooled(), pooled.node.source
    reset = supply.reset

    async def half_done(sandbox: Any) -> Any:
        fresh, depth = await reset(sandbox)
        await fresh.exec(DIRT[dirt])
        with pytest.raises(errors.ExecError, match=f"not as new: .*{dirt.split()[0]}"):
            await fresh.verify()
        return fresh, depth

    supply.reset = half_done
    async with pooled.sandbox() as sandbox:
        assert (await sandbox.exec("true")).ok
    await until(lambda: pool.ledger.events["died"] and "0 being destroyed" in repr(pool), pool.changed)
    assert pool.ledger.events["discarded"] == 1
    assert repr(pool).startswith("<Pool: 0 idle, 0 leased")


async def test_verification_finds_a_socket_and_passes_a_new_one(pooled: Any) -> None:
    async with pooled.sandbox() as sandbox:
        await sandbox.verify()
        listen = "import socket; held = socket.socket(); print(flush=True); input()"
        process = await sandbox.start(["python3", "-c", listen], stdin=True)
        async for _ in process.output():
            break
        with pytest.raises(errors.ExecError, match=r"processes.*sockets"):
            await sandbox.verify()
        await process.kill()


async def test_an_idle_sandbox_that_dies_is_replaced(pooled: Any) -> None:
    await pooled.prefetch([Recipe()])
    await idle(pooled, Recipe(), 1)
    (init,) = counts.sandboxes(os.getpid())
    os.kill(init, signal.SIGKILL)
    await until(lambda: pooled.pool.ledger.events["died"] >= 1, pooled.pool.changed)
    await idle(pooled, Recipe(), 1)
    async with pooled.sandbox() as sandbox:
        assert sandbox.served.kind == "warm"
        assert (await sandbox.exec("echo whole")).stdout == b"whole\n"


# --- Leases -------------------------------------------------------------------------------------------------


async def test_a_lease_ends_unless_it_is_kept_alive(pooled: Any) -> None:
    pool = await pooled.pooled()
    lease = await pool.acquire(Recipe(), lease_seconds=1000, labels={"run": "7"}, idempotency_key="once")
    pool.keep_alive(lease, 2000)
    assert lease.until > anyio.current_time() + 1000
    assert lease.labels == {"run": "7"}
    assert await pool.acquire(Recipe(), idempotency_key="once") is lease
    assert (await lease.sandbox.exec("true")).ok
    pool.keep_alive(lease, 0.1)
    await until(lambda: lease.over and "0 being destroyed" in repr(pool), pool.changed)
    with pytest.raises(errors.SubstrateError):
        await lease.sandbox.exec("true")
    with pytest.raises(errors.LeaseEnded):
        pool.keep_alive(lease)
    with pytest.raises(errors.LeaseEnded):
        await pool.acquire(Recipe(), idempotency_key="once")


async def test_leased_sandboxes_are_counted_with_all_others(pooled: Any) -> None:
    pool = await pooled.pooled()
    lease = await pool.acquire(Recipe(), 2, labels={"run": "7"})
    async with pooled.sandbox() as third:
        assert set(await pooled.sandboxes()) == {third.id, *(one.id for one in lease.sandboxes)}
    pool.release(lease)
    assert await pooled.sandboxes() == []


@pytest.mark.parametrize("name", ["native", "native-cold"])
async def test_what_a_sandboxs_own_stages_wrote_goes_with_it(name: str) -> None:
    async with opened(name, policy={"deepest_layer": 1, "park": False}) as substrate:
        async with substrate.group(recipe(), 4) as group:
            assert substrate.node.layers.size > 0
            assert await group[3].read("log") == b"clone\none\n"
        with pytest.raises(errors.StageError):
            await enter(substrate.group(Recipe(stages=(*recipe().stages, Stage("setup", ("false",)))), 2))
        if (pool := substrate.pool) is not None:
            await until(lambda: "0 being made, 0 being reset, 0 being destroyed" in repr(pool), pool.changed)
        await until(lambda: not substrate.node.layers.size)


async def test_layers_go_when_the_disk_is_full() -> None:
    """The least valuable unused layer is evicted, with its files."""
    from dutyfree.engine.store.store import Store

    budget = Budget(disk=1 << 20, layer_disk=300_000)
    async with opened("native", budget=budget) as substrate:
        await substrate.pooled()
        for number in range(6):
            fill = Stage("setup", (f"head -c 300000 /dev/urandom > {number}",))
            await enter(substrate.sandbox(Recipe(stages=(fill,))))
        assert substrate.pool.ledger.events["layers forgotten"] >= 2
        with anyio.fail_after(60):
            size = math.inf
            while size > 2 << 20:  # writing and removing layers takes a moment
                layers = await anyio.to_thread.run_sync(Store().layers)
                size = sum(facts.size for facts in layers)


# --- Under fire ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_64_tasks_with_random_deaths_lose_no_request() -> None:
    """Sandboxes and stage builds are killed at random: every request is served, and nothing is left."""
    before = await anyio.to_thread.run_sync(lambda: counts.Family(os.getpid()).launchers)
    chance = random.Random(3)
    recipes = [recipe(str(number), seconds=0.05) for number in range(6)]
    done = died = killed = looked = 0
    policy = Policy(starting=64, attempts=100, tolerated=1000)
    async with opened("native", policy=policy, budget=Budget(sandboxes=80)) as substrate:
        pool = await substrate.pooled()
        family = await anyio.to_thread.run_sync(lambda: counts.Family(os.getpid(), before))

        async def task(number: int) -> None:
            nonlocal done, died
            for turn in range(6):
                while done > looked + 32:  # noqa: ASYNC110 (lets the killer keep up)
                    await anyio.sleep(0.01)
                wanted = recipes[(number + turn) % len(recipes)]
                size = 4 if number % 8 == 0 else 1
                try:
                    async with substrate.group(wanted, size) as group:
                        for sandbox in group:
                            assert (await sandbox.read("log")).startswith(b"clone\n")
                            await sandbox.write("trace", b"")
                            await sandbox.exec("sleep 0.01")
                            assert [e.name for e in await sandbox.list(".")].count("trace") == 1
                except (errors.ExecError, errors.SandboxClosed):  # killed while leased: the error says so
                    died += 1
                done += 1

        async def killer() -> None:
            nonlocal killed, looked
            patience = 20
            while done < 64 * 6:
                found = await anyio.to_thread.run_sync(counts.sandboxes, os.getpid())
                # Kill at the rate of finished requests, on any machine; and a few times before the first
                # one, when only builds are alive. Each process has the same chance, so that a build that
                # all requests wait for survives now and then.
                spared, looked = 0.993 ** (done - looked), done
                if not done and patience:
                    spared, patience = 0.95, patience - 1
                for init in (init for init in sorted(found) if chance.random() > spared):
                    try:
                        os.kill(init, signal.SIGKILL)
                        killed += 1
                    except ProcessLookupError:
                        pass
                await anyio.sleep(0.05)

        with anyio.fail_after(800):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(killer)
                for number in range(64):
                    tasks.start_soon(task, number)
        assert done == 64 * 6
        assert killed > 10
        assert died < done / 2
        ended = "0 leased, 0 being made, 0 being reset, 0 being destroyed, 0 waiting"
        await until(lambda: ended in repr(pool), pool.changed)
    assert await anyio.to_thread.run_sync(family.remains) == set()


async def test_a_pool_that_breaks_is_told_and_leaves_nothing() -> None:
    async def break_down() -> None:
        raise RuntimeError("a fault of ours")

    before = await anyio.to_thread.run_sync(lambda: counts.Family(os.getpid()).launchers)
    with pytest.raises(ExceptionGroup) as told:  # noqa: PT012 (raised on exit)
        async with opened("native") as substrate:
            await substrate.prefetch([Recipe()], 2)
            await idle(substrate, Recipe(), 2)
            family = await anyio.to_thread.run_sync(lambda: counts.Family(os.getpid(), before))
            substrate.pool._tasks.start_soon(break_down)
            await until(lambda: substrate.pool._closed)
            with pytest.raises(errors.PoolError, match="closed"):
                await enter(substrate.sandbox())
    assert "a fault of ours" in str(told.value.exceptions)
    assert await anyio.to_thread.run_sync(family.remains) == set()


OWNER = """
import anyio, dutyfree
from dutyfree.contract import Recipe, Stage

async def main():
    async with dutyfree.open("native") as substrate:
        slow = Recipe(stages=(Stage("setup", ("sleep 1000",)),))
        await substrate.prefetch([Recipe()], 8)
        await substrate.pool.until_idle(Recipe(), 8)
        async with substrate.group(Recipe(), 4):
            await substrate.prefetch([slow])
            print("warm", flush=True)
            await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_owner_of_a_warm_pool_leaves_nothing(signum: int) -> None:
    with speaking_python(OWNER) as (owner, said):
        assert said == "warm"
        assert eventually(lambda: len(counts.sandboxes(owner.pid)) >= 9)
        family = counts.Family(owner.pid)
        owner.send_signal(signum)
    assert family.remains() == set()


# --- At one warmth ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "found", "ran"),
    [
        ("native-cold", ("cold", "none"), ["repository", "dependencies", "setup"]),
        ("native-base", ("cold", "none"), ["repository", "dependencies", "setup"]),
        ("native-image", ("promoted", "image"), ["repository", "dependencies", "setup"]),
        ("native-repository", ("promoted", "repository"), ["dependencies", "setup"]),
        ("native-dependencies", ("promoted", "dependencies"), ["setup"]),
        ("native-warm", ("warm", "setup"), []),
    ],
)
async def test_a_fixed_warmth_runs_what_comes_after_for_each(
    name: str, found: tuple[str, str], ran: list[str]
) -> None:
    wanted = Recipe(stages=(*recipe().stages, Stage("setup", ("date +%s%N > own",))))
    async with opened(name) as substrate:
        assert substrate.name == name
        await substrate.prepare(wanted)
        stamps, own = set(), set()
        for _ in range(3):
            async with substrate.sandbox(wanted) as sandbox:
                assert (sandbox.served.kind, sandbox.served.stage) == found
                assert [span.name for span in sandbox.spans[1:]] == [f"stage {kind}" for kind in ran]
                assert await sandbox.read("log") == b"clone\none\n"
                stamps.add(await sandbox.read("stamp"))
                own.add(await sandbox.read("own"))
                await sandbox.remove("log")
                await sandbox.reset()
                assert await sandbox.read("log") == b"clone\none\n"
            await anyio.sleep(0.05)
        assert len(stamps) == (3 if "dependencies" in ran else 1)
        assert len(own) == (3 if ran else 1)


async def test_a_recipe_that_cannot_be_prepared(pooled: Any) -> None:
    async with opened("native-warm") as substrate:
        with pytest.raises(errors.CreateError, match="setup"):
            await substrate.prepare(Recipe(stages=(Stage("setup", ("false",)),)))


# --- Services -----------------------------------------------------------------------------------------------

SERVED = Recipe(services=(Service("sleeper", "echo up; exec sleep 1000", Ready(line="up")),))


async def test_services_run_in_what_is_warm_and_in_what_was_reset(pooled: Any) -> None:
    bare = Recipe()
    await pooled.prefetch([SERVED], 1)
    await idle(pooled, SERVED, 1)
    for _ in range(3):
        async with pooled.sandbox(SERVED) as sandbox:
            assert sandbox.served.kind == "warm"
            (state,) = await sandbox.services()
            assert (state.running, state.starts) == (True, 1)
            await sandbox.exec("pkill sleep; echo > trace")
        await idle(pooled, SERVED, 1)
        async with pooled.sandbox(SERVED) as sandbox:
            assert (await sandbox.exec("test -e trace")).exit_code == 1
        await idle(pooled, SERVED, 1)
    async with pooled.sandbox(bare) as sandbox:  # another state with the same files
        assert await sandbox.services() == ()
    assert pooled.pool.ledger.events["discarded"] == 0


async def test_an_idle_one_whose_service_ended_is_not_handed_out(pooled: Any) -> None:
    await pooled.prefetch([SERVED], 1)
    await idle(pooled, SERVED, 1)
    (init,) = await anyio.to_thread.run_sync(counts.sandboxes, os.getpid())
    (service,) = await anyio.to_thread.run_sync(counts.children, init)
    os.kill(service, signal.SIGKILL)
    (idle_one,) = pooled.pool._executor._sandboxes.values()
    await service_ended(idle_one)
    async with pooled.sandbox(SERVED) as sandbox:
        assert sandbox.id != idle_one.id
        assert (await sandbox.services())[0].running


async def test_a_group_has_services_each(pooled: Any) -> None:
    wanted = Recipe(stages=recipe().stages, services=SERVED.services)
    async with pooled.group(wanted, 3) as sandboxes:
        for sandbox in sandboxes:
            assert (await sandbox.services())[0].running
            assert (await sandbox.exec("cat log")).stdout == b"clone\none\n"


async def test_a_service_that_fails_is_a_failure_of_its_recipe(pooled: Any) -> None:
    wrong = Recipe(services=(Service("wrong", "echo not so; exit 3", Ready(line="up")),))
    await pooled.pooled()
    with pytest.raises((errors.StageError, errors.Quarantined), match=r"service 'wrong'.*not so"):
        await enter(pooled.sandbox(wrong))
    async with pooled.sandbox(Recipe()) as sandbox:
        assert (await sandbox.exec("echo fine")).ok
