"""Which sandbox ``dutyfree run`` and ``dutyfree shell`` are to open, and opening it."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dutyfree
from dutyfree.cli import amounts, making, standard
from dutyfree.contract import Limits, Recipe, Sandbox, limited
from dutyfree.contract.errors import UsageError


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
        return dutyfree.recipes.load(self.recipe)

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
            standard.say(f"dutyfree: left {len(left_out)} links that lead outside out of {target}: {shown}")


class _naming:  # noqa: N801 (used as a with statement's word)
    """Says of a failed copy which one it was."""

    def __init__(self, option: str, source: str, target: str) -> None:
        self._asked = f"{option} {source}:{target}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise UsageError(f"{self._asked}: {error.strerror or error}") from error
