"""Make text from sandboxes, servers and peers safe to print.

Such text can hold escape sequences that a terminal would obey, so control characters are escaped. Imports
nothing.
"""

_KEPT = "\n\t\N{NO-BREAK SPACE}"


def printable(text: str) -> str:
    """Escape control characters; keep line breaks and tabs."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in _KEPT else _escaped(one) for one in text)


def printable_line(text: str) -> str:
    """Escape control characters, line breaks and tabs too: the result is one line."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def printable_json(text: str) -> str:
    """Escape control characters in a JSON document, as JSON does."""
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\n" else _json_escaped(one) for one in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _json_escaped(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
