"""Our own standard streams, beside an event loop that must go on."""

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


async def read() -> AsyncIterator[bytes]:
    """Standard input to its end, if it is a pipe or a file. A terminal stays with whoever sits there."""
    try:
        terminal = os.isatty(0)
        os.fstat(0)
    except OSError:
        return  # closed
    if terminal:
        return
    while got := await part():
        yield got


async def part() -> bytes:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    try:
        loop.add_reader(0, _settle, ready)
    except PermissionError:  # a file, which is always ready and cannot be waited for
        return await anyio.to_thread.run_sync(os.read, 0, CHUNK)
    try:
        await ready
    finally:
        loop.remove_reader(0)
    return os.read(0, CHUNK)


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def write(stream: TextIO, data: bytes) -> None:
    """Write to the end, as slowly as the reader reads. Raises BrokenPipeError."""
    if data:
        await anyio.to_thread.run_sync(partial(_write, stream.fileno(), data), abandon_on_cancel=True)


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def tell(value: object) -> None:
    """One JSON document on standard output, with control characters escaped."""
    text = msgspec.json.format(msgspec.json.encode(value)).decode()
    print(printable_json(text))  # noqa: T201 (the command's output)


def show(text: str) -> None:
    """One line of a command's output, whole: a terminal wraps it so that it can still be copied."""
    print(printable_line(text))  # noqa: T201 (the command's output)


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Container[int] = (),
    cut: bool = False,
) -> None:
    """Columns on standard output; those in ``right`` are aligned there. A row is one whole line.

    With ``cut`` the last column yields to the width of a terminal, if there is one.
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
        print(f"{text[: max(room, least) - 1]}…" if is_cut else text)  # noqa: T201 (the command's output)


SHORTEST = 16
"""Characters that a column which yields keeps."""


def _columns() -> int:
    """Of the terminal that standard output is; 0 if it is none."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):
        return 0


def coloured(text: str, colour: Colour) -> str:
    """In that colour on a terminal, unless NO_COLOR is set."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


Colour = Literal["red", "green", "yellow"]
_COLOURS: dict[Colour, int] = {"red": 31, "green": 32, "yellow": 33}


def say(text: str) -> None:
    print(printable(text), file=sys.stderr)  # noqa: T201 (the command line speaks)
