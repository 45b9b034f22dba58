"""The study from plan to records, on the scripted substrate and on the real host."""

from __future__ import annotations

import errno
import os
import sys
from collections import Counter
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest

from dutyfree import workloads
from dutyfree.analysis.model import CautionKind
from dutyfree.analysis.summary import summarise
from dutyfree.contract import Limits
from dutyfree.contract.errors import CreateError, PlanError, RecordsError, Unavailable
from dutyfree.study import plan as plans
from dutyfree.study import records, runner, trial
from dutyfree.study.plan import Plan
from dutyfree.study.workers import WorkerDied


class Watching:
    def __init__(self):
        self.notes = []
        self.trials = []
        self.total = 0
        self.done = 0
        self.warmups = 0

    def note(self, text):
        self.notes.append(text)

    def begin(self, done, total, warmups):
        self.done, self.total, self.warmups = done, total, warmups

    def ended(self, ended, done, total, seconds_left):
        self.trials.append((ended, done, total, seconds_left))


def plan(**changes):
    fields: dict[str, Any] = {
        "name": "test",
        "substrates": ["quick", "slow"],
        "options": {
            "quick": {"use": "scripted", "exit_code": 0, "stdout": "ready\n"},
            "slow": {"use": "scripted", "exit_code": 0, "stdout": "ready\n", "create_seconds": 0.005},
        },
        "workloads": {"T0": 4},
        "warmups": 1,
    }
    return plans.check(msgspec.convert(fields | changes, Plan))


async def run(wanted, out, *, resume=False, budget=None):
    watching = Watching()
    found = await runner.run(wanted, out, resume=resume, progress=watching, budget=budget)
    return found, watching


async def test_every_trial_is_run_and_recorded(tmp_path):
    found, watching = await run(plan(parallel={"T0": [2]}), tmp_path)
    assert len(found.trials) == 2 + 2 * 4 + 2 * 4
    assert len(found.measured) == 16
    assert {one.cell for one in found.measured} == {
        ("T0", label, parallel) for label in ("quick", "slow") for parallel in (1, 2)
    }
    assert all(one.ok for one in found.trials)
    assert watching.total == len(found.measured) == watching.trials[-1][1]
    assert watching.warmups == 2
    assert [(ended.warmup, *count) for ended, *count, _ in watching.trials[:3]] == [
        (True, 1, 2),
        (True, 2, 2),
        (False, 1, 16),
    ]
    assert watching.trials[-1][3] == 0.0
    assert set(found.substrates) == {"quick", "slow"}
    assert found.study.host["host_key"]


async def test_phases_are_measured_where_they_happen(tmp_path):
    found, _ = await run(plan(), tmp_path)
    slow = [one for one in found.measured if one.substrate == "slow"]
    assert all(one.creation >= 0.005 for one in slow)
    for one in found.measured:
        assert one.first is not None
        assert one.first.seconds <= one.readiness
        assert one.creation + one.readiness + one.cleanup <= one.total


async def test_a_resumed_study_ends_with_the_same_trials(tmp_path):
    whole, _ = await run(plan(), tmp_path / "whole")
    await run(plan(), tmp_path / "cut")
    path = tmp_path / "cut" / records.FILE
    lines = path.read_bytes().splitlines(keepends=True)
    for kept in {*range(0, len(lines), 2), len(lines) - 1, len(lines)}:
        torn = b"" if kept == len(lines) else lines[kept][:7]
        path.write_bytes(b"".join(lines[:kept]) + torn)
        found, watching = await run(plan(), tmp_path / "cut", resume=True)
        assert sorted(one.id for one in found.measured) == sorted(one.id for one in whole.measured)
        assert watching.done + sum(not ended.warmup for ended, *_ in watching.trials) == watching.total
        # Every session warms up what it is going to measure, and nothing else.
        last = [ended for ended, *_ in watching.trials]
        measured = {(one.workload, one.substrate) for one in last if not one.warmup}
        assert {(one.workload, one.substrate) for one in last if one.warmup} == measured
        assert len({one.id for one in found.trials}) == len(found.trials)


async def test_only_the_workloads_that_the_plan_names_are_warmed_up(tmp_path):
    found, _ = await run(plan(workloads={"T0": 1, "trajectory-10": 1}, warm_up=["T0"]), tmp_path)
    assert [one.workload for one in found.trials if one.warmup] == ["T0", "T0"]
    assert len(found.measured) == 4


async def test_a_study_stops_when_its_budget_is_used_up_and_can_be_resumed(tmp_path):
    found, watching = await run(plan(), tmp_path, budget=0.0)
    assert not found.trials
    assert watching.notes[-1] == "the budget is used up: the rest of the plan is left"
    (said,) = [one.text for one in summarise(found).cautions if "budget" in one.text]
    assert said.startswith("the study stopped when its budget of 0\N{NO-BREAK SPACE}s was used up")
    found, _ = await run(plan(), tmp_path, resume=True, budget=3600.0)
    assert len(found.measured) == 8
    assert not [one for one in summarise(found).cautions if "budget" in one.text]


async def test_a_slow_cell_has_fewer_trials_also_after_a_resume(tmp_path):
    wanted = plan(
        substrates=["quick", "slow"],
        options={
            "quick": {"use": "scripted", "exit_code": 0, "stdout": "ready\n"},
            "slow": {"use": "scripted", "exit_code": 0, "stdout": "ready\n", "create_seconds": 2.5},
        },
        workloads={"T0": 6},
        fewer=[{"seconds": 2.5, "trials": 2}],
        warmups=0,
    )
    found, watching = await run(wanted, tmp_path)
    assert Counter(one.substrate for one in found.measured) == {"quick": 6, "slow": 2}
    assert [one.index for one in found.measured if one.substrate == "slow"] == [0, 3]
    assert watching.trials[-1][1:3] == (8, 8)
    assert [cell.planned for cell in summarise(found).cells] == [6, 2]
    _, again = await run(wanted, tmp_path, resume=True)
    assert not again.trials


async def test_records_are_not_overwritten(tmp_path):
    await run(plan(), tmp_path)
    before = (tmp_path / records.FILE).read_bytes()
    with pytest.raises(RecordsError, match=r"already.*--resume"):
        await run(plan(), tmp_path)
    with pytest.raises(PlanError, match="another plan"):
        await run(plan(seed=2), tmp_path, resume=True)
    assert (tmp_path / records.FILE).read_bytes() == before


async def test_records_of_unlike_hosts_are_not_mixed(tmp_path):
    await run(plan(), tmp_path)
    path = tmp_path / records.FILE
    first, _, rest = path.read_bytes().partition(b"\n")
    line = msgspec.json.decode(first)
    line["host"]["cpu"] = "another"
    path.write_bytes(msgspec.json.encode(line) + b"\n" + rest)
    with pytest.raises(RecordsError, match=r"another machine \(cpu: 'another'"):
        await run(plan(), tmp_path, resume=True)


@pytest.mark.parametrize(
    ("phase", "recorded"), [("create", "create"), ("exec", "ready"), ("cleanup", "cleanup")]
)
async def test_failures_are_recorded_with_phase_and_cause(tmp_path, phase, recorded):
    """What breaks under the first command is a failure to become ready."""
    options = {"use": "scripted", "exit_code": 0, "stdout": "ready\n", "fail_phase": phase, "fail_every": 2}
    found, _ = await run(plan(substrates=["bad"], options={"bad": options}, warmups=0), tmp_path)
    failed = [one.failure for one in found.trials if one.failure is not None]
    assert len(failed) == 2
    assert all(failure.kind == "infrastructure" and failure.phase == recorded for failure in failed)
    assert all(failure.cause for failure in failed)
    assert all(one.total > 0 for one in found.trials)


async def test_a_wrong_answer_is_the_tasks_failure(tmp_path):
    options = {"use": "scripted", "exit_code": 1}
    found, _ = await run(plan(substrates=["bad"], options={"bad": options}, warmups=0), tmp_path)
    assert {one.failure.kind for one in found.trials if one.failure} == {"task"}
    assert len(found.trials) == 4


async def test_an_overlong_trial_is_cut_off_and_counted(tmp_path):
    options = {"use": "scripted", "exit_code": 0, "stdout": "ready\n", "exec_seconds": 30.0}
    wanted = plan(
        substrates=["hung"], options={"hung": options}, warmups=0, timeout=0.05, workloads={"T0": 2}
    )
    found, _ = await run(wanted, tmp_path)
    assert [one.failure.kind for one in found.trials if one.failure] == ["timeout", "timeout"]


async def test_an_optional_substrate_may_be_missing(tmp_path):
    options = {
        "gone": {"use": "docker", "host": "/nonexistent/docker.sock"},
        "quick": plan().options["quick"],
    }
    wanted = plan(substrates=["quick", "gone"], optional=["gone"], options=options)
    found, watching = await run(wanted, tmp_path)
    assert {one.substrate for one in found.trials} == {"quick"}
    assert found.substrates["gone"].unavailable
    assert any("gone is left out" in note for note in watching.notes)


async def test_an_optional_substrate_may_be_unknown(tmp_path):
    wanted = plan(
        substrates=["quick", "later"],
        options={"quick": {"use": "scripted"}, "later": {"use": "not-installed", "size": 3}},
        optional=["later"],
    )
    found, watching = await run(wanted, tmp_path)
    assert {one.substrate for one in found.trials} == {"quick"}
    said = found.substrates["later"].unavailable
    assert said is not None
    assert said.startswith("unknown substrate 'not-installed'")
    assert watching.notes[0].startswith("later is left out: unknown substrate 'not-installed'")


async def test_a_missing_substrate_that_is_wanted_stops_the_study(tmp_path):
    options = {
        "gone": {"use": "docker", "host": "/nonexistent/docker.sock"},
        "quick": plan().options["quick"],
    }
    wanted = plan(substrates=["quick", "gone"], options=options)
    with pytest.raises(Unavailable):
        await run(wanted, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "notes").touch()
    with pytest.raises(Unavailable):
        await run(wanted, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


async def test_records_stay_when_their_study_is_refused_later(tmp_path, breaking):
    wanted = plan(substrates=["breaking"], options={"breaking": breaking})
    await run(wanted, tmp_path / "out", budget=0.0)
    path = anyio.Path(tmp_path, "out", "records.jsonl")
    before = await path.read_bytes()
    (tmp_path / "unprepared").touch()
    with pytest.raises(CreateError):
        await run(wanted, tmp_path / "out", resume=True)
    assert (await path.read_bytes()).startswith(before)


@pytest.fixture
def breaking(tmp_path):
    """The options of a substrate of a third party, whose process reads ``tmp_path``."""
    use = "tests.study.breaking:Breaking"
    return {"use": use, "directory": str(tmp_path), "exit_code": 0, "stdout": "ready\n"}


async def test_an_optional_substrate_that_cannot_be_prepared_is_left_out(tmp_path, breaking):
    (tmp_path / "unprepared").touch()
    options = {"quick": plan().options["quick"], "breaking": breaking}
    wanted = plan(substrates=["quick", "breaking"], optional=["breaking"], options=options)
    found, _ = await run(wanted, tmp_path / "optional")
    assert {one.substrate for one in found.trials} == {"quick"}
    assert "no image can be had" in (found.substrates["breaking"].unavailable or "")
    with pytest.raises(CreateError, match=r"no image can be had \(be root\)"):
        await run(plan(substrates=["quick", "breaking"], options=options), tmp_path / "wanted")


async def test_a_substrate_that_goes_away_stops_the_study_and_keeps_its_records(tmp_path, breaking):
    (tmp_path / "gone-after").write_text("6")  # the facts, the warm-up, and some trials
    wanted = plan(substrates=["breaking"], options={"breaking": breaking}, workloads={"T0": 50})
    with pytest.raises(Unavailable, match=r"breaking is no longer available.*start it again.*--resume"):
        await run(wanted, tmp_path / "out")
    kept = await anyio.to_thread.run_sync(records.read, tmp_path / "out")
    failed = [one for one in kept.trials if not one.ok]
    assert len(failed) == runner.GIVE_UP_AFTER
    (tmp_path / "gone-after").unlink()
    (tmp_path / "gone").unlink()
    found, _ = await run(wanted, tmp_path / "out", resume=True)
    assert len(found.measured) == 50


async def test_each_label_has_a_process_of_its_own(tmp_path, breaking):
    labels = ["one", "other"]
    found, _ = await run(plan(substrates=labels, options=dict.fromkeys(labels, breaking)), tmp_path / "out")
    pids = {facts.facts["pid"] for facts in found.substrates.values()} | {str(os.getpid())}
    assert len(pids) == 3


async def test_a_worker_that_dies_is_an_infrastructure_failure(tmp_path, breaking):
    (tmp_path / "killed-after").write_text("5")
    options = {"quick": plan().options["quick"], "breaking": breaking}
    wanted = plan(substrates=["quick", "breaking"], options=options, workloads={"T0": 20})
    with pytest.raises(WorkerDied, match=r"process of breaking was killed by SIGKILL.*--resume"):
        await run(wanted, tmp_path / "out")
    kept = await anyio.to_thread.run_sync(records.read, tmp_path / "out")
    (lost,) = [one.failure for one in kept.trials if one.failure]
    assert (lost.kind, "killed by SIGKILL" in lost.cause) == ("infrastructure", True)
    (tmp_path / "killed-after").unlink()
    found, _ = await run(wanted, tmp_path / "out", resume=True)
    assert len(found.measured) == 40
    assert [one.failure for one in found.measured if one.failure] == [lost]


async def test_options_that_only_the_substrate_can_check_name_their_table(tmp_path):
    options = {"small": {"use": "native", "limits": {"memory": "64K"}}}
    with pytest.raises(PlanError, match=r"\[options\.small\] no program runs in 65536 bytes"):
        await run(plan(substrates=["small"], options=options), tmp_path / "out")


async def test_the_machinerys_errors_are_not_the_tasks():
    async def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    found = await trial.run(
        SimpleNamespace(sandbox=lambda *_, **__: _context(SimpleNamespace(spans=(), exec=full))),
        workloads.build("T0", None, ""),
        plans.Batch("T0", "full", 1, (0,)),
        0,
        10.0,
    )
    assert found.failure is not None
    assert (found.failure.kind, found.failure.phase) == ("infrastructure", "ready")


@asynccontextmanager
async def _context(value):
    yield value


async def test_page_caches_are_dropped_before_every_batch(tmp_path, monkeypatch):
    dropped = []
    monkeypatch.setattr(runner, "_drop_caches", lambda: dropped.append(1))
    wanted = Plan(**{**msgspec.structs.asdict(plan(warmups=0)), "drop_caches": True})
    found, _ = await run(wanted, tmp_path)
    assert len(dropped) == len(found.trials)


async def test_a_recorded_trajectory_without_a_network(tmp_path):
    look = {"type": "exec", "command": ["git", "status", "--short"], "cwd": "attrs"}
    step = {"label": "look", "kind": "inspect", "action": look}
    (tmp_path / "mine.jsonl").write_bytes(msgspec.json.encode(step))
    changes = {"workloads": {"mine": 1}, "recorded": {"mine": str(tmp_path / "mine.jsonl")}, "offline": True}
    wanted = await anyio.to_thread.run_sync(
        lambda: plan(substrates=["bare"], options={}, warmups=0, **changes)
    )
    found, _ = await run(wanted, tmp_path / "out")
    assert [(one.workload, one.failure) for one in found.trials] == [("mine", None)]
    assert [one.label for one in found.trials[0].actions] == ["look"]


async def test_padding_has_its_size(tmp_path):
    padded = workloads.build("T0", None, "").padded(100_000)
    (program,) = padded.recipe.stages[0].commands
    script = str(program[2]).replace("/opt", str(tmp_path))
    await anyio.run_process([sys.executable, "-c", script, program[3]])
    files = [path for path in (tmp_path / "padding").rglob("*") if path.is_file()]
    assert sorted(path.stat().st_size for path in files) == [100_000 - (1 << 16), 1 << 16]


async def test_adaptive_stopping_ends_a_settled_cell_early(tmp_path):
    # Only trials whose spread is far below the asked width can settle; the fake's are.
    options = {"use": "scripted", "exit_code": 0, "stdout": "ready\n", "create_seconds": 0.02}
    wanted = plan(
        substrates=["steady"],
        options={"steady": options},
        workloads={"T0": 60},
        adaptive=plans.Adaptive(width=0.9, minimum=10),
    )
    found, _ = await run(wanted, tmp_path)
    assert 10 <= len(found.measured) < 60


async def test_bare_runs_the_smallest_tier_without_limits_that_it_cannot_enforce(tmp_path):
    limits = Limits(memory="1G", pids=100)
    found, _ = await run(plan(substrates=["bare"], options={}, limits=limits), tmp_path)
    assert all(one.ok for one in found.trials)
    assert all(one.first is not None and one.first.inside is not None for one in found.trials)
    assert found.substrates["bare"].facts["isolation"] == "none"
    (caution,) = [one for one in summarise(found).cautions if one.kind == CautionKind.UNLIKE_LIMITS]
    assert (caution.substrate, "memory and pids" in caution.text) == ("bare", True)
