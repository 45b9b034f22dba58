"""Our own standard streams, beside an event loop that must go on."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from functools import partial
from typing import TextIO

import anyio.to_thread
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dutyfree.errors import plain

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
    """One JSON document on standard output."""
    print(msgspec.json.format(msgspec.json.encode(value)).decode())  # noqa: T201 (the command's output)


def table(rows: Table) -> None:
    """On standard output. A pipe has no width: whole lines, to be searched."""
    console = Console()
    (console if console.is_terminal else Console(width=1 << 16)).print(rows)


def cell(text: str) -> str:
    """Of a table: text from elsewhere, of which the terminal takes nothing for an order, nor the table."""
    return escape(plain(text))


def say(text: str) -> None:
    print(plain(text), file=sys.stderr)  # noqa: T201 (the command line speaks)
