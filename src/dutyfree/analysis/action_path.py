"""The action path: what an archetype's own way to run an action costs, compared with our init.

Two labels are a pair if they are the same substrate with the same options, and only ``actions`` differs. Then
the isolation, the storage and the limits are the same, so the difference of b is the action path, and what
remains of b is isolation, storage, and our own path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dutyfree.analysis.baselines import twins
from dutyfree.analysis.baselines import use as used
from dutyfree.analysis.decomposition import workload_order
from dutyfree.analysis.findings import ActionPath
from dutyfree.analysis.law import LawDraws, estimate_of
from dutyfree.analysis.statistics import Estimate
from dutyfree.study.records import Records

INIT = "init"
OPTION = "actions"


def pairs(records: Records) -> list[tuple[str, str]]:
    """The labels of each archetype that was measured both ways: its own, and with our init."""
    copies = twins(records)
    ways: dict[str, tuple[tuple[str, dict[str, Any]], str]] = {}
    for label in records.substrates:
        if label not in copies and (way := _way(records, label)) is not None:
            ways[label] = (_rest(records, label), way)
    return [
        (label, other)
        for label, (rest, way) in ways.items()
        if way != INIT
        for other, (rest_of_other, way_of_other) in ways.items()
        if way_of_other == INIT and rest_of_other == rest
    ]


def _options(records: Records, label: str) -> dict[str, Any]:
    options = records.study.plan.get("options")
    table = options.get(label) if isinstance(options, dict) else None
    return table if isinstance(table, dict) else {}


def _way(records: Records, label: str) -> str | None:
    """How actions reach the sandbox, as the plan or the substrate says. None if neither does."""
    found = _options(records, label).get(OPTION) or records.substrates[label].facts.get(OPTION)
    return str(found) if found else None


def _rest(records: Records, label: str) -> tuple[str, dict[str, Any]]:
    options = _options(records, label)
    return used(records, label), {
        name: value for name, value in options.items() if name not in ("use", OPTION)
    }


def action_paths(records: Records, laws: Sequence[LawDraws]) -> list[ActionPath]:
    """One for each pair with two laws, in the order of the labels."""
    known = {one.law.substrate: one for one in laws if one.law.a is not None}
    return [
        _path(known[own], known[init], known)
        for own, init in pairs(records)
        if own in known and init in known
    ]


def _path(own: LawDraws, init: LawDraws, laws: Mapping[str, LawDraws]) -> ActionPath:
    sure = own.known and init.known
    action = own.b - init.b
    workload, tax, path_of_tax = _of_tax(own, init, laws.get(own.law.baseline), sure)
    return ActionPath(
        own=own.law.substrate,
        init=init.law.substrate,
        creation=estimate_of(own.a - init.a, sure),
        action=estimate_of(action, sure),
        work=estimate_of(own.c - init.c, sure) if own.law.c and init.law.c else None,
        share=estimate_of(action / own.b, sure) if own.b.min() > 0 else None,
        workload=workload,
        tax=tax,
        path_of_tax=path_of_tax,
    )


def _of_tax(
    own: LawDraws, init: LawDraws, bare: LawDraws | None, sure: bool
) -> tuple[str | None, Estimate | None, Estimate | None]:
    """The longest workload, its tax, and the share of it that goes away."""
    if bare is None or init.law.baseline != own.law.baseline:
        return None, None, None
    common = set(own.totals) & set(init.totals) & set(bare.totals)
    if not common:
        return None, None, None
    workload = max(common, key=workload_order)
    tax = own.totals[workload] - bare.totals[workload]
    found = estimate_of(tax, sure)
    if np.quantile(tax, 0.025) <= 0:
        return workload, found, None
    gone = (own.totals[workload] - init.totals[workload]) / np.maximum(tax, 1e-9)
    return workload, found, estimate_of(gone, sure)
