"""Options of ``dutyfree run`` and ``dutyfree shell`` that describe the sandbox, and opening that sandbox."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dutyfree
from dutyfree.cli import console, option_values, progress
from dutyfree.contract import Limits, Recipe, Sandbox, limited
from dutyfree.contract.errors import PathNotFound, UsageError


@dataclass(frozen=True, kw_only=True)
class SandboxOptions:
    """The sandbox to open, and what to copy in and out.

    Parameters
    ----------
    substrate
        Where the sandbox runs. 'dutyfree substrates' lists the names.
    image
        The image that it starts from: a name as in Docker; on native also a path, or snapshot:NAME
        (docs/images.md). The default depends on the substrate.
    recipe
        A TOML file instead of --image (docs/recipes.md). Stages that are not built yet are built first.
    option
        NAME=VALUE: an option of the substrate. May be repeated.
    cpus
        Maximum number of processors, such as 0.5.
    memory
        Maximum memory in bytes, such as 512M.
    pids
        Maximum number of processes.
    disk
        Maximum number of bytes written, such as 1G.
    network
        "on", "off", or a list of what the sandbox may reach, such as "example.org:443,10.0.0.0/8".
    user
        Run as this user of the sandbox.
    cwd
        Run in this directory of the sandbox.
    env
        NAME=VALUE: an environment variable. May be repeated.
    upload
        SOURCE:TARGET: copy a file or directory into the sandbox before the command. May be repeated.
    download
        SOURCE:TARGET: copy a file or directory out of the sandbox after the command. May be repeated.
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
        given = {
            "cpus": self.cpus,
            "memory": option_values.size(self.memory, "--memory"),
            "pids": self.pids,
            "disk": option_values.size(self.disk, "--disk"),
            "network": _network(self.network),
        }
        return limited({name: value for name, value in given.items() if value is not None}, Limits())

    def start_recipe(self) -> Recipe:
        """The recipe that the sandbox starts from. Raises UsageError."""
        if self.recipe is None:
            return Recipe(image=option_values.image(self.image))
        if self.image is not None:
            raise UsageError(
                "--image and --recipe exclude each other", remedy=f"name the image in {self.recipe}"
            )
        return dutyfree.recipes.load(self.recipe)

    def environment(self) -> dict[str, str]:
        return dict(option_values.pairs(self.env, "--env", "="))

    def uploads(self) -> list[tuple[str, str]]:
        return option_values.pairs(self.upload, "--upload", ":")

    def downloads(self) -> list[tuple[str, str]]:
        return option_values.pairs(self.download, "--download", ":")

    def substrate_options(self) -> dict[str, Any]:
        pairs = option_values.pairs(self.option, "--option", "=")
        return {name: option_values.value(text) for name, text in pairs}


MAX_LINKS_SHOWN = 5
"""How many of the links that a download skipped are named."""


def _network(text: str | None) -> str | list[str] | None:
    """A network policy: "on", "off", or a list. Raises UsageError."""
    if text is None or text in ("on", "off"):
        return text
    # Every entry of a list contains one of these characters, or is "host".
    if not (set(",.:/*") & set(text) or text == "host"):
        raise UsageError(
            f"--network {text!r} is not a network policy",
            remedy='write "on", "off", or a list: example.org:443,10.0.0.0/8',
        )
    return text.split(",")


@asynccontextmanager
async def open_sandbox(options: SandboxOptions) -> AsyncIterator[Sandbox]:
    """Open a sandbox and copy the uploads into it. Raises UsageError, and what the substrate raises."""
    limits, uploads, recipe = options.limits(), options.uploads(), options.start_recipe()
    options.downloads()  # report a mistake in them before anything runs
    async with AsyncExitStack() as stack:
        # If standard error is not a terminal, only the command writes to it.
        with progress.stage_log() if sys.stderr.isatty() else nullcontext():
            opening = dutyfree.open(options.substrate, **options.substrate_options())
            substrate = await stack.enter_async_context(opening)
            sandbox = await stack.enter_async_context(substrate.sandbox(recipe, limits=limits))
        for source, target in uploads:
            with _copy_errors("--upload", source, target):
                await sandbox.upload(Path(source), target)
        yield sandbox


async def download_files(sandbox: Sandbox, options: SandboxOptions) -> None:
    """Copy the downloads out. Raises UsageError for a missing file, and what the substrate raises."""
    for source, target in options.downloads():
        with _copy_errors("--download", source, target):
            try:
                skipped = await sandbox.download(source, Path(target))
            except PathNotFound as error:
                start = "" if source.startswith("/") else f"a relative path starts at {sandbox.workdir}"
                raise UsageError(
                    f"--download {source}:{target}: there is no {source} in the sandbox", remedy=start
                ) from error
        if skipped:
            names = ", ".join(skipped[:MAX_LINKS_SHOWN]) + ("" if len(skipped) <= MAX_LINKS_SHOWN else ", …")
            console.say(
                f"dutyfree: --download {source}:{target} skipped {len(skipped)} links that point outside: "
                f"{names}"
            )


@contextmanager
def _copy_errors(option: str, source: str, target: str) -> Iterator[None]:
    """Turn an OSError into a UsageError that names the copy."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{option} {source}:{target}: {error.strerror or error}") from error
