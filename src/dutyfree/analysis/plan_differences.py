"""Differences between two plans: which of their cells can be compared.

Plans are plain dictionaries, as in the records: a plan of another version may lack a key.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from dutyfree.analysis.model import Caution, CautionKind

Plan = Mapping[str, Any]
Names = tuple[str, str]
"""Names of the two plans in a message."""

CONDITIONS = ("warmups", "timeout", "adaptive", "settle")
"""Differences that may change a number a little, but leave the cells comparable."""
LOCAL = ("T0", "T1")
"""Workloads that do not clone."""


def refusals(a: Plan, b: Plan, workload: str, names: Names = ("A", "B")) -> list[str]:
    """Why the times of a workload cannot be compared between the two plans; empty if they can."""
    relevant = {
        "drop_caches": True,
        "limits": True,
        "offline": workload not in LOCAL,
        "full_tests": workload == "T2",
        "remote": workload not in LOCAL,
    }
    return [_text(name, a, b, names) for name, matters in relevant.items() if matters and _differ(name, a, b)]


def cautions(a: Plan, b: Plan, names: Names = ("A", "B")) -> Iterator[Caution]:
    """Differences between the plans that leave the cells comparable."""
    for name in CONDITIONS:
        if _differ(name, a, b):
            yield Caution(CautionKind.UNLIKE_PLANS, f"the plans differ in {_text(name, a, b, names)}")
    before, after = _options(a), _options(b)
    for label in dict.fromkeys([*before, *after]):
        old, new = before.get(label, {}), after.get(label, {})
        differences = [
            _text(name, old, new, names) for name in dict.fromkeys([*old, *new]) if _differ(name, old, new)
        ]
        if differences:
            yield Caution(
                CautionKind.UNLIKE_PLANS, f"the options differ in {'; '.join(differences)}", substrate=label
            )


def _options(plan: Plan) -> dict[str, Plan]:
    found = plan.get("options")
    tables = found if isinstance(found, dict) else {}
    return {label: options for label, options in tables.items() if isinstance(options, dict)}


def _differ(name: str, a: Plan, b: Plan) -> bool:
    return bool(_given(a.get(name)) != _given(b.get(name)))


def _given(value: Any) -> Any:
    """The value of a key, for a comparison: false, empty and missing mean the same in a plan."""
    if isinstance(value, dict):
        value = {key: one for key, one in value.items() if one is not None}
    return value or None


def _text(name: str, a: Plan, b: Plan, names: Names) -> str:
    return f"{name} ({_value(a.get(name))} in {names[0]}, {_value(b.get(name))} in {names[1]})"


def _value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "on" if value else "off"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
