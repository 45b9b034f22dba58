"""This machine's own Debian: its suite, and where its apt fetches packages from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

FALLBACK_SUITE = "bookworm"


def suite() -> str:
    """The host's own Debian suite, so that bare and image agree; else a fixed one."""
    release: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/etc/os-release").read_text().splitlines():
            name, _, value = line.partition("=")
            release[name] = value.strip().strip("\"'")
    return (
        release.get("VERSION_CODENAME") or FALLBACK_SUITE if release.get("ID") == "debian" else FALLBACK_SUITE
    )


def mirror(wanted: str, etc: Path = Path("/etc/apt")) -> str | None:
    """Where this machine's apt gets ``wanted``'s main component; None leaves it to debootstrap."""
    for path in (etc / "sources.list", *sorted((etc / "sources.list.d").glob("*"))):
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError):
            continue
        read = _stanzas(text) if path.suffix == ".sources" else _lines(text)
        # The main list may be in either format.
        for uri, suites, components in (*read, *(_stanzas(text) if path.name == "sources.list" else ())):
            if wanted in suites and "main" in components:
                return _resolved(uri)
    return None


def _lines(text: str) -> Iterator[tuple[str, list[str], list[str]]]:
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if words[:1] != ["deb"]:
            continue
        if len(words) > 1 and words[1].startswith("["):
            end = next((place for place, word in enumerate(words) if word.endswith("]")), len(words))
            words[1 : end + 1] = []
        if len(words) > 3:
            yield words[1], [words[2]], words[3:]


def _stanzas(text: str) -> Iterator[tuple[str, list[str], list[str]]]:
    kept = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for stanza in kept.split("\n\n"):
        fields: dict[str, list[str]] = {}
        name = ""
        for line in stanza.splitlines():
            if line[:1].isspace():
                fields.setdefault(name, []).extend(line.split())
            else:
                name, _, value = line.partition(":")
                name = name.lower()
                fields[name] = value.split()
        if "deb" in fields.get("types", ()) and fields.get("enabled") != ["no"]:
            for uri in fields.get("uris", ()):
                yield uri, fields.get("suites", []), fields.get("components", [])


def _resolved(uri: str) -> str | None:
    """A mirror list names several places: its first will do."""
    if uri.startswith("mirror+file:"):
        with contextlib.suppress(OSError, IndexError):
            return Path(uri.removeprefix("mirror+file:")).read_text().split()[0]
        return None
    return uri if uri.partition(":")[0] in ("http", "https", "file") else None
