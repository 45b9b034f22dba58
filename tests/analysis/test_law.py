"""The law: the fit finds the numbers that made the records, and says when it cannot."""

from __future__ import annotations

import numpy as np
import pytest

from dutyfree.analysis.findings import Law
from dutyfree.analysis.model import CautionKind
from dutyfree.analysis.statistics import Estimate
from dutyfree.analysis.summary import summarise
from dutyfree.study.records import Records, Trial
from tests.analysis.synthetic import action, facts, records, study, trial

A, B, C = 0.3, 0.02, 1.2
WORK = (0.002, 0.3, 0.005, 0.02, 0.001)
LENGTHS = (0, 5, 10, 30)


def rollout(
    random: np.random.Generator, label: str, length: int, index: int, slow: float, work=WORK
) -> Trial:
    """A trial that obeys the law, except for noise. The noise of a round is the same on all substrates."""
    a, b, c = (A, B, C) if label == "box" else (0.002, 0.0005, 1.0)

    def noisy(seconds: float) -> float:
        return float(seconds * slow * random.lognormal(0, 0.05))

    def one(place: int):
        inside = noisy(work[place % len(work)])
        return action(f"x{place}", noisy(b) + c * inside, inside=inside if label == "bare" else None)

    first, acts = one(len(work) - 1), tuple(one(place) for place in range(length))
    return trial(
        f"trajectory-{length}" if length else "T0",
        label,
        index,
        creation=noisy(a) / 2,
        cleanup=noisy(a) / 2,
        readiness=first.seconds,
        first=first,
        actions=acts,
    )


def obeying(
    seed: int = 1,
    rounds: int = 20,
    *,
    held_out: tuple[str, ...] = (),
    work=WORK,
    lengths=LENGTHS,
    odd: int = 0,
) -> Records:
    """Records of bare and of a substrate with a known law. ``odd`` trials of it take ten times as long."""
    random = np.random.default_rng(seed)
    made = []
    for index in range(rounds):
        slow = random.lognormal(0, 0.1)
        for length in lengths:
            for label in ("bare", "box"):
                factor = 10 * slow if label == "box" and index < odd else slow
                made.append(rollout(random, label, length, index, factor, work))
    return records(
        *made,
        study=study(plan={"held_out": list(held_out)}),
        substrates={"bare": facts("bare"), "box": facts("box", use="docker")},
    )


def law(content: Records, substrate: str = "box") -> Law:
    found = summarise(content).law(substrate)
    assert found is not None
    return found


def known(estimate: Estimate | None) -> Estimate:
    assert estimate is not None
    return estimate


def test_the_fit_finds_a_b_and_c():
    found = law(obeying())
    assert known(found.a).value == pytest.approx(A, rel=0.1)
    assert known(found.b).value == pytest.approx(B, rel=0.1)
    assert found.c is not None
    assert found.c.value == pytest.approx(C, rel=0.05)
    assert found.spread is not None
    assert found.spread < 0.05
    assert [point.actions for point in found.fitted] == [1, 6, 11, 31]
    bare = law(obeying(), "bare")
    assert bare.c is not None
    assert bare.c.value == pytest.approx(1, abs=0.02)
    assert bare.baseline == "bare"


def test_slow_trials_do_not_bend_it():
    plain, bent = law(obeying()), law(obeying(odd=3))
    for one, other in ((plain.a, bent.a), (plain.b, bent.b)):
        assert known(other).value == pytest.approx(known(one).value, rel=0.1)


def test_the_intervals_cover_the_truth():
    covered = {"a": 0, "b": 0, "c": 0}
    for seed in range(20):
        found = law(obeying(seed, rounds=12, lengths=(0, 5, 10)))
        for name, truth in (("a", A), ("b", B), ("c", C)):
            covered[name] += not getattr(found, name).leaves_out(truth)
    # By chance, an interval of 95 % misses 4 of 20 or more in 2 % of cases.
    assert all(count >= 16 for count in covered.values()), covered


def test_a_held_out_workload_is_predicted_and_not_fitted():
    found = law(obeying(held_out=("trajectory-30",)))
    assert [point.workload for point in found.fitted] == ["T0", "trajectory-5", "trajectory-10"]
    (point,) = found.predictions
    assert point.workload == "trajectory-30"
    assert point.error.value == pytest.approx(0, abs=0.05)
    assert point.error.value == pytest.approx(point.predicted.value / point.measured.value - 1)
    assert point.error.low is not None
    assert point.error.low < point.error.value
    without = law(obeying(lengths=(0, 5, 10)))
    assert known(found.a).value == pytest.approx(known(without.a).value, rel=0.05)


def test_actions_that_are_all_alike_do_not_tell_b_from_c():
    content = obeying(work=(0.01, 0.01))
    summary = summarise(content)
    found = summary.law("box")
    assert found is not None
    assert found.c is None
    assert known(found.b).value == pytest.approx(B + (C - 1) * 0.01, rel=0.1)
    kinds = {one.kind for one in summary.cautions if one.substrate == "box"}
    assert CautionKind.INSEPARABLE in kinds


def test_few_rounds_give_no_interval_and_no_baseline_gives_no_law():
    found = law(obeying(rounds=3))
    assert not known(found.a).known
    assert not found.fitted[0].error.known
    content = obeying(rounds=3)
    only = [one for one in content.trials if one.substrate == "box"]
    assert summarise(records(*only, substrates={"box": facts("box", use="docker")})).laws == []


PLANNED = {f"trajectory-{length}" if length else "T0": 20 for length in LENGTHS}


def stopped_early(trials: dict[str, int]) -> Records:
    """A study of 20 rounds that has only so many trials of its workloads."""
    whole = obeying()
    kept = [one for one in whole.trials if one.index < trials.get(one.workload, 0)]
    return records(*kept, study=study(workloads=PLANNED), substrates=whole.substrates)


def told(content: Records) -> list[str]:
    return [
        one.text
        for one in summarise(content).cautions
        if one.kind == CautionKind.TOO_FEW and one.substrate == "box" and one.workload is None
    ]


def test_a_study_that_stopped_too_early_has_no_numbers_of_a_law():
    content = stopped_early({"T0": 1, "trajectory-5": 1})
    found = law(content)
    assert (found.a, found.b, found.c, found.spread) == (None, None, None, None)
    assert found.fitted == []
    (text,) = told(content)
    assert text.startswith("the study stopped too early for a law: it needs workloads of 3 different lengths")
    # Two lengths are not enough, however many trials they have.
    assert law(stopped_early({"T0": 20, "trajectory-5": 20, "trajectory-10": 1})).a is None


def test_workloads_with_too_few_trials_are_left_out_of_the_fit():
    content = stopped_early({"T0": 20, "trajectory-5": 12, "trajectory-10": 6, "trajectory-30": 2})
    found = law(content)
    assert [point.workload for point in found.fitted] == ["T0", "trajectory-5", "trajectory-10"]
    assert known(found.a).known
    (text,) = told(content)
    assert text.startswith("the study stopped early: the law is fitted without trajectory-30")
    assert told(stopped_early(PLANNED)) == []
    assert len(law(stopped_early(PLANNED)).fitted) == 4


def test_a_complete_study_with_few_trials_keeps_its_law():
    whole = obeying(rounds=2, lengths=(0, 5))
    content = records(
        *whole.trials, study=study(workloads={"T0": 2, "trajectory-5": 2}), substrates=whole.substrates
    )
    assert known(law(content).a).value == pytest.approx(A, rel=0.5)
    assert told(content) == []
