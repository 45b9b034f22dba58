"""The known word that a mistyped one was probably meant to be."""

from __future__ import annotations

from collections.abc import Iterable


def suggestion(word: str, known: Iterable[str]) -> str:
    """``did you mean 'native'?``, or nothing where no known word is close to it."""
    import difflib  # only for an error

    lowered = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), lowered, n=1)
    return f"did you mean {lowered[close[0]]!r}?" if close else ""
