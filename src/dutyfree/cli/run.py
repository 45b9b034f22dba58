"""``dutyfree run``: one command in a fresh sandbox.

``parse`` reads the usual command lines itself, because the general parser takes longer to import than
everything else that ``run`` needs. ``run_help`` describes the command to the general parser.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from dutyfree.cli import console
from dutyfree.cli.option_values import unknown_option
from dutyfree.cli.sandbox_options import SandboxOptions, download_files, open_sandbox
from dutyfree.cli.signals import run_async
from dutyfree.contract import Observation, Sandbox, Span
from dutyfree.contract.abilities import Chunk, Programmed, Streaming
from dutyfree.contract.errors import ArgumentError, UsageError

TYPES: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(("substrate", "image", "memory", "disk", "network", "user", "cwd"), str),
    **dict.fromkeys(("cpus", "timeout"), float),
    "pids": int,
    "recipe": Path,
}
LISTS = ("option", "env", "upload", "download")
"""Options that may be repeated."""
TIMED_OUT = 124
"""The exit status after a timeout, as in timeout(1)."""


def parse(arguments: Sequence[str]) -> Callable[[], int] | None:
    """The function to call for ``run [OPTION…] -- COMMAND…``; None if the general parser must read it."""
    if arguments[:1] != ["run"] or "--" not in arguments:
        return None
    at = list(arguments).index("--")
    given = _parse_options(arguments[1:at])
    if given is None:
        return None
    timeout, json = given.pop("timeout", None), given.pop("json", False)
    options = SandboxOptions(**given)  # type: ignore[arg-type]
    return partial(run_once, tuple(arguments[at + 1 :]), options, timeout, json)  # type: ignore[arg-type]


def _parse_options(words: Sequence[str]) -> dict[str, object] | None:
    """The options by name, converted to their types; None if the general parser must read them."""
    given: dict[str, object] = {}
    rest = iter(words)
    for word in rest:
        name, sign, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or (name in given and name not in LISTS):
            return None
        if name == "json" and not sign:
            given[name] = True
            continue
        value = value if sign else next(rest, "")
        if not value or value.startswith("-"):
            return None
        if name in LISTS:
            given[name] = (*given.get(name, ()), value)  # type: ignore[misc]
        elif name in TYPES:
            try:
                given[name] = TYPES[name](value)
            except ValueError:
                return None
        else:
            return None
    return given


def run_once(command: tuple[str, ...], options: SandboxOptions, timeout: float | None, json: bool) -> int:
    """Run the command and return its exit status. Raises UsageError, and what the substrate raises."""
    if command and command[0].startswith("-"):
        known = ("--timeout", "--json", *(f"--{field.name}" for field in fields(SandboxOptions)))
        raise unknown_option(command[0].partition("=")[0], known, "dutyfree run")
    if timeout is not None and not timeout > 0:
        raise UsageError(
            f"--timeout must be a number of seconds > 0, not {timeout:g}", remedy="write it as 60 or 0.5"
        )
    return run_async(partial(_run, command, options, timeout, json))


async def _run(command: tuple[str, ...], options: SandboxOptions, timeout: float | None, json: bool) -> int:
    environment = options.environment()
    async with open_sandbox(options) as sandbox:
        command = command or _image_command(sandbox)
        if json or not isinstance(sandbox, Streaming):
            seen = await sandbox.exec(
                command,
                cwd=options.cwd,
                env=environment,
                stdin=await console.read_all(),
                timeout=timeout,
                user=options.user,
            )
            if json:
                console.print_json(_as_json(sandbox, seen))
            else:
                await console.write(sys.stdout, seen.stdout)
                await console.write(sys.stderr, seen.stderr)
        else:
            seen = await _stream(sandbox, command, options, environment, timeout)
        status = TIMED_OUT if seen.timed_out else seen.exit_code
        if seen.timed_out and timeout is not None:
            console.say(f"dutyfree: the command was killed after {timeout:g} s (--timeout)")
        try:
            await download_files(sandbox, options)
        except UsageError as error:
            if not status:
                raise
            console.say(f"dutyfree: {error.message}")  # the command failed too, and its status counts
    return status


def _image_command(sandbox: Sandbox) -> tuple[str, ...]:
    """The entry point and command of the image. Raises UsageError."""
    if isinstance(sandbox, Programmed) and sandbox.program:
        return sandbox.program
    raise UsageError(
        "there is no command to run, and the image names none",
        remedy="name it after --: dutyfree run -- ls -l",
    )


async def _stream(
    sandbox: Streaming,
    command: tuple[str, ...],
    options: SandboxOptions,
    environment: dict[str, str],
    timeout: float | None,
) -> Observation:
    """Write the output as it comes. Give the input as it comes too, if the substrate can take it so."""
    run = partial(
        sandbox.stream, command, cwd=options.cwd, env=environment, timeout=timeout, user=options.user
    )
    try:
        return await _write_output(run(stdin=console.read()))
    except ArgumentError:  # raised before the command starts: this substrate may take bytes only
        return await _write_output(run(stdin=await console.read_all()))


async def _write_output(items: AsyncIterator[Chunk | Observation]) -> Observation:
    seen = Observation(exit_code=0)
    async with aclosing(items) as items:  # type: ignore[type-var]
        async for item in items:
            if isinstance(item, Chunk):
                await console.write(sys.stdout if item.stream == "stdout" else sys.stderr, item.data)
            else:
                seen = item
    # If the program could not be started, the observation says why.
    await console.write(sys.stderr, seen.stderr)
    return seen


def _as_json(sandbox: Sandbox, seen: Observation) -> dict[str, Any]:
    text = {"stdout": seen.stdout, "stderr": seen.stderr}
    return {
        **msgspec.to_builtins(seen),
        **{name: data.decode(errors="backslashreplace") for name, data in text.items()},
        "spans": _spans(seen.spans),
        "sandbox": {"id": sandbox.id, "spans": _spans(sandbox.spans)},
    }


def _spans(spans: Sequence[Span]) -> list[dict[str, object]]:
    return [{"name": span.name, "start": span.start, "seconds": span.seconds} for span in spans]
