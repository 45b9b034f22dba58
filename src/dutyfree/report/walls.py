"""The price of each wall of a sandbox: what is saved if it is left out, from the law."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from dutyfree.analysis.model import Summary
from dutyfree.analysis.statistics import Estimate

_ALL = "all walls"


class WallPrice(msgspec.Struct, frozen=True):
    """The law with all walls minus the law without some of them."""

    wall: str
    substrate: str
    """The label without the wall."""
    whole: str
    """The label with all walls, and the same other options."""
    creation: Estimate
    """Seconds per rollout."""
    action: Estimate
    """Seconds per action."""
    work: Estimate | None
    """Share of the work; None if a law does not know it."""


def wall_prices(summary: Summary) -> list[WallPrice]:
    """One for each label that leaves walls out, in the order of the labels; first without any wall."""
    options = {one.label: _options(summary, one.label) for one in summary.substrates}
    found = []
    for one in summary.substrates:
        wall = _missing(options[one.label])
        whole = next(
            (
                other.label
                for other in summary.substrates
                if other.use == one.use
                and other.control_of is None
                and _missing(options[other.label]) is None
                and _others(options[other.label]) == _others(options[one.label])
            ),
            None,
        )
        law, base = summary.law(one.label), summary.law(whole) if whole else None
        if wall is None or law is None or base is None:
            continue
        if law.a and law.b and base.a and base.b:
            a, b = _minus(base.a, law.a), _minus(base.b, law.b)
            work = _minus(base.c, law.c) if base.c and law.c else None
            found.append(WallPrice(wall, law.substrate, base.substrate, a, b, work))
    return sorted(found, key=lambda price: price.wall != _ALL)


def _minus(one: Estimate, other: Estimate) -> Estimate:
    """The difference of two estimates, with an interval as if they were independent.

    That is rather too wide, because both come from the same rounds.
    """
    value = one.value - other.value
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return Estimate(value)
    below = math.hypot(one.value - one.low, other.high - other.value)
    above = math.hypot(one.high - one.value, other.value - other.low)
    return Estimate(value, value - below, value + above)


def _options(summary: Summary, label: str) -> dict[str, Any]:
    found = summary.plan.get("options")
    own = found.get(label) if isinstance(found, dict) else None
    return own if isinstance(own, dict) else {}


def _missing(options: dict[str, Any]) -> str | None:
    """The walls that are left out; None if there is none."""
    if options.get("isolation") == "none":
        return _ALL
    without = options.get("without")
    return ", ".join(map(str, without)) if isinstance(without, list | tuple) and without else None


def _others(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in ("use", "isolation", "without")}
