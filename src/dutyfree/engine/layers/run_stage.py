"""Run the stages of a recipe in a sandbox, on any substrate; refuse what a substrate does not support."""

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
"""Bytes of a failed command's output in its error."""

HIDDEN = b"(secret)"

SHORTEST = 4
"""A single line of a secret is hidden if it has this many characters: shorter ones occur in any text."""

LOGS, LOG_BYTES = 100, 64 << 20
"""How many logs of failed stages are kept, the newest ones, and how many bytes of all together."""

SHOWN = 100
"""Characters of a command in a progress message."""

_log = logging.getLogger(__name__)

_COMMIT = re.compile(rb"[0-9a-f]{40}([0-9a-f]{24})?")


async def apply(sandbox: Sandbox, stage: Stage, number: int, seconds: float | None = None) -> str:
    """Copy the stage's files in, then run its commands. Returns the commit of a cloned repository, or "".

    ``seconds`` is the timeout of all commands together. Raises StageError with the stage, its number in the
    recipe (from 1), the command, its last output, and the path of a log with all output.
    """
    secrets = secrets_of(stage, number)
    for path, source in sorted(stage.files.items()):  # in the order of the key: one may be inside another
        try:
            real = await anyio.to_thread.run_sync(os.path.realpath, source)
            await sandbox.upload(Path(real), path)
        except (OSError, ActionError) as error:
            raise StageError(f"stage {stage.kind!r}: cannot copy {source}: {error}", number=number) from error
    log: list[bytes] = []
    output = b""
    end = None if seconds is None else perf_counter() + seconds
    for command in stage.commands:
        left = None if end is None else max(0.001, end - perf_counter())
        text = command if isinstance(command, str) else " ".join(command)
        _log.info("stage %d, %s: %s", number, stage.kind, textwrap.shorten(text, SHOWN, placeholder=" …"))
        try:
            seen = await sandbox.exec(command, env=secrets or None, timeout=left)
        except ActionError as error:  # no agent has run here yet, so the recipe is at fault
            raise StageError(
                f"stage {stage.kind!r}: {command!r}: {error.message}", number=number, command=text
            ) from error
        log.append(_record(command, seen, secrets))
        output = seen.stdout.strip()
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
    return output.decode() if stage.kind == "repository" and _COMMIT.fullmatch(output) else ""


async def apply_all(sandbox: Sandbox, recipe: Recipe) -> None:
    """Run all stages of a recipe, in order. Raises StageError."""
    for number, stage in enumerate(recipe.stages, 1):
        await apply(sandbox, stage, number)


def _tail(seen: Observation, secrets: Mapping[str, str]) -> str:
    """The end of both output streams: many tools warn on one and fail on the other."""
    streams = [hide(stream, secrets).strip() for stream in (seen.stderr, seen.stdout) if stream.strip()]
    return b"\n".join(one[-TAIL // len(streams) :] for one in streams).decode(errors="replace").strip()


def _hint(sandbox: Sandbox, tail: str) -> str:
    """The remedy for a common mistake, or ""."""
    if "onnect" in tail and _LOOPBACK.search(tail) and isinstance(sandbox, NetworkControl):
        from dutyfree.engine.launcher.network_policy import HOST

        return f"a sandbox has its own loopback; this machine's loopback is {HOST} there (docs/network.md)"
    return next((hint for text, hint in _HINTS if text in tail), "")


_LOOPBACK = re.compile(r"\b127\.0\.0\.1\b|\blocalhost\b|\[?::1\b")

_HINTS = (
    ("externally-managed-environment", "install into a virtual environment (docs/training.md)"),
    (
        "does not appear to be a git repository",
        "copy a repository of this machine in by its path, do not clone it",
    ),
    ("can't cd to ", "a stage before this one must create the directory"),
    ("lock-frontend - open (2:", "packages cannot be installed in the image host: use another image"),
)


def refuse_services(recipe: Recipe | None, substrate: str) -> None:
    """Raises CreateError if the recipe has services; for substrates without them."""
    if recipe is not None and recipe.services:
        names = ", ".join(service.name for service in recipe.services)
        raise CreateError(f"{substrate} cannot run services, and the recipe has {names}", remedy="use native")


def refuse(
    substrate: str, recipe: Recipe | None, limits: Limits | None = None, network: Sequence[str] = ()
) -> None:
    """Raises CreateError for an image, a service, a limit or isolation; for substrates without these.

    ``network`` lists the network policies that the substrate supports.
    """
    refuse_services(recipe, substrate)
    if recipe is not None and recipe.image not in (None, "host"):
        raise CreateError(
            f"{substrate} cannot use images, and the recipe has {recipe.image!r}",
            remedy="leave the recipe's image out",
        )
    if recipe is not None and recipe.isolation is not None:
        raise CreateError(
            f"{substrate} isolates nothing, and the recipe asks for isolation", remedy="use native or docker"
        )
    limits = limited(limits, Limits())
    refused = [name for name in ("cpus", "memory", "pids", "disk") if getattr(limits, name) is not None]
    if limits.network is not None and limits.network not in network:
        refused.append("network")
    if refused:
        raise CreateError(
            f"{substrate} cannot limit {', '.join(refused)}",
            remedy="leave it out, or use a substrate that isolates",
        )


def secrets_of(stage: Stage, number: int) -> dict[str, str]:
    """The secrets of a stage, from the environment of this process. Raises StageError if one is missing."""
    missing = [name for name in stage.secrets if name not in os.environ]
    if missing:
        raise StageError(
            f"stage {stage.kind!r} needs the secret {', '.join(missing)}",
            remedy="set it in the environment of this program",
            number=number,
        )
    return {name: os.environ[name] for name in stage.secrets}


def _record(command: str | tuple[str, ...], seen: Observation, secrets: Mapping[str, str]) -> bytes:
    text = f"$ {command}\n".encode() + seen.stdout + seen.stderr
    return hide(text, secrets) + f"\n(ended with {seen.exit_code} after {seen.seconds:.1f} s)\n".encode()


def hide(text: bytes, secrets: Mapping[str, str]) -> bytes:
    """Replace the values of secrets, and each line of a value with several lines."""
    values = [value for value in secrets.values() if value]
    lines = [line.strip() for value in values for line in value.splitlines()]
    parts = {*values, *(line for line in lines if len(line) >= SHORTEST)}
    # The longest first: if one begins with another, the rest of it would stay visible.
    for part in sorted(parts, key=len, reverse=True):
        text = text.replace(os.fsencode(part), HIDDEN)
    return text


def _keep(log: bytes) -> Path | None:
    """Write the output of a failed stage to a log that only this user can read. Returns its path."""
    try:
        directory = paths.cache() / "logs"
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, name = tempfile.mkstemp(dir=directory, prefix="stage-", suffix=".log")
        with open(descriptor, "wb") as file:
            file.write(log[-LOG_BYTES:])
    except (OSError, UsageError):
        return None  # the error has the end of the output
    with contextlib.suppress(OSError):  # another process may remove the same ones
        _remove_old(directory, Path(name))
    return Path(name)


def _remove_old(directory: Path, newest: Path) -> None:
    """Remove old logs: a stage that fails again and again must not fill the disk."""
    found = [(path.stat(), path) for path in directory.glob("stage-*.log")]
    # Logs of the same tick of the kernel's clock have the same time.
    found.sort(key=lambda one: (one[1] == newest, one[0].st_mtime_ns), reverse=True)
    size = 0
    for number, (facts, path) in enumerate(found):
        size += facts.st_size
        if number >= LOGS or (number and size > LOG_BYTES):
            path.unlink(missing_ok=True)


async def tools(sandbox: Sandbox) -> dict[str, str]:
    """Versions and paths of Python and git in a sandbox."""
    facts = {}
    for tool in ("python3", "git"):
        seen = await sandbox.exec(f"command -v {tool} && {tool} --version")
        lines = seen.stdout.decode(errors="replace").split("\n")
        if seen.ok:
            facts[tool.removesuffix("3")] = lines[1].split()[-1]
            facts[f"{tool.removesuffix('3')}_path"] = lines[0]
    return facts
