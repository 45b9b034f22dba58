"""A synthetic study with all controls: an A/A pair, disk and memory, walls, a held-out length."""

from __future__ import annotations

from typing import Any

import msgspec

from dutyfree.study.records import Records, SubstrateFacts, Trial
from tests.analysis.synthetic import plausible

OPTIONS: dict[str, dict[str, Any]] = {
    "bare": {},
    "bare-again": {"use": "bare"},
    "bare-memory": {"use": "bare", "storage": "memory"},
    "native": {"storage": "memory"},
    "native-disk": {"use": "native", "storage": "disk"},
    "native-none": {"use": "native", "isolation": "none", "storage": "memory"},
    "native-without-overlay": {"use": "native", "without": ["overlay"], "storage": "memory"},
    "native-without-seccomp": {"use": "native", "without": ["seccomp"], "storage": "memory"},
    "docker": {},
}
SPEED = {"bare-memory": 0.85, "native": 0.9, "native-none": 0.87, "native-without-overlay": 0.88}
"""How much longer the work takes than on bare."""


def controlled(
    *,
    trials: int = 12,
    labels: tuple[str, ...] = tuple(OPTIONS),
    held_out: tuple[str, ...] = ("trajectory-100",),
) -> Records:
    made = {
        label: plausible(
            labels=(OPTIONS[label].get("use", label),), trials=trials, lengths=(10, 50, 100, 150), seed=seed
        )
        for seed, label in enumerate(labels)
    }
    first = made[labels[0]]
    plan = {
        **first.study.plan,
        "substrates": list(labels),
        "held_out": list(held_out),
        "options": {label: OPTIONS[label] for label in labels if OPTIONS[label]},
    }
    return Records(
        study=msgspec.structs.replace(first.study, plan=plan),
        sessions=first.sessions,
        substrates={label: _facts(label, found) for label, found in made.items()},
        trials=tuple(
            sorted(
                (_relabelled(one, label) for label, found in made.items() for one in found.trials),
                key=lambda one: (not one.warmup, one.index),
            )
        ),
    )


def _facts(label: str, found: Records) -> SubstrateFacts:
    (one,) = found.substrates.values()
    storage = OPTIONS[label].get("storage", "disk")
    return msgspec.structs.replace(one, label=label, facts={**one.facts, "storage": storage})


def _relabelled(one: Trial, label: str) -> Trial:
    """The trial on another label, where the work takes a different time."""
    speed = SPEED.get(label, 1.0)
    actions = tuple(
        msgspec.structs.replace(
            action,
            seconds=action.seconds * speed,
            inside=None if action.inside is None else action.inside * speed,
        )
        for action in one.actions
    )
    extra = sum(action.seconds for action in actions) - sum(action.seconds for action in one.actions)
    return msgspec.structs.replace(
        one,
        id=one.id.replace(one.substrate, label),
        substrate=label,
        actions=actions,
        total=one.total + extra,
    )
