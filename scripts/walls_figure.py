#!/usr/bin/env python3
"""Draw the price of each wall of a sandbox from the stored output of its benchmark.

::

    .venv/bin/python bench/run.py walls
    .venv/bin/python scripts/walls_figure.py docs/results/bench/2026-11-18-walls.json

Writes an SVG beside the file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dutyfree.analysis.statistics import Estimate
from dutyfree.report import canvas
from dutyfree.report.figures.dots import Panel, panels
from dutyfree.report.palette import SubstrateLook

MIX = {
    "P15": "all walls",
    "P15b": "all, plain=()",
    "P15a": "all, fixed /usr",
    "P15-user-nam": "no user namespace",
    "P15-namespac": "no other namespaces",
    "P15-seccomp": "no seccomp",
    "P15-memory-c": "no memory group",
    "P15-cgroups": "no control groups",
    "P15-cpu-prio": "no CPU priority",
    "P15c": "noise: native twice",
}


def main() -> None:
    source = Path(sys.argv[1])
    rows = {row["id"]: row for row in json.loads(source.read_text())}
    found = [Estimate(rows[one]["value"], rows[one]["low"], rows[one]["high"]) for one in MIX]
    part = Panel("compute-heavy work ÷ no isolation", found, lambda value: f"{value:.3g}", 1.0)
    with canvas.style():
        figure = panels(list(MIX.values()), [SubstrateLook("#d55e00", "s", "-")] * len(MIX), [part])
        source.with_suffix(".svg").write_bytes(canvas.svg(figure))


if __name__ == "__main__":
    main()
