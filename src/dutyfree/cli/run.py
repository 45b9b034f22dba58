"""One command in a fresh sandbox: what ``dutyfree run`` does."""

from __future__ import annotations

import sys
from contextlib import aclosing
from dataclasses import fields
from functools import partial
from typing import Any

import msgspec

from dutyfree.cli import standard, unknown_option
from dutyfree.cli.running import run as run_to_the_end
from dutyfree.cli.sandbox_options import Wanted, fetch, opened
from dutyfree.contract import Observation, Sandbox
from dutyfree.contract.abilities import Chunk, Programmed, Streaming
from dutyfree.contract.errors import UsageError

TIMED_OUT = 124
"""As timeout(1) has it."""


def once(command: tuple[str, ...], wanted: Wanted, timeout: float | None, json: bool) -> int:
    """Run it, and return its exit status. Raises UsageError, and what the substrate raises."""
    if command and command[0].startswith("-"):
        known = ("--timeout", "--json", *(f"--{field.name}" for field in fields(Wanted)))
        raise unknown_option(command[0].partition("=")[0], known, "dutyfree run")
    if timeout is not None and not timeout > 0:
        raise UsageError(f"--timeout {timeout:g} is no time", remedy="write seconds, such as 60 or 0.5")
    return run_to_the_end(partial(_run, command, wanted, timeout, json))


async def _run(command: tuple[str, ...], wanted: Wanted, timeout: float | None, json: bool) -> int:
    environment = wanted.environment()
    async with opened(wanted) as sandbox:
        command = command or _program(sandbox)
        if json or not isinstance(sandbox, Streaming):
            given = b"".join([part async for part in standard.read()])
            seen = await sandbox.exec(
                command, cwd=wanted.cwd, env=environment, stdin=given, timeout=timeout, user=wanted.user
            )
            if json:
                standard.tell(_described(sandbox, seen))
            else:
                await standard.write(sys.stdout, seen.stdout)
                await standard.write(sys.stderr, seen.stderr)
        else:
            seen = await _stream(sandbox, command, wanted, environment, timeout)
        status = TIMED_OUT if seen.timed_out else seen.exit_code
        if seen.timed_out and timeout is not None:
            standard.say(f"dutyfree: the command was killed after {timeout:g} s, its --timeout")
        try:
            await fetch(sandbox, wanted)
        except UsageError as error:
            if not status:
                raise
            standard.say(f"dutyfree: {error.message}")  # no wonder: the command failed, which counts
    return status


def _program(sandbox: Sandbox) -> tuple[str, ...]:
    """What the image runs by itself. Raises UsageError."""
    if isinstance(sandbox, Programmed) and sandbox.program:
        return sandbox.program
    raise UsageError(
        "there is no command to run, and the image names none",
        remedy="name it after --: dutyfree run -- ls -l",
    )


async def _stream(
    sandbox: Streaming,
    command: tuple[str, ...],
    wanted: Wanted,
    environment: dict[str, str],
    timeout: float | None,
) -> Observation:
    items = sandbox.stream(
        command,
        cwd=wanted.cwd,
        env=environment,
        stdin=standard.read(),
        timeout=timeout,
        user=wanted.user,
    )
    seen = Observation(exit_code=0)
    async with aclosing(items) as items:  # type: ignore[type-var]
        async for item in items:
            if isinstance(item, Chunk):
                await standard.write(sys.stdout if item.stream == "stdout" else sys.stderr, item.data)
            else:
                seen = item
    # A program that could not be started says why in the observation.
    await standard.write(sys.stderr, seen.stderr)
    return seen


def _described(sandbox: Sandbox, seen: Observation) -> dict[str, Any]:
    text = {"stdout": seen.stdout, "stderr": seen.stderr}
    return {
        **msgspec.to_builtins(seen),
        **{name: data.decode(errors="backslashreplace") for name, data in text.items()},
        "spans": [{"name": span.name, "start": span.start, "seconds": span.seconds} for span in seen.spans],
        "sandbox": {
            "id": sandbox.id,
            "spans": [
                {"name": span.name, "start": span.start, "seconds": span.seconds} for span in sandbox.spans
            ],
        },
    }
