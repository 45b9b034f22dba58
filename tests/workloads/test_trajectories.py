from __future__ import annotations

import hashlib
from collections import Counter
from itertools import islice

import anyio
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dutyfree import workloads
from dutyfree.contract import Edit, Exec, Recipe, Stage, Substrate, Write
from dutyfree.contract.perform import perform
from dutyfree.workloads import tiers
from dutyfree.workloads.fixture import Fixture
from dutyfree.workloads.trajectories import MIXES, mix, spread, trajectory
from dutyfree.workloads.workload import Step


@given(st.dictionaries(st.text(max_size=3), st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 400))
def test_choices_follow_the_weights_at_every_length(weights: dict[str, int], length: int) -> None:
    counted = Counter(islice(spread(weights), length))
    for choice, weight in weights.items():
        assert abs(counted[choice] - length * weight / sum(weights.values())) < len(weights)


@settings(max_examples=15)
@given(n=st.integers(1, 200), seed=st.integers(0, 2**32))
def test_shape(fixture: Fixture, n: int, seed: int) -> None:
    made = trajectory(n, fixture, "git://x/attrs.git", seed)
    assert made.name == f"trajectory-{n}"
    assert len(made.actions) == n
    assert len({step.label for step in made.actions}) == n
    assert all(step.label.startswith(f"{number:03d}-") for number, step in enumerate(made.actions, 1))
    kinds = Counter(step.kind for step in made.actions)
    weights = mix().kinds
    for kind, weight in weights.items():
        assert abs(kinds[kind] - n * weight / sum(weights.values())) < 2
    assert all(checked(step) for step in made.actions)
    shorter = trajectory((n + 1) // 2, fixture, "git://x/attrs.git", seed)
    assert made.actions[: len(shorter.actions)] == shorter.actions


def checked(step: Step) -> bool:
    """What a step that changes files has done, later ones see; all others say what they expect."""
    if isinstance(step.action, Edit | Write) or step.label.endswith("-revert"):
        return True
    return bool(all(step.expect.contains) and step.expect.contains) or step.expect.exit_code != 0


def test_the_sequence_is_the_same_for_ever(fixture: Fixture) -> None:
    made = trajectory(150, fixture, "git://x/attrs.git")
    without_script = [
        (step.label, step.action if not step.label.endswith("-symbols") else None, step.expect)
        for step in made.actions
    ]
    assert hashlib.sha256(msgspec.json.encode(without_script)).hexdigest() == PINNED


PINNED = "897b00653fbfb8054a99057e9ccf6cd1ee04878f7672bc1cfa09a30b8be6b069"
"""Changes only when the mix or the generator is meant to change; old and new records then differ in kind."""


@pytest.mark.parametrize("kind", MIXES)
def test_a_mix_has_its_shares(fixture: Fixture, kind: str) -> None:
    made = trajectory(100, fixture, "git://x/attrs.git", kind=kind)
    assert made.name == f"{kind}-100"
    kinds = Counter(step.kind for step in made.actions)
    assert all(abs(kinds[one] - share) < 2 for one, share in mix(kind).kinds.items())
    assert all(checked(step) for step in made.actions)


def test_the_failure_is_seen_before_the_fix(fixture: Fixture) -> None:
    made = trajectory(10, fixture, "git://x/attrs.git").actions
    tests = [step for step in made if step.kind == "test"]
    assert tests[0].expect.exit_code == 1
    fixes = [step for step in made if isinstance(step.action, Edit) and step.action.old == fixture.patch.old]
    assert len(fixes) == 1
    assert made.index(tests[0]) < made.index(fixes[0])


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Fixture:
    found: Fixture = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize(
    ("subject", "kind", "length", "seed"),
    [
        ("fixture", "trajectory", 300, 0),
        ("fixture", "trajectory", 300, 1),
        ("fixture", "edit", 300, 0),
        ("fixture", "inspect", 150, 0),
        ("networkx", "trajectory", 100, 0),
    ],
    indirect=["subject"],
)
async def test_expectations_hold_whatever_was_modified(
    subject: Fixture, kind: str, length: int, seed: int, bare: Substrate
) -> None:
    """All but the tests, which change no file: 300 actions then take a second or two."""
    made = await anyio.to_thread.run_sync(trajectory, length, subject, "", seed, kind)
    recipe = Recipe(stages=(Stage("repository", files={subject.project.name: subject.checkout}),))
    await bare.prepare(recipe)
    async with bare.sandbox(recipe) as sandbox:
        for step in made.actions:
            if step.kind != "test":
                assert step.expect.problem(await perform(sandbox, step.action)) is None, step.label


@pytest.mark.slow
@pytest.mark.parametrize(
    ("subject", "name"),
    [("fixture", "trajectory-150"), ("fixture", "build-25"), ("networkx", "networkx-150")],
    indirect=["subject"],
)
async def test_every_selection_of_tests_and_every_build_passes(
    subject: Fixture, name: str, bare: Substrate
) -> None:
    """Each file of tests in the mix, after the edits that a long trajectory leaves."""
    made = await anyio.to_thread.run_sync(workloads.build, name, subject, "")
    recipe = tiers.recipe(subject)
    offline = tiers.setup(subject, str(subject.repository))  # a path serves as well as a server here
    seen = set()
    async with bare.sandbox(recipe) as sandbox:
        for command in (command for stage in offline for command in stage.commands):
            assert (await sandbox.exec(command)).ok
        for step in made.actions:
            if isinstance(step.action, Exec):
                if step.action.command in seen:
                    continue
                seen.add(step.action.command)
            assert step.expect.problem(await perform(sandbox, step.action)) is None, step.label
    assert len(seen) > 8
