"""The roles of labels: bare, the baseline of a substrate, the twin of an A/A pair."""

from __future__ import annotations

from typing import Any

from dutyfree.study.records import Records

BARE = "bare"
MEMORY = ("memory", "tmpfs", "ramfs")
"""Kinds of storage in memory, as substrates and older records name them."""


def ordered_labels(records: Records) -> list[str]:
    """Bare first, then the order of the plan and the trials."""
    labels = list(dict.fromkeys([*records.substrates, *(trial.substrate for trial in records.trials)]))
    return sorted(labels, key=lambda label: use(records, label) != BARE)


def use(records: Records, label: str) -> str:
    """The name of the label's substrate in the registry."""
    facts = records.substrates.get(label)
    return facts.use if facts else label


def storage(records: Records, label: str) -> str | None:
    """``memory`` or ``disk``; None if the substrate does not report it."""
    facts = records.substrates.get(label)
    return storage_kind(facts.facts) if facts else None


def storage_kind(facts: dict[str, str]) -> str | None:
    place = facts.get("storage") or facts.get("storage driver")
    if not place:
        return None
    return "memory" if place.split()[0] in MEMORY else "disk"


def twins(records: Records) -> dict[str, str]:
    """Twin → original, for labels of the plan with the same substrate and equal options: the A/A control."""
    plan = records.study.plan
    planned, options = plan.get("substrates"), plan.get("options")
    if not isinstance(planned, list):
        return {}
    found: dict[str, str] = {}
    seen: list[tuple[str, str, dict[str, Any]]] = []
    for label in planned:
        table = options.get(label) if isinstance(options, dict) else None
        own = {name: value for name, value in (table or {}).items() if name != "use"}
        kind = use(records, label)
        original = next((one for one, used, given in seen if (used, given) == (kind, own)), None)
        if original is None:
            seen.append((label, kind, own))
        else:
            found[label] = original
    return found


def baselines(records: Records) -> dict[str, str]:
    """Label → the bare label that it is compared with. Empty if bare was not measured.

    It is the first bare label with the same kind of storage, otherwise the main baseline. Bare labels with
    different storage are each their own baseline.
    """
    main = baseline(records)
    if main is None:
        return {}
    ran = {trial.substrate for trial in records.trials}
    copies = twins(records)
    bare = [
        label
        for label in ordered_labels(records)
        if label in ran and use(records, label) == BARE and label not in copies
    ]
    bare.sort(key=lambda label: label != main)
    by_storage: dict[str | None, str] = {}
    for label in bare:
        by_storage.setdefault(storage(records, label), label)
    return {label: by_storage.get(storage(records, label), main) for label in ordered_labels(records)}


def baseline(records: Records) -> str | None:
    """The main baseline: the label ``bare`` if it ran, otherwise the first bare label that ran."""
    ran = {trial.substrate for trial in records.trials}
    labels = [label for label in ordered_labels(records) if label in ran and use(records, label) == BARE]
    return BARE if BARE in labels else next(iter(labels), None)
