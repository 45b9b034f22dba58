"""The price of each wall of a sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dutyfree.analysis.model import Summary
from dutyfree.analysis.statistics import Estimate
from dutyfree.report.figures.dots import Panel, panels
from dutyfree.report.palette import substrate_looks
from dutyfree.report.walls import wall_prices


def prices_of_walls(summary: Summary) -> Any:
    """A panel each: per creation, per action, and as a share of the work."""
    prices = wall_prices(summary)
    if not prices:
        return None
    looks = substrate_looks(summary)
    return panels(
        [price.wall for price in prices],
        [looks[price.whole] for price in prices],
        [
            _durations("creation", [price.creation for price in prices]),
            _durations("action", [price.action for price in prices]),
            Panel("work, %", [price.work for price in prices], _per_cent, 0.0, "not known"),
        ],
    )


def _durations(title: str, estimates: Sequence[Estimate]) -> Panel:
    """A panel whose title has the unit, so that its marks are short."""
    largest = max(abs(bound) for one in estimates for bound in (one.value, one.low or 0.0, one.high or 0.0))
    size, unit = next(((s, u) for s, u in ((1.0, "s"), (1e-3, "ms")) if largest >= s), (1e-6, "µs"))
    return Panel(f"{title}, {unit}", estimates, lambda value: _short(value / size), 0.0)


def _per_cent(share: float) -> str:
    return _short(share * 100)


def _short(value: float) -> str:
    return f"{value:.6g}".replace("-", "\N{MINUS SIGN}")
