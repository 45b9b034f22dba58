"""Our terminal tied to one in a sandbox: keys go in as they are typed, the size follows the window."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Mapping

from dutyfree.abilities import Terminal, Terminals
from dutyfree.cli import standard
from dutyfree.contract import Observation


async def attach(
    sandbox: Terminals, *, cwd: str | None, env: Mapping[str, str], user: str | None
) -> Observation:
    """Run a shell until it ends. Our terminal is as it was before, however that comes about."""
    columns, rows = shutil.get_terminal_size()
    env = {"TERM": os.environ.get("TERM", "xterm"), **env}
    async with sandbox.terminal(rows=rows, columns=columns, cwd=cwd, env=env, user=user) as terminal:
        with _raw(), _following(terminal):
            typing = asyncio.create_task(_type(terminal))
            try:
                while data := await terminal.read():
                    await standard.write(sys.stdout, data)
                return await terminal.wait()
            finally:
                typing.cancel()
                await asyncio.wait([typing])


async def _type(terminal: Terminal) -> None:
    with contextlib.suppress(BrokenPipeError):  # the shell has ended
        while data := await standard.part():
            await terminal.write(data)


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Every key for the sandbox, Ctrl-C among them."""
    before = termios.tcgetattr(0)
    tty.setraw(0, termios.TCSANOW)  # what was typed ahead is kept
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSANOW, before)  # also if nobody reads the screen


@contextlib.contextmanager
def _following(terminal: Terminal) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    resizing: set[asyncio.Task[None]] = set()

    def resized() -> None:
        columns, rows = os.get_terminal_size(0)
        task = loop.create_task(terminal.resize(rows, columns))
        resizing.add(task)
        task.add_done_callback(resizing.discard)

    loop.add_signal_handler(signal.SIGWINCH, resized)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
