"""The action path: pairs of labels, and what of b it is, from records whose truth is known."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dutyfree.analysis.action_path import pairs
from dutyfree.analysis.summary import summarise
from dutyfree.study.records import Records
from tests.analysis import synthetic

PATH = 0.02
"""Seconds that an exec takes longer than our init."""


def archetypes(monkeypatch, options: dict[str, dict[str, Any]], facts: dict[str, str], trials=12) -> Records:
    """Labels of which those with actions="exec" pay PATH for every action."""
    for label in options:
        slow = (options[label].get("actions") or facts.get(label)) == "exec"
        overhead = 0.003 + PATH * slow  # of the first command too
        profile = ("docker", 0.1, overhead, overhead, 0.03, False)
        monkeypatch.setitem(synthetic.PROFILES, label, profile)
    made = synthetic.plausible(labels=("bare", *options), trials=trials, lengths=(10, 50, 150))
    plan = {**made.study.plan, "substrates": ["bare", *options], "options": options}
    substrates = {
        label: msgspec.structs.replace(
            one, facts={**one.facts, **({"actions": facts[label]} if label in facts else {})}
        )
        for label, one in made.substrates.items()
    }
    study = msgspec.structs.replace(made.study, plan=plan)
    return msgspec.structs.replace(made, study=study, substrates=substrates)


def test_the_action_path_is_what_b_loses(monkeypatch):
    found = archetypes(
        monkeypatch, {"docker": {}, "docker-init": {"use": "docker", "actions": "init"}}, {"docker": "exec"}
    )
    (path,) = summarise(found).action_paths
    assert (path.own, path.init, path.workload) == ("docker", "docker-init", "trajectory-150")
    assert path.action.low is not None
    assert path.action.high is not None
    assert path.action.low < PATH < path.action.high
    assert path.share is not None
    assert path.share.value == pytest.approx(PATH / (PATH + 0.003), abs=0.1)
    assert path.tax is not None
    assert path.tax.value == pytest.approx(0.13 + 153 * (PATH + 0.002), rel=0.2)
    assert path.path_of_tax is not None
    assert 0.7 < path.path_of_tax.value < 1


def test_pairs_differ_in_their_actions_only(monkeypatch):
    options: dict[str, dict[str, Any]] = {
        "a": {"use": "docker", "actions": "exec"},
        "a-init": {"use": "docker", "actions": "init"},
        "a-ready": {"use": "docker", "actions": "init", "ready": 2},
        "b-init": {"use": "docker", "memory": "1G"},
        "b": {"use": "docker", "actions": "exec", "memory": "1G"},
        "alone": {"use": "docker", "image": "x"},
        "again": {"use": "docker", "actions": "exec"},
    }
    found = archetypes(monkeypatch, options, {"b-init": "init"}, trials=1)
    assert pairs(found) == [("a", "a-init"), ("b", "b-init")]


def test_without_intervals_there_are_still_values(monkeypatch):
    found = archetypes(
        monkeypatch,
        {"x": {"use": "docker", "actions": "exec"}, "y": {"use": "docker", "actions": "init"}},
        {},
        trials=3,
    )
    (path,) = summarise(found).action_paths
    assert path.action.value > 0
    assert not path.action.known
