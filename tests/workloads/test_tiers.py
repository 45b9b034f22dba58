from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import msgspec
import pytest

import dutyfree
from dutyfree import workloads
from dutyfree.contract import Exec, Observation, Recipe, Stage, Substrate
from dutyfree.contract.errors import UsageError
from dutyfree.contract.perform import perform
from dutyfree.study import trial
from dutyfree.study.plan import Batch
from dutyfree.study.records import Trial
from dutyfree.workloads import tiers
from dutyfree.workloads.fixture import Fixture
from dutyfree.workloads.gitserver import GitServer, listen_address, serve
from dutyfree.workloads.project import ATTRS
from dutyfree.workloads.workload import Workload


@pytest.fixture(
    params=[
        "bare",
        pytest.param("native", marks=pytest.mark.native),
        pytest.param("docker", marks=pytest.mark.docker),
    ]
)
async def substrate(request: pytest.FixtureRequest) -> AsyncIterator[Substrate]:
    async with dutyfree.open(request.param) as substrate:
        yield substrate


@pytest.fixture
async def server(fixture: Fixture, substrate: Substrate) -> AsyncIterator[GitServer]:
    async with serve(fixture, [listen_address(substrate.host_address or "")]) as server:
        yield server


async def rollout(substrate: Substrate, workload: Workload) -> Trial:
    await substrate.prepare(workload.recipe)
    return await trial.run(substrate, workload, Batch(workload.name, substrate.name, 1, (0,)), 0, 500)


async def build(name: str, fixture: Fixture, url: str) -> Workload:
    return await anyio.to_thread.run_sync(workloads.build, name, fixture, url)


@pytest.mark.parametrize("name", ["T0", "T1", "T2", "trajectory-10"])
async def test_runs(name: str, fixture: Fixture, substrate: Substrate, server: GitServer) -> None:
    workload = await build(name, fixture, server.url(substrate.host_address or ""))
    done = await rollout(substrate, workload)
    assert done.failure is None
    assert [action.label for action in done.actions] == [step.label for step in workload.actions]
    assert len(done.setup) == (0 if name in ("T0", "T1") else 3)


async def test_t2_without_its_patch_fails(fixture: Fixture, bare: Substrate) -> None:
    async with serve(fixture) as server:
        workload = await build("T2", fixture, server.url())
        kept = tuple(step for step in workload.actions if step.label not in ("patch", "tests-wider"))
        done = await rollout(bare, msgspec.structs.replace(workload, actions=kept))
    assert done.failure is not None
    assert done.failure.kind == "task"
    assert done.failure.cause.startswith("test-after: exit code 1, expected 0")


async def test_t1_of_another_repository_fails(fixture: Fixture, bare: Substrate, tmp_path: Path) -> None:
    other = tmp_path / "attrs"
    await anyio.to_thread.run_sync(shutil.copytree, fixture.checkout, other)
    source = await anyio.Path(other / fixture.patch.path).read_bytes()
    call = b"\n\n_transform_attrs(None, None, False, False, None)\n"
    await anyio.Path(other / fixture.patch.path).write_bytes(source + call)
    recipe = Recipe(stages=(Stage("repository", files={ATTRS.name: other}),))
    workload = msgspec.structs.replace(await build("T1", fixture, ""), recipe=recipe)
    done = await rollout(bare, workload)
    assert done.failure is not None
    assert done.failure.cause.startswith("symbols: expected ")


async def test_nothing_is_written_but_where_it_belongs(fixture: Fixture, bare: Substrate) -> None:
    async with serve(fixture) as server:
        workload = await build("T2", fixture, server.url())
        async with bare.sandbox(workload.recipe, limits=workload.limits) as sandbox:
            for stage in workload.setup:
                for command in stage.commands:
                    assert (await sandbox.exec(command)).ok
            for step in workload.actions:
                await perform(sandbox, step.action)
            assert {entry.name for entry in await sandbox.list(".")} == {"attrs", "deps", "wheels"}


@pytest.mark.slow
async def test_the_whole_suite(fixture: Fixture, bare: Substrate) -> None:
    async with serve(fixture) as server:
        workload = await anyio.to_thread.run_sync(workloads.build, "T2", fixture, server.url(), True)
        done = await rollout(bare, workload)
    assert done.failure is None
    assert "tests-full" in [action.label for action in done.actions]


@pytest.mark.parametrize(
    "name", ["T3", "t0", "", "trajectory", "trajectory-", "trajectory-x", "trajectory-²"]
)
def test_unknown_names(name: str) -> None:
    with pytest.raises(UsageError, match="there is no workload") as raised:
        workloads.check_name(name)
    assert "trajectory-N" in raised.value.remedy


@pytest.mark.parametrize("name", ["trajectory-0", "trajectory-010"])
def test_wrong_lengths(name: str) -> None:
    with pytest.raises(UsageError, match="no valid length"):
        workloads.build(name, None, "")


def test_only_t0_needs_no_fixture() -> None:
    assert workloads.build("T0", None, "").actions == ()
    with pytest.raises(UsageError, match="T1 needs the attrs fixture"):
        workloads.build("T1", None, "")


def test_a_git_that_fails_is_a_wrong_answer(tmp_path: Path) -> None:
    """Even where nothing is expected to have changed: no output is not the same as no changes."""
    step = tiers.status("status")
    assert isinstance(step.action, Exec)
    ran = subprocess.run(
        ["sh", "-c", str(step.action.command)], cwd=tmp_path, capture_output=True, check=False
    )
    assert step.expect.problem(Observation(exit_code=ran.returncode, stdout=ran.stdout))


async def test_a_clone_from_a_path_copies_what_it_clones(fixture: Fixture, bare: Substrate) -> None:
    """Not every file system of a sandbox has hard links, and they would be less work than a clone."""
    clone, *_ = tiers.setup(fixture, str(fixture.repository))[0].commands
    async with bare.sandbox() as sandbox:
        assert (await sandbox.exec(clone)).ok
        linked = await sandbox.exec(["find", fixture.project.name, "-type", "f", "-links", "+1"])
    assert linked.ok
    assert not linked.stdout
