"""From records to a summary: cells, tax, projections, cautions."""

from __future__ import annotations

import datetime as dt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dutyfree.analysis.model import CautionKind
from dutyfree.analysis.projection import prices, worker_hours
from dutyfree.analysis.statistics import Estimate
from dutyfree.analysis.summary import decode, encode, summarise
from dutyfree.report.headline import answers
from dutyfree.study.records import Session, TrialFailure
from tests.analysis.synthetic import BEGIN, action, cold, facts, plausible, records, study, trial

FAILED = TrialFailure("infrastructure", "create", "gone")


def kinds(summary, workload=None, substrate=None):
    return {
        caution.kind
        for caution in summary.cautions
        if (caution.workload, caution.substrate) == (workload, substrate)
    }


@pytest.fixture(scope="module")
def whole():
    return summarise(plausible(labels=("bare", "docker"), trials=20))


def test_a_summary_survives_its_json(whole):
    assert decode(encode(whole)) == whole


def test_the_same_records_give_the_same_bytes():
    made = plausible(trials=5, lengths=(10,))
    assert encode(summarise(made)) == encode(summarise(made))


def test_warm_ups_are_kept_apart_and_failures_counted():
    made = summarise(
        records(
            *cold("bare", [9.0], warmup=True),
            *cold("bare", [1.0, 2.0, 3.0]),
            trial("T0", "bare", 9, failure=FAILED, total=100.0),
        )
    )
    (cell,) = made.cells
    assert (cell.warmups, cell.trials, cell.succeeded, cell.failed) == (1, 4, 3, 1)
    assert cell.total is not None
    assert cell.total.p50.value == 2.0
    assert cell.distribution.total == [1.0, 2.0, 3.0]
    (group,) = made.failures
    assert (group.kind, group.phase, group.cause, group.count) == ("infrastructure", "create", "gone", 1)
    assert {CautionKind.FAILURES, CautionKind.TOO_FEW} <= kinds(made, "T0", "bare")


def test_a_substrate_that_only_failed_has_a_cell_without_numbers():
    made = summarise(records(*cold("bare", [1.0] * 3), trial("T0", "docker", failure=FAILED)))
    cell = made.lone_cell("T0", "docker")
    assert cell is not None
    assert cell.total is None
    assert cell.composition == {}
    assert made.spreads == []
    assert [row.substrate for row in made.taxes] == []


def test_medians_and_parts_of_a_cell(whole):
    cell = whole.lone_cell("trajectory-10", "docker")
    assert cell is not None
    assert cell.actions == 10
    assert cell.first_result.p50.value < cell.last_result.p50.value < cell.total.p50.value
    assert cell.per_action.p50.value == pytest.approx(cell.total.p50.value / 10)
    assert sum(cell.composition.values()) == pytest.approx(cell.total.p50.value, rel=0.1)
    assert cell.orchestration_per_action.p50.value == pytest.approx(0.042, rel=0.15)
    assert cell.stood_in == 10


def test_one_slow_trial_does_not_bend_the_composition():
    cell = summarise(records(*cold("bare", [1.0] * 11 + [500.0]))).cells[0]
    assert cell.typical_total == pytest.approx(1.0)


def test_the_tax_is_the_difference_to_bare(whole):
    tax = next(row for row in whole.taxes if row.workload == "trajectory-150")
    bare, docker = (whole.lone_cell("trajectory-150", name).total.p50.value for name in ("bare", "docker"))
    assert tax.seconds.value == pytest.approx(docker - bare)
    assert tax.rate.value == pytest.approx(docker / bare - 1)
    assert tax.per_action.value == pytest.approx((docker - bare) / 150)
    assert tax.seconds.low < tax.seconds.value < tax.seconds.high


def test_without_bare_there_is_no_tax_and_what_is_not_told_stays_undivided():
    made = summarise(plausible(labels=("docker", "native"), lengths=(10,), trials=3))
    assert made.baseline is None
    assert made.taxes == []
    docker, native = (made.lone_cell("trajectory-10", name) for name in ("docker", "native"))
    assert docker is not None
    assert native is not None
    assert docker.undivided == 10
    assert docker.orchestration_per_action is None
    assert native.orchestration_per_action is not None
    assert CautionKind.NO_BASELINE in kinds(made)
    assert CautionKind.UNDIVIDED in kinds(made, "trajectory-10", "docker")


def test_table_1_is_that_of_the_paper():
    assert [round(price.hours) for price in prices()] == [278, 417, 4167]


def test_worker_hours_are_those_of_the_paper():
    assert worker_hours(Estimate(42.5), 1_000_000).value == pytest.approx(11_805.6, abs=1)


@given(st.floats(1e-3, 1e3), st.integers(1, 10**6), st.integers(1, 50))
def test_projections_are_linear(seconds, rollouts, factor):
    one = worker_hours(Estimate(seconds, seconds / 2, seconds * 2), rollouts)
    more = worker_hours(Estimate(seconds, seconds / 2, seconds * 2), rollouts * factor)
    assert more.value == pytest.approx(one.value * factor)
    assert more.low == pytest.approx(one.low * factor)


def test_table_2_names_slowest_and_fastest(whole):
    spread = next(row for row in whole.spreads if row.workload == "trajectory-150")
    assert (spread.slowest, spread.fastest) == ("docker", "bare")
    assert spread.difference.value == pytest.approx(
        spread.slowest_seconds.value - spread.fastest_seconds.value
    )
    assert spread.hours(spread.difference).value == pytest.approx(spread.difference.value * 1e6 / 3600)


def test_table_2_and_the_headline_compare_substrates_on_the_same_storage():
    storage = {"disk": "disk", "memory": "memory", "box": "memory", "other": "disk"}
    made = summarise(
        records(
            *cold("disk", [4.0] * 6),
            *cold("memory", [1.0] * 6),
            *cold("box", [2.0] * 6),
            *cold("other", [5.0] * 6),
            substrates={
                label: facts(
                    label, use="bare" if label in ("disk", "memory") else "docker", facts={"storage": kind}
                )
                for label, kind in storage.items()
            },
        )
    )
    (spread,) = made.spreads
    assert (spread.slowest, spread.fastest) == ("box", "memory")
    assert "box takes 2.00 times as long as memory" in answers(made)[0].text
    assert "other" not in answers(made)[0].text
    assert [(tax.substrate, tax.base) for tax in made.taxes] == [("box", "memory"), ("other", "disk")]


def test_ratios_are_slower_over_faster_and_tested(whole):
    assert all(row.ratio.value >= 1 for row in whole.ratios)
    cold_start = next(row for row in whole.ratios if row.workload == "T0" and row.metric == "first_result")
    assert (cold_start.substrate, cold_start.base) == ("docker", "bare")
    assert cold_start.p < 0.001


def test_throughput_counts_only_the_time_of_the_cell():
    trials = []
    for batch in range(2):
        begin = BEGIN + dt.timedelta(seconds=100 * batch)
        trials += [
            trial("T0", "bare", batch * 4 + n, parallel=4, started=begin.isoformat(), total=2.0)
            for n in range(4)
        ]
    made = summarise(records(*trials, *cold("bare", [1.0])))
    row = next(row for row in made.throughput if row.parallel == 4)
    assert row.busy_seconds == pytest.approx(4.0)
    assert row.per_second == pytest.approx(2.0)
    assert row.at_once == pytest.approx(4.0)


def test_figures_show_the_cells_with_the_fewest_rollouts_at_once():
    made = summarise(records(*cold("bare", [1.0] * 3, parallel=8), *cold("bare", [5.0] * 3, parallel=32)))
    assert [cell.parallel for cell in made.lone("T0")] == [8]
    assert {row.hours.value for row in made.projections if row.rollouts == 100_000} == {100_000 / 3600}


def test_no_trials_give_an_empty_summary():
    made = summarise(records())
    assert (made.trials, made.cells, made.spreads, made.baseline) == (0, [], [], None)


class TestCautions:
    def test_of_the_study(self):
        made = summarise(
            records(
                *cold("bare", [1.0] * 20),
                sessions=(Session("2026-01-01", 0.1), Session("2026-01-02", 5.0)),
                study=study(plan={"drop_caches": True}),
            )
        )
        assert {CautionKind.RESUMED, CautionKind.HIGH_LOAD, CautionKind.CACHE} <= kinds(made)
        assert "dropped" in next(one.text for one in made.cautions if one.kind == CautionKind.CACHE)

    def test_unlike_software(self):
        made = summarise(
            records(
                *cold("bare", [1.0] * 3),
                substrates={
                    "bare": facts("bare"),
                    "docker": facts(
                        "docker", facts={"python3": "Python 3.13.1", "git": "git version 2.39.5"}
                    ),
                },
            )
        )
        (caution,) = (one for one in made.cautions if one.kind == CautionKind.UNLIKE_SOFTWARE)
        assert "3.13.1 on docker" in caution.text

    def test_left_out_and_never_run(self):
        made = summarise(
            records(
                *cold("bare", [1.0] * 3),
                study=study(workloads={"T0": 3, "T1": 3}),
                substrates={"bare": facts("bare"), "docker": facts("docker", unavailable="no engine")},
            )
        )
        assert CautionKind.LEFT_OUT in kinds(made, None, "docker")
        assert CautionKind.INCOMPLETE in kinds(made, "T1", "bare")
        assert CautionKind.INCOMPLETE not in kinds(made, "T1", "docker")

    def test_missing_after_it_was_measured(self):
        made = summarise(
            records(
                *cold("bare", [1.0] * 3),
                *cold("docker", [1.0] * 3),
                study=study(workloads={"T0": 3, "T1": 3}),
                substrates={"bare": facts("bare"), "docker": facts("docker", unavailable="no engine")},
            )
        )
        (caution,) = (one for one in made.cautions if one.kind == CautionKind.LEFT_OUT)
        assert caution.text.startswith("not available when the study was resumed (no engine)")
        assert CautionKind.INCOMPLETE in kinds(made, "T1", "docker")

    @pytest.mark.parametrize(
        ("bare", "docker", "told"),
        [
            (
                {"storage": "tmpfs"},
                {"storage driver": "overlay2"},
                [
                    "files were on disk, and in memory on its baseline bare",
                    "files were in memory on bare and on disk on docker",
                ],
            ),
            ({"storage": "ext4"}, {"storage driver": "overlay2"}, []),
            ({"storage": "tmpfs"}, {}, []),
            (
                {"storage": "disk (ext4)"},
                {"storage": "memory (tmpfs for /workspace and /tmp)", "storage driver": "overlay2"},
                [
                    "files were in memory, and on disk on its baseline bare",
                    "files were on disk on bare and in memory on docker",
                ],
            ),
            ({"storage": "disk (xfs)"}, {"storage": "disk (overlay2 on ext4)"}, []),
            ({"storage": "memory (tmpfs)"}, {"storage": "memory"}, []),
            ({"storage": "ext4"}, {"storage driver": "vfs"}, ["copies the whole image"]),
        ],
    )
    def test_unlike_storage(self, bare, docker, told):
        given = {"bare": facts("bare", facts=bare), "docker": facts("docker", facts=docker)}
        made = summarise(records(*cold("bare", [1.0] * 3), substrates=given))
        found = [one.text for one in made.cautions if one.kind == CautionKind.UNLIKE_STORAGE]
        assert len(found) == len(told)
        assert all(part in text for part, text in zip(told, found, strict=True))

    @pytest.mark.parametrize(
        ("use", "isolation", "told"),
        [
            ("native", "none", True),
            ("native", "without seccomp", True),
            ("native", "user, pid and mount namespaces, seccomp", False),
            ("bare", "none", False),
        ],
    )
    def test_reduced_isolation(self, use, isolation, told):
        given = {use: facts(use, facts={"isolation": isolation})}
        made = summarise(records(*cold(use, [1.0] * 3), substrates=given))
        assert (CautionKind.NOT_ISOLATED in {one.kind for one in made.cautions}) == told

    def test_parallel_cells_are_planned_in_whole_batches(self):
        content = records(*cold("bare", [1.0] * 12, parallel=8), study=study(workloads={"T0": 12}))
        assert "only 12 of 16 planned trials ran" in {one.text for one in summarise(content).cautions}

    def test_the_ends_of_rollouts_at_once_are_no_drift(self):
        batch = [1 + n / 8 for n in range(8)]
        made = summarise(records(*cold("bare", batch * 6, parallel=8)))
        assert CautionKind.DRIFT not in kinds(made, "T0", "bare")
        rising = [total * (1 + n / 10) for n in range(6) for total in batch]
        made = summarise(records(*cold("bare", rising, parallel=8)))
        assert CautionKind.DRIFT in kinds(made, "T0", "bare")

    def test_incomplete(self):
        made = summarise(records(*cold("bare", [1.0] * 7), study=study(workloads={"T0": 9})))
        assert CautionKind.INCOMPLETE in kinds(made, "T0", "bare")
        early = study(workloads={"T0": 9}, plan={"adaptive": {"width": 0.1, "minimum": 6}})
        made = summarise(records(*cold("bare", [1.0] * 7), study=early))
        assert CautionKind.INCOMPLETE not in kinds(made, "T0", "bare")

    def test_unstable_and_drifting(self):
        random = np.random.default_rng(1)
        scattered = [float(value) for value in random.lognormal(0, 1, 40)]
        rising = [1 + n / 100 for n in range(40)]
        steady = [float(value) for value in random.normal(1, 0.01, 40)]
        made = summarise(
            records(*cold("scattered", scattered), *cold("rising", rising), *cold("steady", steady))
        )
        assert CautionKind.UNSTABLE in kinds(made, "T0", "scattered")
        assert CautionKind.DRIFT in kinds(made, "T0", "rising")
        assert kinds(made, "T0", "steady") == set()

    def test_stand_in(self):
        made = summarise(
            records(
                trial("T1", "bare", 0, actions=(action("x", 1.0, inside=0.9),)),
                trial("T1", "docker", 0, actions=(action("x", 2.0),)),
            )
        )
        assert CautionKind.STAND_IN in kinds(made, "T1", "docker")
        assert CautionKind.STAND_IN not in kinds(made, "T1", "bare")
