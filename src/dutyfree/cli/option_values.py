"""Values of command-line options: sizes, NAME=VALUE pairs, option values, images."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dutyfree import contract
from dutyfree.contract.errors import UsageError


def size(text: str | None, option: str) -> int | None:
    """Parse ``512M``, ``1.5G`` or ``4096``. Raises UsageError."""
    return None if text is None else contract.size(text, option)


def pairs(texts: Sequence[str], option: str, separator: str) -> list[tuple[str, str]]:
    """Split each ``NAME=VALUE`` or ``SOURCE:TARGET`` at its first separator. Raises UsageError."""
    found = [text.partition(separator) for text in texts]
    for (first, sign, _), text in zip(found, texts, strict=True):
        if not sign or not first:
            lacks = f"no {separator!r}" if first else f"nothing before {separator!r}"
            raise UsageError(f"{option} {text!r} has {lacks}", remedy=f"write it as A{separator}B")
    return [(first, rest) for first, _, rest in found]


def value(text: str) -> Any:
    """Parse an option's value: TOML if it is valid TOML, a size such as 512M, otherwise the string itself."""
    import tomllib

    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return size(text, "") if re.fullmatch(r"\d+(\.\d+)?[KMGT]", text) else text


def image(name: str | None) -> str | None:
    """The absolute path if the name is a local file or directory, otherwise the name itself."""
    if name is not None and (name.startswith(("./", "../")) or ("/" in name and Path(name).exists())):
        return str(Path(name).resolve())
    return name


def unknown_option(word: str, known: Iterable[str], command: str) -> UsageError:
    from dutyfree.validation import suggestion

    return UsageError(
        f"there is no option {word}", remedy=suggestion(word, known) or f"see: {command} --help"
    )
