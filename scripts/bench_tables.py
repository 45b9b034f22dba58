#!/usr/bin/env python3
"""Store the output of a benchmark, and write its numbers into the tables of docs/.

::

    .venv/bin/python bench/run.py
    scripts/bench_tables.py bench/out/latest.json 2026-11-18

The output is copied to docs/results/bench/2026-11-18.json. In docs/*.md, every table whose rows all begin
with the id of a figure in this output gets the new numbers, and the source that ``check_claims.py`` checks.
Tables with other rows stay, and are listed. Sentences stay: check them by hand.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = re.compile(r"(?m)^\| \| what \|.*\n\|[-|: ]+\|\n((?:\|.*\n)+)((?:<!--.*-->\n)*)")
"""A table of figures, its rows, and the sources behind it."""


def cells(row: dict[str, Any]) -> dict[str, str]:
    """Column → text, as ``bench/run.py --markdown`` writes it."""
    mark = {True: " ✓", False: " ✗", None: ""}[row["holds"]]
    return {
        "value": f"{row['value']:.4g}",
        "target": "" if row["target"] is None else f"{row['target']:g}{mark}",
        "p50 ms": f"{row['p50'] * 1e3:.3f}",
        "p95 ms": f"{row['p95'] * 1e3:.3f}",
        "n": str(row["n"]),
    }


def filled(page: str, rows: dict[str, dict[str, Any]], source: str) -> tuple[str, list[str]]:
    """The page with new numbers, and the ids that kept a table from getting them."""
    missing: list[str] = []

    def table(found: re.Match[str]) -> str:
        header = [title.strip() for title in found[0].split("\n", 1)[0].strip("|").split("|")]
        lines = found[1].splitlines()
        ids = [line.strip("|").split("|", 1)[0].strip() for line in lines]
        unknown = [one for one in ids if one not in rows]
        if unknown:
            missing.extend(unknown if len(unknown) < len(ids) else [])
            return found[0]
        written = []
        for line, one in zip(lines, ids, strict=True):
            new = cells(rows[one])
            old = [text.strip() for text in line.strip("|").split("|")]
            kept = [new.get(title, text) for title, text in zip(header, old, strict=True)]
            written.append(f"| {' | '.join(kept)} |".replace("|  |", "| |"))
        first, second, _ = found[0].split("\n", 2)
        mark = f"<!-- from {source}: {'; '.join(ids)} -->"
        return "\n".join([first, second, *written, mark]) + "\n"

    return TABLE.sub(table, page), missing


def main() -> None:
    if len(sys.argv) != 3 or not re.fullmatch(r"\d{4}-\d\d-\d\d[\w-]*", sys.argv[2]):
        sys.exit(__doc__)
    found = json.loads(Path(sys.argv[1]).read_text())
    name = f"results/bench/{sys.argv[2]}.json"
    target = ROOT / "docs" / name
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    rows = {row["id"]: row for row in found}
    for path in sorted((ROOT / "docs").glob("*.md")):
        before = path.read_text()
        after, missing = filled(before, rows, name)
        if after != before:
            path.write_text(after)
            print(f"{path.relative_to(ROOT)}: new numbers")
        if missing:
            print(f"{path.relative_to(ROOT)}: a table stays as it is, not measured: {', '.join(missing)}")


if __name__ == "__main__":
    main()
