"""``dutyfree run``: one command in a fresh sandbox; and what it shares with ``dutyfree shell``."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

import dutyfree
from dutyfree import recipes
from dutyfree.abilities import Chunk, Programmed, Streaming
from dutyfree.cli import amounts, making, standard, unknown_option
from dutyfree.cli.running import run as run_to_the_end
from dutyfree.contract import Limits, Observation, Recipe, Sandbox, limited
from dutyfree.errors import UsageError

TIMED_OUT = 124
"""As timeout(1) has it."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which sandbox, and what of it.

    Parameters
    ----------
    substrate
        Where it runs; 'dutyfree substrates' lists the names.
    image
        What it starts from, the substrate's own by default: a name as Docker takes it, or for native a path
        or snapshot:NAME too (docs/images.md).
    recipe
        A TOML file instead, as docs/recipes.md describes: its stages are made first, if they are not there.
    option
        NAME=VALUE, an option of the substrate; may be repeated.
    cpus
        Processors at most, such as 0.5.
    memory
        Bytes at most, such as 512M.
    pids
        Processes at most.
    disk
        Bytes that may be written, such as 1G.
    network
        "on", "off", or what may be reached, such as "example.org:443,10.0.0.0/8".
    user
        Run as this user of the sandbox.
    cwd
        Run in this directory of it.
    env
        NAME=VALUE for the environment; may be repeated.
    upload
        SOURCE:TARGET, a file or directory that is copied in before; may be repeated.
    download
        SOURCE:TARGET, a file or directory of the sandbox that is copied out afterwards; may be repeated.
    """

    substrate: str = "native"
    image: str | None = None
    recipe: Path | None = None
    option: tuple[str, ...] = ()
    cpus: float | None = None
    memory: str | None = None
    pids: int | None = None
    disk: str | None = None
    network: str | None = None
    user: str | None = None
    cwd: str | None = None
    env: tuple[str, ...] = ()
    upload: tuple[str, ...] = ()
    download: tuple[str, ...] = ()

    def limits(self) -> Limits:
        """Raises UsageError."""
        asked = {
            "cpus": self.cpus,
            "memory": amounts.size(self.memory, "--memory"),
            "pids": self.pids,
            "disk": amounts.size(self.disk, "--disk"),
            "network": _network(self.network),
        }
        return limited({name: value for name, value in asked.items() if value is not None}, Limits())

    def state(self) -> Recipe:
        """What the sandbox starts from. Raises UsageError."""
        if self.recipe is None:
            return Recipe(image=amounts.image(self.image))
        if self.image is not None:
            raise UsageError("--recipe names the image too", remedy=f"write it into {self.recipe}")
        return recipes.load(self.recipe)

    def environment(self) -> dict[str, str]:
        return dict(amounts.pairs(self.env, "--env", "="))

    def downloads(self) -> list[tuple[str, str]]:
        return amounts.pairs(self.download, "--download", ":")

    def options(self) -> dict[str, Any]:
        return {name: amounts.value(text) for name, text in amounts.pairs(self.option, "--option", "=")}


SHOWN = 5
"""So many links that a download left out are named."""


def _network(text: str | None) -> str | list[str] | None:
    """A list has something in it that a word for a state has not; or it names this machine alone.

    Raises UsageError.
    """
    if text is None or text in ("on", "off"):
        return text
    if not (set(",.:/*") & set(text) or text == "host"):
        raise UsageError(
            f"--network {text!r} is no policy",
            remedy='write "on", "off", or a list: example.org:443,10.0.0.0/8',
        )
    return text.split(",")


@asynccontextmanager
async def opened(wanted: Wanted) -> AsyncIterator[Sandbox]:
    """A sandbox with its uploads in place.

    Raises UsageError, and what the substrate raises.
    """
    limits = wanted.limits()
    uploads = amounts.pairs(wanted.upload, "--upload", ":")
    wanted.downloads()  # so that nothing has run in vain
    recipe = wanted.state()
    async with AsyncExitStack() as held:
        with making.told() if sys.stderr.isatty() else nullcontext():  # else it is the command's alone
            substrate = await held.enter_async_context(dutyfree.open(wanted.substrate, **wanted.options()))
            sandbox = await held.enter_async_context(substrate.sandbox(recipe, limits=limits))
        for source, target in uploads:
            with _naming("--upload", source, target):
                await sandbox.upload(Path(source), target)
        yield sandbox


async def fetch(sandbox: Sandbox, wanted: Wanted) -> None:
    """Its downloads. Raises UsageError for what is not there, and what the substrate raises."""
    for source, target in wanted.downloads():
        with _naming("--download", source, target):
            left_out = await sandbox.download(source, Path(target))
        if left_out:
            shown = ", ".join(left_out[:SHOWN]) + ("" if len(left_out) <= SHOWN else ", …")
            standard.say(f"dutyfree: {target} is without {len(left_out)} links that lead outside: {shown}")


def run(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    wanted: Wanted = Wanted(),  # noqa: B008 (frozen)
    timeout: float | None = None,
    json: bool = False,
) -> int:
    """Run one command in a fresh sandbox.

    What it prints comes as it comes, on the same streams; a pipe or a file given as standard input is
    its input. The exit status is the command's own, 128 + n if signal n killed it, 124 if its time was
    up. Ctrl-C ends it. Nothing of the sandbox is left.

    For example:

        dutyfree run -- python3 -c "print(1)"
        dutyfree run --image debian:12 --memory 512M --timeout 60 -- sh -c "df /"
        dutyfree run --upload .:/src --cwd /src --download /src/out:out -- make
        dutyfree run --recipe recipe.toml --cwd repository -- python3 -m pytest
        dutyfree run --network example.org:443 -- curl https://example.org
        echo "print(1)" | dutyfree run --json -- python3

    Parameters
    ----------
    command
        The program and its arguments, after "--"; without a shell. By default what the image itself runs,
        its entry point and command.
    timeout
        Seconds after which its whole process tree is killed.
    json
        Print what was observed, with where the time went, as JSON on standard output instead.
    """
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


class _naming:  # noqa: N801 (used as a with statement's word)
    """Says of a failed copy which one it was."""

    def __init__(self, option: str, source: str, target: str) -> None:
        self._asked = f"{option} {source}:{target}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise UsageError(f"{self._asked}: {error.strerror or error}") from error
