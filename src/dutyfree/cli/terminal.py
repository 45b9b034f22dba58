"""Our terminal tied to one in a sandbox: keys go in as they are typed, the size follows the window."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Mapping

from dutyfree.cli import standard
from dutyfree.contract import Observation
from dutyfree.contract.abilities import Terminal, Terminals

_SHELL = r"""
if command -v bash >/dev/null 2>&1; then
    PROMPT_COMMAND="unset PROMPT_COMMAND; PS1='$1:\w\\\$ '" exec bash -i
fi
PS1="$1\$ " exec sh -i
"""
"""Bash where there is one. Its files for interactive shells set a prompt, so that ours comes after them."""

_UNDONE = b"\x1b[?1047l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b[?25h\x1b[0m"
"""Where a program could not end by itself: no other screen, no mouse, no marked pastes, a cursor."""


async def attach(
    sandbox: Terminals, name: str, *, cwd: str | None, env: Mapping[str, str], user: str | None
) -> Observation:
    """Run a shell until it ends. Our terminal is as it was before, however that comes about."""
    rows, columns = _size()
    env = {"TERM": os.environ.get("TERM", "xterm"), **env}
    command = ("/bin/sh", "-c", _SHELL, "sh", name)
    async with sandbox.terminal(command, rows=rows, columns=columns, cwd=cwd, env=env, user=user) as terminal:
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


def _size() -> tuple[int, int]:
    """Rows and columns of our terminal; the usual ones where it does not know."""
    columns, rows = os.get_terminal_size(0)
    return rows or 24, columns or 80


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Every key for the sandbox, Ctrl-C among them."""
    before = termios.tcgetattr(0)
    tty.setraw(0, termios.TCSANOW)  # what was typed ahead is kept
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # there is nobody at the other end
            os.write(1, _UNDONE)
        raise
    finally:
        termios.tcsetattr(0, termios.TCSANOW, before)  # also if nobody reads the screen


@contextlib.contextmanager
def _following(terminal: Terminal) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    resizing: set[asyncio.Task[None]] = set()

    def resized() -> None:
        task = loop.create_task(terminal.resize(*_size()))
        resizing.add(task)
        task.add_done_callback(resizing.discard)

    loop.add_signal_handler(signal.SIGWINCH, resized)
    resized()  # it may have changed before we heard of it
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
