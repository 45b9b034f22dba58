"""Decomposition: the components add up to the total, whatever the substrate reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dutyfree.analysis.baselines import baseline, baselines, twins
from dutyfree.analysis.decomposition import (
    COMPONENTS,
    Decomposer,
    decompose,
    stand_ins,
    trajectory_length,
    workload_order,
)
from tests.analysis.synthetic import action, facts, records, study, trial

seconds = st.floats(0, 100)
actions = st.lists(
    st.builds(
        lambda label, wall, inside: action(label, wall, inside=inside),
        st.sampled_from("abc"),
        seconds,
        st.none() | st.floats(-1, 200),
    ),
    max_size=8,
).map(tuple)
places = st.tuples(st.sampled_from(["setup", "action"]), st.integers(0, 8), st.sampled_from("abc"))
instead = st.dictionaries(places, seconds, max_size=12)


@given(seconds, seconds, actions, actions, seconds, st.floats(0, 1000), st.booleans(), instead)
def test_components_add_up_to_the_total(creation, readiness, setup, acts, cleanup, total, bare, others):
    made = trial(
        creation=creation, readiness=readiness, setup=setup, actions=acts, cleanup=cleanup, total=total
    )
    parts = decompose(made, on_baseline=bare, instead=others)
    assert sum(parts.component(name) for name in COMPONENTS) == pytest.approx(total, abs=1e-6)
    assert all(parts.component(name) >= 0 for name in COMPONENTS if name != "unattributed")
    assert parts.setup + parts.actions + parts.orchestration + parts.undivided == pytest.approx(
        sum(one.seconds for one in (*setup, *acts))
    )


def test_the_time_inside_is_used_where_it_is_told():
    parts = decompose(trial(actions=(action("x", 1.0, inside=0.75),)), instead={("action", 0, "x"): 0.1})
    assert (parts.actions, parts.orchestration, parts.stood_in) == (0.75, 0.25, 0)


def test_set_up_and_first_command_are_divided_too():
    made = trial(
        creation=1.0,
        readiness=0.5,
        first=action("ready", 0.4, inside=0.1),
        setup=(action("clone-1", 2.0, inside=1.5), action("clone-1", 1.0, inside=0.9)),
        actions=(action("x", 1.0, inside=0.75),),
    )
    parts = decompose(made)
    assert parts.readiness == pytest.approx(0.4)
    assert parts.setup == pytest.approx(2.4)
    assert parts.actions == pytest.approx(0.85)
    assert parts.orchestration == pytest.approx(0.85)
    assert parts.action_orchestration == pytest.approx(0.25)


def test_the_baselines_p50_stands_in_at_the_same_place_and_no_longer_than_the_wall():
    bare = [trial(index=n, actions=(action("x", wall, inside=wall / 2),)) for n, wall in enumerate((1, 2, 9))]
    times = stand_ins(bare)
    assert times == {("action", 0, "x"): 1.0}
    parts = decompose(trial(actions=(action("x", 3.0), action("x", 3.0))), instead=times)
    assert (parts.actions, parts.orchestration, parts.undivided) == (1.0, 2.0, 3.0)
    assert (parts.stood_in, parts.unknown) == (1, 1)
    quick = decompose(trial(actions=(action("x", 0.4),)), instead=times)
    assert (quick.actions, quick.orchestration) == (0.4, 0.0)
    assert quick.action_orchestration == pytest.approx(-0.6)


def test_file_actions_of_bare_are_wholly_inside():
    parts = decompose(trial(actions=(action("read", 0.5), action("run", 1.0, inside=0.9))), on_baseline=True)
    assert parts.actions == pytest.approx(1.4)
    assert parts.orchestration == pytest.approx(0.1)


def test_failed_and_warm_up_trials_do_not_stand_in():
    made = records(
        trial("T1", "bare", 0, warmup=True, actions=(action("x", 50.0),)),
        trial("T1", "bare", 1, actions=(action("x", 1.0),)),
        trial("T1", "docker", 0, actions=(action("x", 5.0),)),
        trial("T2", "docker", 0, actions=(action("x", 5.0),)),
    )
    decomposer = Decomposer(made)
    assert decomposer(made.trials[2]).actions == 1.0
    assert decomposer(made.trials[3]).undivided == 5.0


def test_the_stand_in_is_from_the_same_round_and_from_the_baseline_with_the_same_storage():
    def kept(label, use, storage):
        return facts(label, use=use, facts={"storage": storage})

    def bare(label, index, seconds):
        return trial("T1", label, index, actions=(action("x", seconds),))

    made = records(
        *(bare("disk", n, seconds) for n, seconds in enumerate((1.0, 2.0, 3.0))),
        *(bare("memory", n, seconds) for n, seconds in enumerate((0.1, 0.2, 0.3))),
        *(trial("T1", "box", n, actions=(action("x", 5.0),)) for n in (0, 2, 7)),
        substrates={
            "box": kept("box", "docker", "memory"),
            "disk": kept("disk", "bare", "disk (ext4)"),
            "memory": kept("memory", "bare", "memory"),
        },
    )
    decomposer = Decomposer(made)
    assert baselines(made) == {"disk": "disk", "memory": "memory", "box": "memory"}
    assert [decomposer(one).actions for one in made.trials[-3:]] == pytest.approx([0.1, 0.3, 0.2])


def test_a_parallel_cell_without_bare_takes_the_nearest():
    made = records(
        trial("T1", "bare", 0, actions=(action("x", 1.0),)),
        trial("T1", "bare", 0, parallel=8, actions=(action("x", 4.0),)),
        trial("T1", "docker", 0, parallel=32, actions=(action("x", 9.0),)),
    )
    decomposer = Decomposer(made)
    assert decomposer.stand_in_parallel("T1", "docker", 32) == 8
    assert decomposer(made.trials[2]).actions == 4.0


def test_the_baseline_is_known_by_its_substrate_not_its_label():
    trials = [trial(substrate="host"), trial(substrate="docker")]
    made = records(*trials, substrates={"host": facts("host", use="bare"), "docker": facts("docker")})
    assert baseline(made) == "host"
    assert baseline(records(trials[1])) is None


def test_twins_have_the_same_substrate_and_equal_options():
    labels = ["bare", "bare-again", "memory", "docker", "memory-again"]
    options = {"bare-again": {"use": "bare"}, "memory": {"use": "bare", "storage": "memory"}}
    made = records(
        *(trial(substrate=label) for label in labels),
        study=study(
            plan={"substrates": labels, "options": {**options, "memory-again": dict(options["memory"])}}
        ),
        substrates={label: facts(label, use="docker" if label == "docker" else "bare") for label in labels},
    )
    assert twins(made) == {"bare-again": "bare", "memory-again": "memory"}
    assert twins(records(*made.trials)) == {}


def test_workloads_come_in_the_order_of_the_paper():
    names = ["trajectory-150", "T2", "mine", "trajectory-10", "T0"]
    assert sorted(names, key=workload_order) == ["T0", "T2", "mine", "trajectory-10", "trajectory-150"]
    assert trajectory_length("trajectory-50") == 50
    assert trajectory_length("T2") is None
    assert trajectory_length("trajectory-x") is None
