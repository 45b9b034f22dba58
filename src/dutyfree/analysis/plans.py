"""Two plans against each other: which of their cells did the same thing under the same conditions.

Plans are read as the records hold them, as loose values: those of other versions may lack a name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from dutyfree.analysis.model import Caution, CautionKind

Plan = Mapping[str, Any]
Names = tuple[str, str]
"""What the two are called in a sentence."""

CONDITIONS = ("warmups", "timeout", "adaptive")
"""Differences that may shift a number without making it another one."""
LOCAL = ("T0", "T1")
"""Workloads that clone nothing."""


def refusals(a: Plan, b: Plan, workload: str, names: Names = ("A", "B")) -> list[str]:
    """Why times of the workload under the two plans are not times of the same thing."""
    concerned = {
        "drop_caches": True,
        "full_tests": workload == "T2",
        "remote": workload not in LOCAL,
    }
    return [
        _told(name, a, b, names) for name, matters in concerned.items() if matters and _differ(name, a, b)
    ]


def cautions(a: Plan, b: Plan, names: Names = ("A", "B")) -> Iterator[Caution]:
    """On differences between the plans that leave cells comparable."""
    for name in CONDITIONS:
        if _differ(name, a, b):
            yield Caution(CautionKind.UNLIKE_PLANS, f"the plans differ in {_told(name, a, b, names)}")
    before, after = _options(a), _options(b)
    for label in dict.fromkeys([*before, *after]):
        old, new = before.get(label, {}), after.get(label, {})
        told = [
            _told(name, old, new, names) for name in dict.fromkeys([*old, *new]) if _differ(name, old, new)
        ]
        if told:
            yield Caution(
                CautionKind.UNLIKE_PLANS, f"its options differ in {'; '.join(told)}", substrate=label
            )


def _options(plan: Plan) -> dict[str, Plan]:
    found = plan.get("options")
    tables = found if isinstance(found, dict) else {}
    return {label: options for label, options in tables.items() if isinstance(options, dict)}


def _differ(name: str, a: Plan, b: Plan) -> bool:
    # What is off, empty or not told at all is the same to a plan.
    return (a.get(name) or None) != (b.get(name) or None)


def _told(name: str, a: Plan, b: Plan, names: Names) -> str:
    return f"{name} ({_value(a.get(name))} in {names[0]}, {_value(b.get(name))} in {names[1]})"


def _value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "on" if value else "off"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
