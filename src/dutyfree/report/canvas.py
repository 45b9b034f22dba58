"""Make figures, save them as SVG and PNG, and embed them in HTML. pyplot is not used: it keeps state."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from dutyfree.analysis.units import duration
from dutyfree.report.palette import GRID, INK, MUTED, PAPER, drawn

WIDTH = 5.4
"""Inches. On a phone, the smallest text is still about nine pixels high."""

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "text.color": INK,
    # Labels are untrusted: a dollar sign must not start a formula.
    "text.parse_math": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.labelsize": 10.5,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.formatter.use_mathtext": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.2,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "savefig.facecolor": PAPER,
    "hatch.linewidth": 0.9,
    # Paths look the same on every machine, fonts do not.
    "svg.fonttype": "path",
    "svg.hashsalt": "dutyfree",
    "path.simplify_threshold": 0.3,
}


@contextmanager
def style() -> Iterator[None]:
    settings: Any = STYLE
    with mpl.rc_context(settings):
        yield


def new(height: float) -> Figure:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.06, h_pad=0.09)
    return figure


def empty(message: str) -> Figure:
    """A figure with a message instead of data."""
    figure = new(1.2)
    figure.text(0.5, 0.5, drawn(message, 60), ha="center", va="center", color=MUTED, fontsize=12)
    return figure


def say(axes: Any, message: str) -> None:
    """Write a message into a panel without data."""
    axes.text(0.5, 0.5, drawn(message, 48), transform=axes.transAxes, ha="center", va="center", color=MUTED)


def legend(figure: Figure, handles: Sequence[Any], most: int = 4, **options: Any) -> None:
    """Add a legend below the panels, with as many columns as fit. The figure grows by its rows."""
    agg: Any = FigureCanvasAgg(figure)
    renderer = agg.get_renderer()
    width, height = figure.get_size_inches()
    for columns in range(min(most, len(handles)), 0, -1):
        made = figure.legend(handles=handles, loc="outside lower center", ncols=columns, **options)
        if columns == 1 or made.get_window_extent(renderer).width <= 0.98 * figure.bbox.width:
            rows = -(-len(handles) // columns)
            figure.set_size_inches(width, height + LEGEND_ROW * rows)
            return
        made.remove()


LEGEND_ROW = 0.24
"""Inches."""


def spread_out(values: Sequence[float], least: float) -> list[float]:
    """Values to mark on an axis, at least ``least`` apart, including the highest."""
    kept: list[float] = []
    for value in sorted(values, reverse=True):
        if not kept or kept[-1] - value >= least:
            kept.append(value)
    return kept[::-1]


def duration_axis(axis: Any, low: float, high: float, *, most: int = 7) -> None:
    """Make a logarithmic axis of durations, with marks at 1 ms, 10 ms, ..."""
    decades = [10.0**power for power in range(-7, 8)]
    shown: list[float] = []
    for steps in ((1.0,), (1.0, 2.0, 5.0), range(1, 10), [tenth / 10 for tenth in range(10, 100)]):
        shown = [step * decade for decade in decades for step in steps if low <= step * decade <= high]
        if len(shown) > 1:
            break
    step = -(-len(shown) // most)
    axis.set_major_locator(FixedLocator(shown[::step]))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))


_FACTORS = (0.1, 0.2, 0.5, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1000.0)
_FACTORS_APART = 0.09
"""Minimum distance of two marks, as a share of the axis."""


def factor_axis(axis: Any, low: float, high: float) -> None:
    """Make a logarithmic axis of factors, with a mark at 1."""
    apart = (high / low) ** _FACTORS_APART
    kept: list[float] = []
    for factor in sorted(_FACTORS, key=lambda one: (one != 1.0, one)):
        if low <= factor <= high and all(max(factor, one) / min(factor, one) >= apart for one in kept):
            kept.append(factor)
    axis.set_major_locator(FixedLocator(sorted(kept)))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))  # noqa: RUF001


def linear_duration_axis(axis: Any, high: float) -> None:
    """Make a linear axis of durations from 0, all marks in the unit of the highest."""
    size, unit = next(((s, u) for s, u in _UNITS if high >= s), _UNITS[-1])
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / size:,.6g} {unit}" if value else "0"))


_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def _tick(seconds: float) -> str:
    if seconds == 0:
        return "0"
    for size, unit in _UNITS:
        if abs(seconds) >= size * 0.9999:
            return f"{seconds / size:,.6g} {unit}"
    return duration(seconds)


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    return buffer.getvalue()


def svg(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    FigureCanvasSVG(figure)
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


_HEAD = re.compile(r"\A.*?(?=<svg)", re.DOTALL)
_METADATA = re.compile(r"<metadata>.*?</metadata>\s*", re.DOTALL)
_BACKGROUND = re.compile(r'<g id="patch_1">.*?</g>\s*', re.DOTALL)


def inline(data: bytes, prefix: str, label: str) -> str:
    """An SVG for an HTML page: its colours follow the theme of the page, and its ids are unique.

    ``label`` must be escaped already.
    """
    text = _METADATA.sub("", _HEAD.sub("", data.decode()))
    text = _BACKGROUND.sub("", text, count=1)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", text)
    text = re.sub(r'((?:xlink:)?href)="#([^"]+)"', rf'\1="#{prefix}-\2"', text)
    for colour, themed in (
        (INK, "currentColor"),
        (MUTED, "var(--muted)"),
        (GRID, "var(--grid)"),
        (PAPER, "var(--paper)"),
    ):
        text = text.replace(colour, themed)
    return re.sub(r"<svg([^>]*)>", lambda match: _opening(match[1], label), text, count=1).strip()


def _opening(attributes: str, label: str) -> str:
    kept = re.sub(r'\s(?:width|height|version|xmlns(?::xlink)?)="[^"]*"', "", attributes)
    return (
        f'<svg{kept} xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'role="img" aria-label="{label}">'
    )
