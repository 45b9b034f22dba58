"""Format numbers for people; escape untrusted text for CSV and Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dutyfree.analysis.statistics import Estimate

UNKNOWN = "\N{EN DASH}"
NBSP = "\N{NO-BREAK SPACE}"
"""Stands between a number and its unit."""


def significant(value: float, digits: int = 3) -> str:
    """Round to a number of significant digits, without an exponent, with grouped thousands."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}" if math.isfinite(value) else "∞"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    # 9.996 rounds to 10.0, which has one digit too many, so count again after rounding.
    rounded = round(value, decimals)
    if rounded and abs(rounded) >= 1:
        decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{decimals}f}".replace("-", "\N{MINUS SIGN}")


def duration(seconds: float) -> str:
    """A duration in a suitable unit: 812 µs, 42.5 ms, 3.21 s, 4 min 10 s, 2.10 h."""
    size = abs(seconds)
    if size == 0:
        return f"0{NBSP}s"
    if size < 0.9995e-3:
        return f"{significant(seconds * 1e6)}{NBSP}µs"
    if size < 0.9995:
        return f"{significant(seconds * 1e3)}{NBSP}ms"
    if size < 119.5:
        return f"{significant(seconds)}{NBSP}s"
    if size < 7200:
        minutes, rest = divmod(round(size), 60)
        sign = "\N{MINUS SIGN}" if seconds < 0 else ""
        return f"{sign}{minutes}{NBSP}min{NBSP}{rest}{NBSP}s"
    return f"{significant(seconds / 3600)}{NBSP}h"


def hours(value: float) -> str:
    """Worker-hours; whole numbers from 10 up."""
    if abs(value) >= 9.95:
        return f"{value:,.0f}{NBSP}h".replace("-", "\N{MINUS SIGN}")
    return f"{significant(value, 2)}{NBSP}h"


def times(ratio: float) -> str:
    return f"{significant(ratio)}×"  # noqa: RUF001 (the multiplication sign is meant)


def multiple(estimate: Estimate | None) -> str:
    """1.52× [1.48, 1.57]."""  # noqa: RUF002 (the multiplication sign is meant)
    if estimate is None:
        return UNKNOWN
    if estimate.low is None or estimate.high is None:
        return times(estimate.value)
    return f"{times(estimate.value)} [{significant(estimate.low)}, {significant(estimate.high)}]"


def percent(share: float) -> str:
    """A share in percent, with one decimal below 10."""
    value = share * 100
    if value and abs(value) < 0.05:
        return f"0.0{NBSP}%"
    text = f"{value:.1f}" if abs(value) < 9.95 else f"{value:,.0f}"
    return f"{text}{NBSP}%".replace("-", "\N{MINUS SIGN}")


def count(number: int) -> str:
    return f"{number:,}"


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def enumeration(items: Sequence[str]) -> str:
    """Join names: "one, two and three"."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else "none"


def csv_cell(value: Any) -> Any:
    """Escape untrusted text so that a spreadsheet does not run it as a formula. Numbers stay as they are."""
    return (
        f"'{value}"
        if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
        else value
    )


def markdown(text: str) -> str:
    """Escape Markdown and HTML in untrusted text."""
    line = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join(f"\\{char}" if char in "\\`*_[]|#!~$" else char for char in line)
