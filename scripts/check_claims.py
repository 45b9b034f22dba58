#!/usr/bin/env python3
"""Check that every measured number in README.md and docs/ has a source.

::

    scripts/check_claims.py           exits with status 1 if a number has no source, or a wrong one
    scripts/check_claims.py --list    also lists the numbers whose source is not stored

A number needs a source if it has a unit of time, size or rate, if it is a percentage or a factor, if it has
decimals or a sign, or if it is the bound of an interval in brackets. The source stands in an HTML comment,
which readers do not see, behind the paragraph, list item or table. Behind a heading, it is for the section.

    <!-- from results/2026-11-16-warmth: cells[T0,native].first_result.p50; taxes[T2].rate -->

The numbers must be among these values of the study's summary.json, rounded as they are written. A name in
brackets selects the rows that have it in one of their fields. ``from results/bench/FILE.json: P1; P2`` takes
rows of a stored benchmark by their id, and ``*`` takes all; of a stored ``FILE.txt``, what a program printed,
``*`` takes all numbers as they are. Sources of the other kinds are not recomputed:

    <!-- configuration -->             a limit or a default of the code, or the size of the test machine
    <!-- arithmetic -->                computed from other numbers in the same sentence
    <!-- quoted -->                    from a source that the text names
    <!-- test: tests/FILE.py -->       a test measures it or asserts it
    <!-- not stored: COMMAND, DATE --> measured with this command, but its output is not in the repository

``<!-- arithmetic (417 hours; 0.01 s) -->`` is for these numbers only.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

NUMBER = r"[+\u2212]?\d+(?:,\d{3})*(?:\.\d+)?"
UNITS = {
    "µs": 1e6,
    "microseconds?": 1e6,
    "ms": 1e3,
    "milliseconds?": 1e3,
    "s": 1.0,
    "seconds?": 1.0,
    "min": 1 / 60,
    "minutes?": 1 / 60,
    "h": 1.0,
    "hours": 1.0,
    "worker-hours": 1.0,
    "%": 100.0,
    "per cent": 100.0,
    "×": 1.0,  # noqa: RUF001 (the multiplication sign is meant)
    "times as": 1.0,
    "[KMGT]i?B": 1.0,
    "kB": 1.0,
    "(?:per|a) second": 1.0,
}
_CHAIN = rf"(?:(?:\s?[\u2013/]\s?|,? (?:to|and|or) |, |: ){NUMBER})*"
TOKEN = re.compile(
    rf"(?<![\w.,/#:\-\u2013]){NUMBER}(?![\w]|-\d|\.\d)"
    rf"(?:(?=(?:{_CHAIN})\)?\s?(?P<unit>{'|'.join(UNITS)})(?!\w)))?"
    rf"|(?<=\u2013){NUMBER}(?=\s(?P<end>{'|'.join(UNITS)})(?!\w))"
)
INTERVAL = re.compile(rf"[\[(]{NUMBER}(?:, | to ){NUMBER}[\])]")
NAMED = re.compile(
    r"(?:Linux|Docker|Python|Debian|Kubernetes|arXiv|kernel|version|release|Apache|Figure|pip|git|v)\s?$",
    re.IGNORECASE,
)
"""Before a number with decimals: it is a version."""
LEVEL = re.compile(r"\s?(?:interval|confidence|percentile)")
"""Behind a percentage: the level of an interval."""
MARK = re.compile(r"<!--\s*(from|configuration|arithmetic|quoted|test|not stored)\b(.*?)-->", re.DOTALL)


class Printed(float):
    """A number of a stored text: it has the unit that the text says."""


@dataclass
class Claim:
    """A number as it is written."""

    text: str
    value: float
    unit: str
    """As it is written; empty if there is none."""
    scale: float | None
    """What a stored value is multiplied with to have this unit."""

    def states(self, found: float) -> bool:
        """Whether ``found`` is this number, rounded to the digits that are written."""
        digits = self.text.lstrip("+\N{MINUS SIGN}").replace(",", "")
        decimals = len(digits.partition(".")[2])
        step = 10.0**-decimals
        if not decimals and len(digits) > 3:  # 9,248 may be rounded to three digits
            step = 10.0 ** (len(digits) - max(3, len(digits.rstrip("0"))))
        scales = [self.scale] if self.scale else [1.0, 1e3, 1e6, 100.0]
        if isinstance(found, Printed):
            scales = [1.0]
        return any(abs(found * scale - self.value) <= 0.5001 * step for scale in scales)


@dataclass
class Source:
    kind: str
    detail: str
    only: list[str]


@dataclass
class Block:
    """A paragraph, list item, table or heading, with the sources behind it."""

    line: int
    text: str
    level: int = 0
    """Of a heading; else 0."""
    sources: list[Source] = field(default_factory=list)

    @property
    def is_table(self) -> bool:
        return self.text.lstrip().startswith("|")


@dataclass
class Problem:
    place: str
    text: str


def blocks(text: str) -> list[Block]:
    """The blocks of a page without its code blocks."""
    text = re.sub(
        r"^ *```.*?^ *```", lambda found: re.sub(r"[^\n]", "", found[0]), text, flags=re.DOTALL | re.MULTILINE
    )
    # A comment may have several lines: put all of it on its first.
    text = re.sub(
        r"<!--.*?-->",
        lambda found: " ".join(found[0].split()) + "\n" * found[0].count("\n"),
        text,
        flags=re.DOTALL,
    )
    made: list[Block] = []
    fresh = True
    for number, line in enumerate(text.splitlines(), 1):
        rest = MARK.sub("", line)
        heading = re.match(r"(#+) ", rest)
        if not rest.strip():
            fresh = fresh or not line.strip()
        elif fresh or heading or re.match(r"\s*(?:[-*] |\d+\. |\[\^)", rest):
            made.append(Block(number, rest, len(heading[1]) if heading else 0))
            fresh = bool(heading)
        else:
            made[-1].text += f"\n{rest}"
        for kind, detail in MARK.findall(line):
            only = re.match(r"\s*\(([^)]*)\)", detail)
            made[-1].sources.append(
                Source(kind, detail.strip(" :"), [one.strip() for one in only[1].split(";")] if only else [])
            )
    return made


def claims(block: Block) -> Iterator[Claim]:
    """The numbers of a block that need a source."""
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|\[\^[^]]*\]|<[^>]*>", lambda found: " " * len(found[0]), block.text)
    intervals = [found.span() for found in INTERVAL.finditer(text)]
    for found in TOKEN.finditer(text):
        unit = found["unit"] or found["end"] or ""
        scale = next((size for name, size in UNITS.items() if re.fullmatch(name, unit)), None)
        behind = text[found.end() :]
        if unit == "%" and LEVEL.match(re.sub(r"^\s*%", "", behind)):
            continue
        bound = any(start < found.start() < end for start, end in intervals)
        plain_count = "." not in found[0] and found[0][0].isdigit() and not bound
        if not unit and (plain_count or NAMED.search(text[: found.start()])):
            continue
        plain = found[0].replace(",", "").replace("\N{MINUS SIGN}", "-")
        yield Claim(found[0], float(plain), unit, scale)


@cache
def _printed(path: Path) -> list[float]:
    """All numbers of a text."""
    found = re.findall(r"[+-]?\d[\d,]*(?:\.\d+)?", path.read_text().replace("\N{MINUS SIGN}", "-"))
    return [Printed(text.replace(",", "")) for text in found]


@cache
def _stored(path: Path) -> Any:
    return json.loads((path / "summary.json" if path.is_dir() else path).read_text())


def values(path: Path, expression: str) -> list[float]:
    """The numbers that an expression selects from a summary or a stored benchmark."""
    if path.suffix == ".txt":
        return _printed(path) if expression == "*" else []
    found = _stored(path)
    if isinstance(found, list):
        rows = [row for row in found if expression in ("*", row.get("id"))]
        return [number for row in rows for number in _numbers(row)]
    reached = [found]
    for name, brackets in re.findall(r"([\w-]+)(?:\[([^]]*)\])?", expression):
        reached = [one[name] for one in reached if isinstance(one, dict) and one.get(name) is not None]
        reached = [item for one in reached for item in (one if isinstance(one, list) else [one])]
        for key in [key.strip() for key in brackets.split(",")] if brackets else []:
            reached = [one for one in reached if key in (str(value) for value in one.values())]
    return [number for one in reached for number in _numbers(one)]


def _numbers(found: Any) -> Iterator[float]:
    if isinstance(found, int | float) and not isinstance(found, bool):
        yield float(found)
    elif isinstance(found, dict):
        for one in found.values():
            yield from _numbers(one)


def check(page: Path, root: Path = ROOT) -> tuple[list[Problem], list[str]]:
    """The problems of a page, and its numbers that are not stored."""
    problems: list[Problem] = []
    unstored: list[str] = []
    sections: list[Block] = []
    for block in blocks(page.read_text()):
        if block.level:
            sections = [*(one for one in sections if one.level < block.level), block]
        sources = [*block.sources, *(source for one in reversed(sections) for source in one.sources)]
        place = f"{page.relative_to(root)}:{block.line}"
        pools = [source for source in block.sources if source.kind == "from"]
        for source in block.sources:
            problems += [Problem(place, text) for text in _broken(source, root)]
        pool = [value for source in pools if not _broken(source, root) for value in _selected(source, root)]
        for claim in claims(block):
            shown = f"{claim.text} {claim.unit}".strip()
            kind = _kind(claim, shown, sources)
            if kind == "not stored":
                unstored.append(f"{place}: {shown}")
            if kind:
                continue
            if pools and any(claim.states(value) for value in pool):
                continue
            why = "is not among the values of its source" if pools else "has no source"
            problems.append(Problem(place, f"{shown!r} {why}"))
    return problems, unstored


def _kind(claim: Claim, shown: str, sources: Iterable[Source]) -> str | None:
    """The kind of the source that is not recomputed; None if there is none."""
    backed = False
    for source in sources:
        backed = backed or source.kind == "from"
        if source.kind == "from" or (backed and not source.only):
            continue
        if not source.only or any(one in (claim.text, shown) for one in source.only):
            return source.kind
    return None


def _selected(source: Source, root: Path) -> Iterator[float]:
    path, _, expressions = source.detail.partition(":")
    for expression in expressions.split(";"):
        yield from values(root / "docs" / path.strip(), expression.strip())


def _broken(source: Source, root: Path) -> list[str]:
    """What is wrong with a source itself."""
    path, _, expressions = source.detail.partition(":")
    if source.kind == "not stored" and not source.only and not re.search(r"\d{4}-\d\d-\d\d", source.detail):
        return ["a source 'not stored' needs its command and its date"]
    if source.kind == "test":
        return [] if (root / path.strip()).exists() else [f"there is no {path.strip()}"]
    if source.kind != "from":
        return []
    if not (root / "docs" / path.strip()).exists():
        return [f"there is no docs/{path.strip()}"]
    return [
        f"{expression.strip()!r} selects nothing in docs/{path.strip()}"
        for expression in expressions.split(";")
        if not values(root / "docs" / path.strip(), expression.strip())
    ]


def pages(root: Path = ROOT) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").glob("*.md")), root / "docs/results/README.md"]


def main() -> None:
    problems: list[Problem] = []
    unstored: list[str] = []
    for page in pages():
        found, without = check(page)
        problems += found
        unstored += without
    for problem in problems:
        print(f"{problem.place}: {problem.text}")
    if problems:
        print("the beginning of scripts/check_claims.py says how to name a source", file=sys.stderr)
    if "--list" in sys.argv:
        print("\n".join(unstored))
    print(
        f"{len(problems)} numbers without a true source; {len(unstored)} measured, but not stored",
        file=sys.stderr,
    )
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
