"""``dutyfree shell``: a shell in a fresh sandbox, for a person or a script."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Annotated

from cyclopts import Parameter

from dutyfree.cli import standard, terminal
from dutyfree.cli.running import run
from dutyfree.cli.sandbox_options import Wanted, fetch, opened
from dutyfree.contract import Sandbox
from dutyfree.contract.abilities import Shell, ShellSessions, Terminals
from dutyfree.contract.errors import ActionError, UsageError


def shell(*, wanted: Annotated[Wanted, Parameter(name="*")] = Wanted()) -> int:  # noqa: B008 (frozen)
    """Open a shell in a fresh sandbox. It ends with 'exit' or Ctrl-D, and nothing of it is left.

    On a terminal it is one in the sandbox too: bash if the sandbox has it, else sh; editors and Ctrl-C work,
    and the size follows the window. The prompt names the sandbox, as 'dutyfree ps' does.
    Lines from a pipe are run one after the other, and variables, functions and the directory live on. The
    exit status is the last command's.

    For example:

        dutyfree shell
        dutyfree shell --recipe recipe.toml --cwd repository
        dutyfree shell --image debian:12 --upload .:/src --cwd /src --user nobody
        echo "cd /tmp; pwd" | dutyfree shell
    """
    return run(partial(_shell, wanted))


async def _shell(wanted: Wanted) -> int:
    environment = wanted.environment()
    async with opened(wanted) as sandbox:
        if os.isatty(0) and os.isatty(1) and isinstance(sandbox, Terminals):
            seen = await terminal.attach(
                sandbox, sandbox.id, cwd=wanted.cwd, env=environment, user=wanted.user
            )
            await fetch(sandbox, wanted)
            return seen.exit_code
        if wanted.user is not None:
            raise UsageError("a shell without a terminal runs as root of its sandbox", remedy="use: su NAME")
        if not isinstance(sandbox, ShellSessions):
            raise UsageError(f"{wanted.substrate} has no shell that can be held", remedy="use dutyfree run")
        async with sandbox.shell() as held:
            status = await _lines(sandbox, held, wanted)
        await fetch(sandbox, wanted)
        return status


async def _lines(sandbox: Sandbox, held: Shell, wanted: Wanted) -> int:
    """One line after the other, each run to its end."""
    person = os.isatty(0)
    for name, value in wanted.environment().items():
        await held.run(f"export {name}={_quoted(value)}")
    status = 0
    if wanted.cwd is not None:
        status = await _run(held, f"cd {_quoted(wanted.cwd)}")
    if person:
        standard.say(f"sandbox {sandbox.id}: line by line; Ctrl-C ends a command, Ctrl-D the shell")
    reader = _Lines()
    while True:
        if person:
            await standard.write(sys.stderr, f"{sandbox.id}$ ".encode())
        line = await reader.next()
        if line is None:
            return status
        if not line.strip():
            continue
        try:
            status = await _run(held, line)
        except ActionError as error:
            if error.kind != "ended":
                raise
            return status


async def _run(held: Shell, line: str) -> int:
    seen = await held.run(line)
    await standard.write(sys.stdout, seen.stdout)
    await standard.write(sys.stderr, seen.stderr)
    return seen.exit_code


class _Lines:
    """Standard input by lines, without holding up the event loop."""

    def __init__(self) -> None:
        self._pending = b""
        self._ended = False

    async def next(self) -> str | None:
        while b"\n" not in self._pending and not self._ended:
            part = await standard.part()
            self._ended = not part
            self._pending += part
        if not self._pending:
            return None
        line, _, self._pending = self._pending.partition(b"\n")
        return line.decode(errors="surrogateescape")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
