"""What substrates without images of their own do alike: carry out a stage, tell the tools' versions."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

import anyio.to_thread

from dutyfree import paths
from dutyfree.contract import Observation, Recipe, Sandbox, Stage
from dutyfree.errors import CreateError, StageError

TAIL = 2000
"""Bytes of a failed command's output that its error tells."""

LOGS = 100
"""Of failed stages, which are kept: the last ones."""

HIDDEN = b"(secret)"

_COMMIT = re.compile(rb"[0-9a-f]{40}([0-9a-f]{24})?")


async def apply(sandbox: Sandbox, stage: Stage, number: int) -> str:
    """Copy the stage's files in, then run its commands. Of a clone, the commit that it says to be at.

    Raises StageError naming the stage, its number in the recipe (from 1), the command, its last output and
    the file that has all of it.
    """
    secrets = secrets_of(stage, number)
    for path, source in stage.files.items():
        try:
            await sandbox.upload(source, path)
        except OSError as error:
            raise StageError(f"stage {stage.kind!r}: cannot copy {source}: {error}", number=number) from error
    log: list[bytes] = []
    said = b""
    for command in stage.commands:
        seen = await sandbox.exec(command, env=secrets or None)
        log.append(_record(command, seen, secrets))
        said = seen.stdout.strip()
        if not seen.ok:
            tail = hide(seen.stderr or seen.stdout, secrets)[-TAIL:].decode(errors="replace").strip()
            kept = await anyio.to_thread.run_sync(_keep, b"".join(log))
            raise StageError(
                f"stage {stage.kind!r}: {command!r} ended with {seen.exit_code}: {tail}",
                remedy=f"all that it printed is in {kept}" if kept else "",
                number=number,
                command=command if isinstance(command, str) else " ".join(command),
                output=tail,
            )
    return said.decode() if stage.kind == "repository" and _COMMIT.fullmatch(said) else ""


def refuse_services(recipe: Recipe | None, substrate: str) -> None:
    """For substrates that start no process of a recipe. Raises CreateError."""
    if recipe is not None and recipe.services:
        names = ", ".join(service.name for service in recipe.services)
        raise CreateError(f"{substrate} runs no services, {names} was asked for", remedy="use native")


def secrets_of(stage: Stage, number: int) -> dict[str, str]:
    """The variables that the stage's commands get from this process's environment. Raises StageError."""
    missing = [name for name in stage.secrets if name not in os.environ]
    if missing:
        raise StageError(
            f"stage {stage.kind!r} wants the secret {', '.join(missing)}",
            remedy="set it in the environment of this program",
            number=number,
        )
    return {name: os.environ[name] for name in stage.secrets}


def _record(command: str | tuple[str, ...], seen: Observation, secrets: Mapping[str, str]) -> bytes:
    said = f"$ {command}\n".encode() + seen.stdout + seen.stderr
    return hide(said, secrets) + f"\n(ended with {seen.exit_code} after {seen.seconds:.1f} s)\n".encode()


def hide(text: bytes, secrets: Mapping[str, str]) -> bytes:
    """The text without the secrets' values."""
    for value in secrets.values():
        if value:
            text = text.replace(os.fsencode(value), HIDDEN)
    return text


def _keep(log: bytes) -> Path | None:
    """Where a failed stage's output lies; readable by its owner alone."""
    directory = paths.cache() / "logs"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, name = tempfile.mkstemp(dir=directory, prefix="stage-", suffix=".log")
        with open(descriptor, "wb") as file:
            file.write(log)
    except OSError:
        return None  # the error says the most of it anyway
    with contextlib.suppress(OSError):  # others may do the same
        logs = sorted(directory.glob("stage-*.log"), key=lambda path: path.stat().st_mtime_ns)
        for old in logs[:-LOGS]:
            old.unlink()
    return Path(name)


async def tools(sandbox: Sandbox) -> dict[str, str]:
    """The versions and paths of Python and git, as facts."""
    facts = {}
    for tool in ("python3", "git"):
        seen = await sandbox.exec(f"command -v {tool} && {tool} --version")
        lines = seen.stdout.decode(errors="replace").split("\n")
        if seen.ok:
            facts[tool.removesuffix("3")] = lines[1].split()[-1]
            facts[f"{tool.removesuffix('3')}_path"] = lines[0]
    return facts
