"""What substrates without images of their own do alike: carry out a stage, tell the tools' versions."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter

import anyio.to_thread

from dutyfree import paths
from dutyfree.contract import Limits, Observation, Recipe, Sandbox, Stage, limited
from dutyfree.contract.abilities import NetworkControl
from dutyfree.contract.errors import ActionError, CreateError, StageError, UsageError

TAIL = 2000
"""Bytes of a failed command's output that its error tells."""

HIDDEN = b"(secret)"

SHORTEST = 4
"""Characters of a line of a secret that is blotted out by itself: shorter ones are in every text."""

LOGS, LOG_BYTES = 100, 64 << 20
"""So many logs of failed stages are kept, and at most so many bytes of them and of each: the last ones."""

SHOWN = 100
"""Characters of a command that progress is told with."""

_log = logging.getLogger(__name__)

_COMMIT = re.compile(rb"[0-9a-f]{40}([0-9a-f]{24})?")


async def apply(sandbox: Sandbox, stage: Stage, number: int, seconds: float | None = None) -> str:
    """Copy the stage's files in, then run its commands. Of a clone, the commit that it says to be at.

    Raises StageError naming the stage, its number in the recipe (from 1), the command, its last output and
    the file that has all of it; also if its commands take more than these seconds.
    """
    secrets = secrets_of(stage, number)
    for path, source in sorted(stage.files.items()):  # as its key has them: one may lie in another
        try:
            real = await anyio.to_thread.run_sync(os.path.realpath, source)
            await sandbox.upload(Path(real), path)
        except (OSError, ActionError) as error:
            raise StageError(f"stage {stage.kind!r}: cannot copy {source}: {error}", number=number) from error
    log: list[bytes] = []
    said = b""
    end = None if seconds is None else perf_counter() + seconds
    for command in stage.commands:
        left = None if end is None else max(0.001, end - perf_counter())
        text = command if isinstance(command, str) else " ".join(command)
        _log.info("stage %d, %s: %s", number, stage.kind, textwrap.shorten(text, SHOWN, placeholder=" …"))
        try:
            seen = await sandbox.exec(command, env=secrets or None, timeout=left)
        except ActionError as error:  # no agent has been here yet: the recipe ended its own sandbox
            raise StageError(
                f"stage {stage.kind!r}: {command!r}: {error.message}", number=number, command=text
            ) from error
        log.append(_record(command, seen, secrets))
        said = seen.stdout.strip()
        if not seen.ok:
            tail = _tail(seen, secrets)
            kept = await anyio.to_thread.run_sync(_keep, b"".join(log))
            where = f"all that it printed is in {kept}" if kept else ""
            how = f"was stopped after {seconds:g} s" if seen.timed_out else f"ended with {seen.exit_code}"
            raise StageError(
                f"stage {stage.kind!r}: {command!r} {how}: {tail}",
                remedy="; ".join(filter(None, (_hint(sandbox, tail), where))),
                number=number,
                command=text,
                output=tail,
            )
    return said.decode() if stage.kind == "repository" and _COMMIT.fullmatch(said) else ""


async def apply_all(sandbox: Sandbox, recipe: Recipe) -> None:
    """Carry out every stage of a recipe, in order. Raises StageError."""
    for number, stage in enumerate(recipe.stages, 1):
        await apply(sandbox, stage, number)


def _tail(seen: Observation, secrets: Mapping[str, str]) -> str:
    """The end of what it printed: of both streams, for many tools warn on one and fail on the other."""
    said = [hide(stream, secrets).strip() for stream in (seen.stderr, seen.stdout) if stream.strip()]
    return b"\n".join(one[-TAIL // len(said) :] for one in said).decode(errors="replace").strip()


def _hint(sandbox: Sandbox, tail: str) -> str:
    """What helps against a mistake that many make."""
    if "onnect" in tail and _LOOPBACK.search(tail) and isinstance(sandbox, NetworkControl):
        from dutyfree.engine.launcher.network_policy import HOST

        return f"a sandbox has a loopback of its own: this machine's is {HOST} in there (docs/network.md)"
    return next((hint for said, hint in _HINTS if said in tail), "")


_LOOPBACK = re.compile(r"\b127\.0\.0\.1\b|\blocalhost\b|\[?::1\b")

_HINTS = (
    ("externally-managed-environment", "install into an environment of its own (docs/training.md)"),
    (
        "does not appear to be a git repository",
        "what lies on this machine is copied in by its path, not cloned",
    ),
    ("can't cd to ", "the stage that brings this directory must come before"),
    ("lock-frontend - open (2:", "the image host takes no packages: name another image"),
)


def refuse_services(recipe: Recipe | None, substrate: str) -> None:
    """For substrates that start no process of a recipe. Raises CreateError."""
    if recipe is not None and recipe.services:
        names = ", ".join(service.name for service in recipe.services)
        raise CreateError(f"{substrate} runs no services, {names} was asked for", remedy="use native")


def refuse(
    substrate: str, recipe: Recipe | None, limits: Limits | None = None, network: Sequence[str] = ()
) -> None:
    """For substrates without images, services and limits of resources; ``network`` lists the policies it has.

    Raises CreateError for a recipe or limits that ask for more.
    """
    refuse_services(recipe, substrate)
    if recipe is not None and recipe.image not in (None, "host"):
        raise CreateError(
            f"{substrate} has no images, {recipe.image!r} was asked for",
            remedy="leave the recipe's image out",
        )
    limits = limited(limits, Limits())
    asked = [name for name in ("cpus", "memory", "pids", "disk") if getattr(limits, name) is not None]
    if limits.network is not None and limits.network not in network:
        asked.append("network")
    if asked:
        raise CreateError(
            f"{substrate} cannot limit {', '.join(asked)}",
            remedy="leave it out, or use a substrate that isolates",
        )


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
    """The text without the secrets' values, and without single lines of those that have several."""
    values = [value for value in secrets.values() if value]
    lines = [line.strip() for value in values for line in value.splitlines()]
    parts = {*values, *(line for line in lines if len(line) >= SHORTEST)}
    # The longest first: what is left of one, once another that it begins with is gone, would be told.
    for part in sorted(parts, key=len, reverse=True):
        text = text.replace(os.fsencode(part), HIDDEN)
    return text


def _keep(log: bytes) -> Path | None:
    """Where a failed stage's output lies; readable by its owner alone."""
    try:
        directory = paths.cache() / "logs"
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, name = tempfile.mkstemp(dir=directory, prefix="stage-", suffix=".log")
        with open(descriptor, "wb") as file:
            file.write(log[-LOG_BYTES:])
    except (OSError, UsageError):
        return None  # the error says the most of it anyway
    with contextlib.suppress(OSError):  # others may do the same
        _forget_old(directory, Path(name))
    return Path(name)


def _forget_old(directory: Path, newest: Path) -> None:
    """What fails again and again, by itself, must not fill the disk."""
    found = [(path.stat(), path) for path in directory.glob("stage-*.log")]
    # Those of one tick of the kernel's clock have the same time.
    found.sort(key=lambda one: (one[1] == newest, one[0].st_mtime_ns), reverse=True)
    size = 0
    for number, (facts, path) in enumerate(found):
        size += facts.st_size
        if number >= LOGS or (number and size > LOG_BYTES):
            path.unlink(missing_ok=True)


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
