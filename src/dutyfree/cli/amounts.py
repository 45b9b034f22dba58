"""Amounts of bytes and pairs as people write them on a command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dutyfree import contract
from dutyfree.contract.errors import UsageError


def size(text: str | None, option: str) -> int | None:
    """``512M``, ``1.5G``, ``4096``. Raises UsageError."""
    return None if text is None else contract.size(text, option)


def shown(count: float | None) -> str:
    if count is None:
        return "?"
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def age(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def pairs(texts: Sequence[str], option: str, separator: str) -> list[tuple[str, str]]:
    """``NAME=VALUE`` or ``SOURCE:TARGET``, each split at its first separator. Raises UsageError."""
    found = [text.partition(separator) for text in texts]
    for (first, sign, _), text in zip(found, texts, strict=True):
        if not sign or not first:
            lacks = f"no {separator!r}" if first else f"nothing before {separator!r}"
            raise UsageError(f"{option} {text!r} has {lacks}", remedy=f"write it as A{separator}B")
    return [(first, rest) for first, _, rest in found]


def value(text: str) -> Any:
    """An option's value: as in TOML where it is, a size such as 512M in bytes, a bare string otherwise."""
    import tomllib

    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return size(text, "") if re.fullmatch(r"\d+(\.\d+)?[KMGT]", text) else text


def image(name: str | None) -> str | None:
    """A file or directory here is named in full; anything else is the substrate's to know."""
    if name is not None and (name.startswith(("./", "../")) or ("/" in name and Path(name).exists())):
        return str(Path(name).resolve())
    return name
