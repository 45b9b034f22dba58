"""Colours and marks of all figures: safe for colour-blind readers, visible on white and on black."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from dutyfree.analysis.model import Summary

INK = "#1a1d21"
MUTED = "#646b75"
GRID = "#dfe3e8"
PAPER = "#ffffff"
ON_LIGHT = "#101010"
ON_DARK = "#fdfdfd"


class ComponentLook(msgspec.Struct, frozen=True):
    title: str
    colour: str
    text: str
    hatch: str = ""


COMPONENTS: dict[str, ComponentLook] = {
    "creation": ComponentLook("creation", "#0072b2", ON_DARK),
    "readiness": ComponentLook("readiness", "#56b4e9", ON_LIGHT),
    "setup": ComponentLook("set-up", "#009e73", ON_DARK),
    # The time inside the actions is mostly the work, not the tax: it stays in the background.
    "actions": ComponentLook("actions (inside)", "#b4bbc4", ON_LIGHT),
    "orchestration": ComponentLook("orchestration", "#d55e00", ON_DARK),
    "undivided": ComponentLook("actions, undivided", "#c8b08c", ON_LIGHT, "////"),
    "cleanup": ComponentLook("cleanup", "#cc79a7", ON_LIGHT),
    "unattributed": ComponentLook("unattributed", "#8b8f96", ON_LIGHT, "\\\\\\\\"),
}


class SubstrateLook(msgspec.Struct, frozen=True):
    colour: str
    marker: str
    line: Any
    """A line style as matplotlib takes it."""


_SOLID, _DASHED, _DOTTED, _MIXED = "-", (0, (4, 1.6)), (0, (1.2, 1.4)), (0, (5, 1.4, 1.2, 1.4))

_LINES = (_SOLID, _DASHED, _DOTTED, _MIXED)

_LOOKS: tuple[SubstrateLook, ...] = (
    SubstrateLook("#7a828c", "o", _SOLID),
    SubstrateLook("#d55e00", "s", _SOLID),
    SubstrateLook("#0072b2", "D", _SOLID),
    SubstrateLook("#009e73", "^", _SOLID),
    SubstrateLook("#cc79a7", "v", _SOLID),
    SubstrateLook("#e69f00", "P", _DASHED),
    SubstrateLook("#56b4e9", "X", _DASHED),
    SubstrateLook("#8c6bb1", "<", _DASHED),
    SubstrateLook("#a0522d", ">", _DASHED),
    SubstrateLook("#b0a000", "h", _DOTTED),
    SubstrateLook("#2f9e9e", "p", _MIXED),
    SubstrateLook("#c2185b", "d", _MIXED),
)

# Known substrates look the same in every report.
_KNOWN = {"bare": 0, "native": 1, "docker": 2, "oci": 3, "kubernetes": 4, "vm": 5, "hosted": 6, "cloud": 7}


def substrate_looks(summary: Summary) -> dict[str, SubstrateLook]:
    taken: dict[str, int] = {}
    if len(summary.substrates) > len(_LOOKS):
        return _looks_by_family(summary)
    for substrate in summary.substrates:
        place = _KNOWN.get(substrate.use)
        if place is not None and place not in taken.values():
            taken[substrate.label] = place
    free = [place for place in range(len(_LOOKS)) if place not in taken.values()]
    for substrate in summary.substrates:
        if substrate.label not in taken:
            taken[substrate.label] = free.pop(0) if free else len(taken) % len(_LOOKS)
    return {label: _LOOKS[place] for label, place in taken.items()}


def _looks_by_family(summary: Summary) -> dict[str, SubstrateLook]:
    """One colour for labels that begin alike, such as docker and docker-init; they differ in their marks."""
    families: dict[str, list[str]] = {}
    for label in summary.labels:
        families.setdefault(label.partition("-")[0], []).append(label)
    places = {name: _KNOWN[name] for name in families if name in _KNOWN}
    free = [place for place in range(len(_LOOKS)) if place not in places.values()]
    for name in families:
        if name not in places:
            places[name] = free.pop(0) if free else len(places) % len(_LOOKS)
    return {
        label: msgspec.structs.replace(
            _LOOKS[places[name]],
            marker=_LOOKS[number % len(_LOOKS)].marker,
            line=_LINES[number % len(_LINES)],
        )
        for name, labels in families.items()
        for number, label in enumerate(labels)
    }


@lru_cache(maxsize=1)
def _drawable() -> frozenset[int]:
    from matplotlib import font_manager
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(font_manager.findfont("DejaVu Sans")).get_charmap())


def drawn(text: str, length: int = 20) -> str:
    """Untrusted text for a figure: one short line of glyphs that the font has."""
    line = "".join(
        char if ord(char) in _drawable() else "\N{WHITE SQUARE}" for char in " ".join(text.split())
    )
    if len(line) > length:
        line = line[: length - 1] + "…"
    # matplotlib leaves labels that start with an underscore out of a legend.
    return f"\N{THIN SPACE}{line}" if line.startswith("_") else line or "(no name)"
