"""Figures: nothing is cut off and no texts overlap, for any data."""

from __future__ import annotations

from itertools import combinations

import msgspec
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from dutyfree.analysis.summary import summarise
from dutyfree.report import canvas, rankings
from dutyfree.report.figures.catalog import FIGURES
from dutyfree.report.figures.law import rankings_by_length
from dutyfree.report.figures.tax import tax_by_substrate
from tests.analysis.synthetic import action, cold, plausible, records, trial
from tests.report.archetypes import archetypes
from tests.report.controlled import controlled

OPTIONAL = {"action_path", "law", "rankings", "sensitivity", "tails", "storage", "walls"}
"""Only some studies have them."""

SLACK = 1.5
"""Pixels that rounding may take."""
LONG = "a-label-that-goes-on-and-on-and-on"
NINE = (
    "bare",
    "native",
    "docker",
    "oci",
    "kubernetes",
    "vm",
    "hosted-somewhere",
    LONG,
    "native-dependencies",
)


def mixed(labels):
    """A study in which half of the trajectories are of another mix."""
    found = plausible(labels=labels, lengths=(10, 50, 51), trials=6)
    renamed = [
        msgspec.structs.replace(one, workload=one.workload.replace("trajectory-51", "inspect-50"))
        for one in found.trials
    ]
    return msgspec.structs.replace(found, trials=tuple(renamed))


CASES = {
    "one substrate": lambda: plausible(labels=("bare",), trials=12),
    "two substrates": lambda: plausible(labels=("bare", "native"), trials=12),
    "nine substrates": lambda: plausible(labels=NINE, trials=6),
    "nine, of which some fail": lambda: plausible(labels=NINE, trials=4, failing={"vm": 1.0, "oci": 0.5}),
    "one length": lambda: plausible(labels=("bare", "native", "docker"), lengths=(10,), trials=6),
    "one length, nine substrates": lambda: plausible(labels=NINE, lengths=(150,), trials=3),
    "many lengths": lambda: plausible(
        labels=("bare", "docker"), lengths=(1, 2, 5, 10, 20, 50, 150, 300), trials=5
    ),
    "one trial": lambda: plausible(labels=("bare", "native", "docker"), trials=1),
    "all failed": lambda: plausible(trials=3, failing={"bare": 1.0, "docker": 1.0}),
    "wide intervals": lambda: records(
        *cold("bare", [1, 2, 3, 9, 30], workload="T2"), *cold("docker", [1, 5, 20, 60, 90], workload="T2")
    ),
    "all controls": lambda: controlled(trials=6),
    "archetypes": archetypes,
    "other mixes": lambda: mixed(("bare", "native", "docker", LONG)),
    "alike": lambda: records(*cold("bare", [1.0] * 9), *cold("native", [1.001, 1.0, 0.999] * 3)),
}


@pytest.fixture(scope="module", params=list(CASES))
def summary(request):
    return summarise(CASES[request.param]())


@pytest.mark.parametrize("name", list(FIGURES))
def test_nothing_is_cut_off_and_no_text_lies_over_another(summary, name):
    with canvas.style():
        figure = FIGURES[name](summary)
        if figure is None:
            assert name in OPTIONAL
            return
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw(renderer)
        texts = {}
        for artist in figure.findobj(Text):
            if artist.get_visible() and artist.get_text().strip() and shown(artist):
                texts[artist] = Text.get_window_extent(artist, renderer)  # without the arrow of an annotation
        assert texts
        boxes = [(artist.get_text(), box) for artist, box in texts.items()]
        boxes += [("the legend", one.get_window_extent(renderer)) for one in figure.findobj(Legend)]
        boxes += [box for line in figure.findobj(Line2D) for box in marks(line, figure.dpi)]
        for what, box in boxes:
            assert within(box, figure.bbox), f"{what} is cut off: {box.extents} of {figure.bbox.extents}"
    for (one, first), (other, second) in combinations(texts.items(), 2):
        assert not overlap(first, second), f"{one.get_text()!r} lies over {other.get_text()!r}"


def shown(text):
    """Ticks that lie beyond the axis are not drawn, though they are there."""
    axis = next(
        (one for axes in text.figure.axes for one in (axes.xaxis, axes.yaxis) if text in labels(one)), None
    )
    return axis is None or text in drawn(axis)


def labels(axis):
    return [tick.label1 for tick in axis.get_major_ticks()] + [tick.label2 for tick in axis.get_major_ticks()]


def drawn(axis):
    low, high = sorted(axis.get_view_interval())
    ticks = axis.get_major_ticks()
    return [tick.label1 for tick in ticks if low <= tick.get_loc() <= high and tick.label1.get_visible()]


def marks(line, dpi):
    """What is drawn around each point that has a mark: all of it, or as much as the panel leaves."""
    if line.get_marker() in ("None", None, "") or line.axes is None or not len(line.get_xydata()):
        return []
    half = (line.get_markersize() + line.get_markeredgewidth()) / 2 * dpi / 72
    points = line.get_transform().transform(line.get_xydata())
    boxes = [Bbox([(x - half, y - half), (x + half, y + half)]) for x, y in points]
    if line.get_clip_on():
        for box in boxes:
            assert within(box, line.axes.bbox), f"a mark of {line.axes.get_title(loc='left')!r} is cut off"
    return [("a mark", box) for box in boxes]


def within(box, whole):
    return (
        box.x0 >= whole.x0 - SLACK
        and box.y0 >= whole.y0 - SLACK
        and box.x1 <= whole.x1 + SLACK
        and box.y1 <= whole.y1 + SLACK
    )


def overlap(one, other):
    """By more than the space that boxes of text have around their letters."""
    wide = min(one.x1, other.x1) - max(one.x0, other.x0)
    high = min(one.y1, other.y1) - max(one.y0, other.y0)
    return wide > SLACK and high > 2 * SLACK


def test_the_zero_line_of_the_tax_is_the_baseline_and_what_is_not_shown_is_hollow():
    content = records(
        *cold("bare", [1.0, 1.1, 0.9] * 5),
        *cold("docker", [2.0, 2.1, 1.9] * 5),
        *cold("native", [1.0, 1.12, 0.88] * 5),
    )
    with canvas.style():
        (axes,) = tax_by_substrate(summarise(content)).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["docker", "native"]
    words = [text.get_text() for text in axes.texts]
    assert words == ["+100\N{NO-BREAK SPACE}%", "none shown"]
    filled = [line.get_markerfacecolor() != "#ffffff" for line in axes.lines if line.get_marker() != "None"]
    assert filled == [True, False]
    assert any(list(line.get_xdata()) == [0, 0] for line in axes.lines)
    assert "0 is bare" in axes.get_xlabel()


def reversing():
    """Native has the shorter start, docker the shorter actions: their ranking reverses with the length."""
    random = np.random.default_rng(5)
    costs = {"bare": (0.1, 0.1), "native": (0.2, 0.14), "docker": (2.0, 0.11)}
    return records(
        *(
            trial(
                f"trajectory-{length}",
                label,
                index,
                creation=start,
                actions=tuple(
                    action(f"a{place}", each * random.normal(1.0, 0.01), inside=each * 0.9)
                    for place in range(length)
                ),
            )
            for length in (10, 50, 150)
            for label, (start, each) in costs.items()
            for index in range(8)
        )
    )


def test_where_rankings_reverse_is_marked():
    summary = summarise(reversing())
    (reversal,) = rankings.reversals(summary)
    assert {reversal.one, reversal.other} == {"native", "docker"}
    assert sorted(map(sorted, (reversal.one_slower, reversal.other_slower))) == [
        ["trajectory-10", "trajectory-50"],
        ["trajectory-150"],
    ]
    (crossing,) = rankings.crossings(summary)
    assert 50 < crossing.length < 90  # 1.8 seconds later, at 0.03 seconds for each action: about 60
    with canvas.style():
        (axes,) = rankings_by_length(summary).axes
    rings = [line for line in axes.lines if line.get_markersize() == 15]
    assert [list(line.get_xdata()) for line in rings] == [[crossing.length]]
