"""Warm substrates: stages that they run count as set-up, and stages that are ready cost nothing."""

from __future__ import annotations

import pytest

import dutyfree
from dutyfree.contract import Exec, Limits, Recipe, Stage
from dutyfree.contract.abilities import Warmed
from dutyfree.study import runner, trial
from dutyfree.study.plan import Batch, Plan
from dutyfree.workloads.workload import Expect, Step, Workload
from tests.study.test_runner import Watching

pytestmark = pytest.mark.native

WORKLOAD = Workload(
    name="T2",
    first=Step("ready", "command", Exec(("echo", "ready"))),
    recipe=Recipe(stages=(Stage("files", ("echo wheels > wheels",)),)),
    setup=(
        Stage("repository", ("sleep 0.1; echo cloned > repository",)),
        Stage("dependencies", ("sleep 0.2; echo installed > deps",)),
    ),
    actions=(
        Step("look", "inspect", Exec("cat wheels repository deps"), Expect(contains=(b"cloned\ninst",))),
    ),
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("name", "ran"),
    [
        ("native-cold", ["files-1", "repository-2", "dependencies-3"]),
        ("native-image", ["files-1", "repository-2", "dependencies-3"]),
        ("native-repository", ["dependencies-1"]),
        ("native-dependencies", []),
        ("native-warm", []),
    ],
)
async def test_a_trial_counts_stages_as_set_up(name: str, ran: list[str]) -> None:
    async with dutyfree.open(name) as substrate:
        assert isinstance(substrate, Warmed)
        workload = WORKLOAD.with_setup_in_recipe()
        await substrate.prepare(workload.recipe)
        ended = await trial.run(substrate, workload, Batch("T2", name, 1, (0,)), 0, 60)
    assert ended.failure is None
    assert [record.label for record in ended.setup] == ran
    assert {record.kind for record in ended.setup} <= {"setup"}
    assert sum(record.seconds for record in ended.setup) >= {3: 0.3, 1: 0.2, 0: 0.0}[len(ran)]
    assert ended.creation + sum(record.seconds for record in ended.setup) <= ended.total
    assert not any(span.name.startswith("stage") for span in ended.creation_spans)


async def test_others_run_the_set_up_themselves():
    async with dutyfree.open("native") as substrate:
        assert not isinstance(substrate, Warmed)
        ended = await trial.run(substrate, WORKLOAD, Batch("T2", "native", 1, (0,)), 0, 60)
    assert ended.failure is None
    assert [record.label for record in ended.setup] == ["repository-1", "dependencies-1"]


async def test_a_study_of_warm_sandboxes(tmp_path):
    """Also with limits of the plan, which the idle sandboxes must have."""
    plan = Plan(
        name="warm",
        substrates=["native-warm"],
        workloads={"T0": 4},
        parallel={"T0": [2]},
        limits=Limits(pids=500),
    )
    found = await runner.run(plan, tmp_path / "out", resume=False, progress=Watching())
    assert [ended.failure for ended in found.trials] == [None] * len(found.trials)
    assert found.substrates["native-warm"].use == "native-warm"
    assert {span.name for ended in found.trials for span in ended.creation_spans} == {"pool"}
