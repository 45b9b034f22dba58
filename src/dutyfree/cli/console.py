"""Standard input and output: streams beside an event loop, tables, JSON, colours, sizes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Container, Iterable, Sequence
from functools import partial
from typing import Literal, TextIO

import anyio.to_thread
import msgspec

from dutyfree.printable import printable, printable_json, printable_line

CHUNK = 1 << 16

# --- Streams -------------------------------------------------------------------------------------------


async def read() -> AsyncIterator[bytes]:
    """Read standard input to its end if it is a pipe or a file. Do not read from a terminal."""
    try:
        terminal = os.isatty(0)
        os.fstat(0)
    except OSError:
        return  # closed
    if terminal:
        return
    while data := await read_chunk():
        yield data


async def read_all() -> bytes:
    """All of what ``read`` reads."""
    return b"".join([part async for part in read()])


async def read_chunk() -> bytes:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    try:
        loop.add_reader(0, _set_ready, ready)
    except PermissionError:  # a regular file, which epoll refuses because it is always ready
        return await anyio.to_thread.run_sync(os.read, 0, CHUNK)
    try:
        await ready
    finally:
        loop.remove_reader(0)
    return os.read(0, CHUNK)


def _set_ready(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def write(stream: TextIO, data: bytes) -> None:
    """Write all the data; wait while the reader is slow. Raises BrokenPipeError."""
    if data:
        await anyio.to_thread.run_sync(partial(_write, stream.fileno(), data), abandon_on_cancel=True)


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


# --- Output of commands --------------------------------------------------------------------------------


def print_json(value: object) -> None:
    """Print one JSON document on standard output, with control characters escaped."""
    text = msgspec.json.format(msgspec.json.encode(value)).decode()
    print(printable_json(text))  # noqa: T201 (command-line output)


def show(text: str) -> None:
    """Print one line on standard output. The terminal wraps it, so that it can be copied whole."""
    print(printable_line(text))  # noqa: T201 (command-line output)


def say(text: str) -> None:
    """Print a message on standard error."""
    print(printable(text), file=sys.stderr)  # noqa: T201 (command-line output)


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Container[int] = (),
    cut: bool = False,
) -> None:
    """Print columns on standard output, one line per row. The columns in ``right`` are right-aligned.

    With ``cut``, the last column is cut at the width of the terminal, if there is one.
    """
    lines = [tuple(map(printable_line, row)) for row in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    room = _columns() if cut else 0
    for cells in lines:
        shown = (
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        text = "  ".join(shown).rstrip()
        least = sum(widths[:-1]) + 2 * (len(widths) - 1) + SHORTEST
        is_cut = room and len(text) > max(room, least)
        print(f"{text[: max(room, least) - 1]}…" if is_cut else text)  # noqa: T201 (command-line output)


SHORTEST = 16
"""Minimum number of characters of a column that is cut."""


def _columns() -> int:
    """The width of the terminal at standard output; 0 if it is no terminal."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):
        return 0


def coloured(text: str, colour: Colour) -> str:
    """The text with colour codes if standard output is a terminal and NO_COLOR is not set."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


Colour = Literal["red", "green", "yellow"]
_COLOURS: dict[Colour, int] = {"red": 31, "green": 32, "yellow": 33}


# --- Numbers -------------------------------------------------------------------------------------------


def size(count: float | None) -> str:
    """Bytes as 512 B, 1.5 KiB, 3.0 GiB; ``?`` for None."""
    if count is None:
        return "?"
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def age(seconds: float) -> str:
    """A duration in its largest unit: 3 days, 2 hours, 5 minutes, 10 s."""
    for length, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"
