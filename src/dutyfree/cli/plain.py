"""Text from elsewhere on a terminal: sandboxes, servers and peers say what they like."""

from __future__ import annotations


def plain(text: str) -> str:
    """The text with nothing in it that a terminal would take for an order: such characters are spelt out."""
    return "".join(one if one.isprintable() or one in "\n\t" else _spelt(one) for one in text)


def cell(text: str) -> str:
    """Likewise, of a table, which would take brackets for orders too."""
    from rich.markup import escape

    return escape(plain(text))


def _spelt(one: str) -> str:
    return one.encode("unicode_escape").decode()
