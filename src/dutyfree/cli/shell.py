"""``dutyfree shell``: a shell in a fresh sandbox, on the user's terminal or line by line from a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated

from cyclopts import Parameter

from dutyfree.cli import console
from dutyfree.cli.sandbox_options import SandboxOptions, download_files, open_sandbox
from dutyfree.cli.signals import run_async
from dutyfree.contract import Observation, Sandbox
from dutyfree.contract.abilities import Shell, ShellSessions, Terminal, Terminals
from dutyfree.contract.errors import ActionError, UsageError


def shell(*, options: Annotated[SandboxOptions, Parameter(name="*")] = SandboxOptions()) -> int:  # noqa: B008 (frozen)
    """Open a shell in a fresh sandbox. 'exit' or Ctrl-D ends it and removes the sandbox.

    On a terminal you get a terminal in the sandbox, with bash if the image has it, else sh. Editors and
    Ctrl-C work, and the size follows the window. The prompt shows the sandbox's id, as in 'dutyfree ps'.

    From a pipe, the lines run one after the other in the same shell: variables, functions and the working
    directory are kept. The exit status is the last command's.

    For example:

        dutyfree shell
        dutyfree shell --recipe recipe.toml --cwd repository
        dutyfree shell --image debian:12 --upload .:/src --cwd /src --user nobody
        echo "cd /tmp; pwd" | dutyfree shell
    """
    return run_async(partial(_shell, options))


async def _shell(options: SandboxOptions) -> int:
    environment = options.environment()
    async with open_sandbox(options) as sandbox:
        if os.isatty(0) and os.isatty(1) and isinstance(sandbox, Terminals):
            seen = await _attach(sandbox, sandbox.id, cwd=options.cwd, env=environment, user=options.user)
            await download_files(sandbox, options)
            return seen.exit_code
        if options.user is not None:
            raise UsageError(
                "--user needs a terminal: a shell without one runs as root", remedy="use: su NAME"
            )
        if not isinstance(sandbox, ShellSessions):
            raise UsageError(f"{options.substrate} has no shell sessions", remedy="use dutyfree run")
        async with sandbox.shell() as session:
            status = await _run_lines(sandbox, session, options)
        await download_files(sandbox, options)
        return status


# --- Line by line --------------------------------------------------------------------------------------


async def _run_lines(sandbox: Sandbox, session: Shell, options: SandboxOptions) -> int:
    interactive = os.isatty(0)
    for name, value in options.environment().items():
        await session.run(f"export {name}={shlex.quote(value)}")
    status = 0
    if options.cwd is not None:
        status = await _run_line(session, f"cd {shlex.quote(options.cwd)}")
    if interactive:
        console.say(f"sandbox {sandbox.id}: line by line; Ctrl-C ends a command, Ctrl-D the shell")
    reader = _LineReader()
    while True:
        if interactive:
            await console.write(sys.stderr, f"{sandbox.id}$ ".encode())
        line = await reader.next()
        if line is None:
            return status
        if not line.strip():
            continue
        try:
            status = await _run_line(session, line)
        except ActionError as error:
            if error.kind != "ended":
                raise
            return status


async def _run_line(session: Shell, line: str) -> int:
    seen = await session.run(line)
    await console.write(sys.stdout, seen.stdout)
    await console.write(sys.stderr, seen.stderr)
    return seen.exit_code


class _LineReader:
    """Reads standard input line by line without blocking the event loop."""

    def __init__(self) -> None:
        self._pending = b""
        self._ended = False

    async def next(self) -> str | None:
        while b"\n" not in self._pending and not self._ended:
            data = await console.read_chunk()
            self._ended = not data
            self._pending += data
        if not self._pending:
            return None
        line, _, self._pending = self._pending.partition(b"\n")
        return line.decode(errors="surrogateescape")


# --- On a terminal -------------------------------------------------------------------------------------

_START_SHELL = r"""
if command -v bash >/dev/null 2>&1; then
    PROMPT_COMMAND="unset PROMPT_COMMAND; PS1='$1:\w\\\$ '" exec bash -i
fi
PS1="$1\$ " exec sh -i
"""
"""Start bash if there is one. Its start-up files set a prompt, so ours is set after them."""

_RESTORE_SCREEN = b"\x1b[?1047l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b[?25h\x1b[0m"
"""Undo what a killed program may leave: alternate screen, mouse, bracketed paste, hidden cursor, colours."""


async def _attach(
    sandbox: Terminals, name: str, *, cwd: str | None, env: Mapping[str, str], user: str | None
) -> Observation:
    """Connect our terminal to a shell in the sandbox until it ends, then restore our terminal."""
    rows, columns = _terminal_size()
    env = {"TERM": os.environ.get("TERM", "xterm"), **env}
    command = ("/bin/sh", "-c", _START_SHELL, "sh", name)
    async with sandbox.terminal(command, rows=rows, columns=columns, cwd=cwd, env=env, user=user) as terminal:
        with _raw_mode(), _resize_with_window(terminal):
            keys = asyncio.create_task(_send_keys(terminal))
            try:
                while data := await terminal.read():
                    await console.write(sys.stdout, data)
                return await terminal.wait()
            finally:
                keys.cancel()
                await asyncio.wait([keys])


async def _send_keys(terminal: Terminal) -> None:
    with contextlib.suppress(BrokenPipeError):  # the shell has ended
        while data := await console.read_chunk():
            await terminal.write(data)


def _terminal_size() -> tuple[int, int]:
    """Rows and columns of our terminal; 24 × 80 if it does not know."""  # noqa: RUF002
    columns, rows = os.get_terminal_size(0)
    return rows or 24, columns or 80


@contextlib.contextmanager
def _raw_mode() -> Iterator[None]:
    """Send every key to the sandbox, Ctrl-C included."""
    before = termios.tcgetattr(0)
    tty.setraw(0, termios.TCSANOW)  # not TCSAFLUSH, which drops what was typed ahead
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # the terminal is gone
            os.write(1, _RESTORE_SCREEN)
        raise
    finally:
        termios.tcsetattr(0, termios.TCSANOW, before)  # TCSADRAIN would block on a terminal that is not read


@contextlib.contextmanager
def _resize_with_window(terminal: Terminal) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    def resize() -> None:
        task = loop.create_task(terminal.resize(*_terminal_size()))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop.add_signal_handler(signal.SIGWINCH, resize)
    resize()  # the size may have changed before the handler was installed
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
