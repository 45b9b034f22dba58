"""Environment variables of a recipe on the native engine: what the conformance suite cannot check."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

import dutyfree
from dutyfree import Ready, Recipe, Service, Stage, recipes
from dutyfree.contract.errors import UsageError

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("cache")]

STAMP = Stage("setup", commands=("cat /proc/sys/kernel/random/uuid > stamp",))
GIVEN = Recipe(env={"GIVEN": "by the recipe", "HOME": "/tmp"}, path=("bin",))
SAY = ["printenv", "GIVEN"]
PRELOADED = recipes.python("json")


@pytest.fixture
async def native() -> AsyncIterator[Any]:
    async with dutyfree.open("native") as substrate:
        yield substrate


async def test_recipes_that_differ_in_variables_share_layers(native: Any) -> None:
    seen = set()
    for value in ("one", "two"):
        async with native.sandbox(Recipe(stages=(STAMP,), env={"GIVEN": value})) as sandbox:
            assert (await sandbox.exec(SAY)).stdout == f"{value}\n".encode()
            seen.add(await sandbox.read("stamp"))
    assert len(seen) == 1


async def test_services_and_calls_have_the_variables_of_the_recipe() -> None:
    server = Service("server", "echo $GIVEN $OWN; exec sleep 1000", Ready(line="\n"), env={"OWN": "1"})
    other = Service("other", "echo $GIVEN; exec sleep 1000", Ready(line="\n"), env={"GIVEN": "its own"})
    code = "import os; print(os.environ['GIVEN'])"
    explain = {"DUTYFREE_EXPLAIN": "1"}
    wanted = msgspec.structs.replace(GIVEN, services=(server, other, PRELOADED))
    async with dutyfree.open("native") as opened:
        native: Any = opened
        async with native.sandbox(wanted) as sandbox, sandbox.fork(1) as (child,):
            await sandbox.reset()
            for one in (sandbox, child):
                outputs = [state.output for state in await one.services()]
                assert outputs[:2] == [b"by the recipe 1\n", b"its own\n"]
                called = await one.call("python", ["-c", code], env=explain)
                assert (called.stdout, called.stderr) == (b"by the recipe\n", b"")  # by a fork of the service


async def test_the_interpreter_of_the_path_is_preloaded(native: Any) -> None:
    stage = Stage("dependencies", commands=("python3 -m venv --without-pip .venv",))
    wanted = Recipe(stages=(stage,), services=(PRELOADED,), path=(".venv/bin",))
    code = "import sys; print(sys.prefix)"
    async with native.sandbox(wanted) as sandbox:
        called = await sandbox.call("python", ["-c", code], env={"DUTYFREE_EXPLAIN": "1"})
        assert (called.stdout, called.stderr) == (b"/workspace/.venv\n", b"")
        assert (await sandbox.exec(["python3", "-c", code], cwd="/")).stdout == called.stdout


async def test_the_pool_serves_no_sandbox_with_other_variables(native: Any) -> None:
    one, other = (Recipe(stages=(STAMP,), env={"GIVEN": value}) for value in ("one", "other"))
    stamps = set()
    for _ in range(2):  # the second time on used sandboxes, after a reset
        for recipe, value in ((one, b"one\n"), (other, b"other\n"), (Recipe(stages=(STAMP,)), b"")):
            async with native.group(recipe, 3) as group:
                for sandbox in group:
                    assert (await sandbox.exec(SAY)).stdout == value
                    stamps.add(await sandbox.read("stamp"))
    assert len(stamps) == 1
    assert native.pool is not None


async def test_a_snapshot_is_files_and_its_recipe_has_the_rest(native: Any) -> None:
    async with native.sandbox(GIVEN) as sandbox:
        usual = (await sandbox.exec(["printenv", "PATH"])).stdout
        recipe = await sandbox.snapshot()
        async with native.sandbox(recipe) as copy, copy.fork(1) as (child,):
            for one in (copy, child):
                assert (await one.exec(SAY)).stdout == b"by the recipe\n"
                assert (await one.exec(["printenv", "PATH"])).stdout == usual  # the path is not there twice
    async with native.sandbox(Recipe(recipe.image)) as copy:
        assert (await copy.exec("echo $GIVEN $HOME")).stdout == b"/workspace\n"


@pytest.mark.root("they lie on the disk with root only")
async def test_a_name_of_a_snapshot_stands_for_its_files(native: Any) -> None:
    async with native.sandbox(GIVEN) as sandbox:
        recipe = await sandbox.snapshot("kept")
        assert (recipe.env, recipe.path) == (GIVEN.env, GIVEN.path)
    async with dutyfree.open("native") as later, later.sandbox(recipe) as copy:
        assert (await copy.exec(SAY)).stdout == b"by the recipe\n"
    async with dutyfree.open("native") as later, later.sandbox(Recipe("snapshot:kept")) as copy:
        assert (await copy.exec("echo $GIVEN $HOME")).stdout == b"/workspace\n"


async def test_a_terminal_is_what_the_recipe_says(native: Any) -> None:
    for recipe, wanted in ((Recipe(), b"xterm-256color"), (Recipe(env={"TERM": "dumb"}), b"dumb")):
        async with native.sandbox(recipe) as sandbox, sandbox.terminal(["printenv", "TERM"]) as terminal:
            said = b""
            while part := await terminal.read():
                said += part
            assert said == wanted + b"\r\n"


# --- Idle ones are of any variables -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [Recipe(stages=(STAMP,)), Recipe(stages=(STAMP,), env={"GIVEN": "two", "TERM": "ansi"}, path=("bin",))],
)
async def test_an_idle_sandbox_gets_the_variables_of_the_request(native: Any, other: Recipe) -> None:
    first = Recipe(stages=(STAMP,), env={"GIVEN": "one", "ONE": "1"}, path=("/one",))
    await native.prefetch([first], 3)
    await native.pool.until_idle(first, 3)
    await native.pool.until_idle(other, 3)
    see = "echo ${GIVEN-none} ${ONE-none} ${PATH%%:*}"
    wanted = b"two none /workspace/bin\n" if other.env else b"none none /usr/local/sbin\n"
    async with native.sandbox(other) as one, native.group(other, 2) as two:
        for sandbox in (one, *two):
            assert (sandbox.served.kind, sandbox.served.recipe) == ("warm", other.key())
            assert (await sandbox.exec(see)).stdout == wanted
            async with sandbox.shell() as held:
                assert (await held.run(see)).stdout == wanted
            process = await sandbox.start(see)
            assert (await process.wait()).stdout == wanted
            async with sandbox.terminal(["printenv", "TERM"]) as terminal:
                assert (await terminal.read()).strip() == (b"ansi" if other.env else b"xterm-256color")
            await sandbox.reset()
            assert (await sandbox.exec(see)).stdout == wanted
            kept = await sandbox.snapshot()
            assert (kept.env, kept.path) == (other.env, other.path)
            async with sandbox.fork(1) as (child,):
                assert (await child.exec(see)).stdout == wanted
    async with native.sandbox(first) as sandbox:
        assert (await sandbox.exec(see)).stdout == b"one 1 /one\n"


async def test_warm_up_commands_run_without_the_variables(native: Any) -> None:
    """With these variables each program leaves a file. A warm sandbox that was prepared for them has none."""
    traced = Recipe(env={"LD_DEBUG": "statistics", "LD_DEBUG_OUTPUT": "/tmp/trace"})
    await native.prefetch([traced], 2)
    await native.pool.until_idle(traced, 2)
    async with native.sandbox(traced) as sandbox:
        await sandbox.exec("true")
        assert await sandbox.list("/tmp") != ()
    async with native.sandbox(Recipe()) as sandbox:
        assert sandbox.served.kind == "warm"
        assert await sandbox.list("/tmp") == ()


async def test_a_sandbox_with_services_serves_only_its_own_variables(native: Any) -> None:
    server = Service("server", "echo $GIVEN; exec sleep 1000", Ready(line="\n"))
    one, two = (Recipe(services=(server,), env={"GIVEN": value}) for value in ("one", "two"))
    await native.prefetch([one], 1)
    await native.pool.until_idle(one, 1)
    async with native.sandbox(two) as sandbox:
        assert sandbox.served.kind != "warm"
        assert [state.output for state in await sandbox.services()] == [b"two\n"]
    async with native.sandbox(one) as sandbox:
        assert sandbox.served.kind == "warm"
        assert (await sandbox.exec(SAY)).stdout == b"one\n"


async def test_a_request_with_other_variables_is_another_request(native: Any) -> None:
    pool = await native.pooled()
    lease = await pool.acquire(GIVEN, idempotency_key="k")
    assert await pool.acquire(msgspec.structs.replace(GIVEN), idempotency_key="k") is lease
    with pytest.raises(UsageError, match="belongs to a request for another recipe"):
        await pool.acquire(Recipe(), idempotency_key="k")
