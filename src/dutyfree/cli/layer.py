"""``dutyfree layer``: layers of recipes and named snapshots, on this machine and between machines."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter

import dutyfree
from dutyfree import layers, recipes
from dutyfree.cli import console, option_values, progress
from dutyfree.cli.progress import LayerBars
from dutyfree.cli.sandbox_options import SandboxOptions
from dutyfree.cli.signals import run_async, run_blocking
from dutyfree.contract import Recipe
from dutyfree.contract.errors import UsageError
from dutyfree.engine.layers.disk_bridge import MAX_CHAIN
from dutyfree.substrates.native import Native

layer = App(name="layer")


@layer.command
def build(recipe: Path, /, *, option: tuple[str, ...] = ()) -> int:
    """Build the stages of a recipe that are not built yet, and show what each one took.

    Each command is printed on standard error when it starts. The exit status is 1 if a stage was not stored,
    for example because the disk is full.

    For example:

        dutyfree layer build recipe.toml
        dutyfree layer build recipe.toml --option 'peers=["https://node-1:7800"]' --option longest_stage=600

    Parameters
    ----------
    recipe
        A TOML file (docs/recipes.md).
    option
        NAME=VALUE: an option of the substrate native. May be repeated.
    """
    loaded = recipes.load(recipe)
    if not loaded.stages:
        raise UsageError(f"{recipe} has no stages: there is nothing to build")
    with progress.stage_log():
        run_async(partial(_build, loaded, SandboxOptions(option=option)))
    known = {kept.recipe: kept for kept in layers.ls()}
    found = [known.get(key) for key in loaded.keys()[1:]]
    for stage, kept in zip(loaded.stages, found, strict=True):
        text = "not stored on disk: see docs/recipes.md" if kept is None else _describe(kept)
        console.show(f"{stage.kind:<12} {text}")
    return 1 if None in found[:MAX_CHAIN] else 0


async def _build(recipe: Recipe, options: SandboxOptions) -> None:
    async with dutyfree.open("native", **options.substrate_options()) as native:
        assert isinstance(native, Native)
        await native.prepare(recipe)
        for source, figures in native.peers.items():
            if figures.layers:
                console.say(f"{console.layers(figures.layers)} fetched from {source}")


def _describe(kept: layers.LayerEntry) -> str:
    commit = f", at {kept.commit}" if kept.commit else ""
    return f"{_digits(kept)}  {console.size(kept.size)}, took {kept.seconds:.1f} s{commit}"


@layer.command(name="ls")
def list_(*, json: bool = False) -> int:
    """List the layers of recipes and snapshots, as trees: each image, and the layers that were built on it.

    On a terminal, long commands are cut at its width. In a pipe they are complete.

    Parameters
    ----------
    json
        Print JSON on standard output, with complete keys and commits.
    """
    found = layers.ls()
    if json:
        console.print_json([msgspec.to_builtins(kept) for kept in found])
    elif not found:
        console.say("there are no layers: 'dutyfree layer build' builds those of a recipe")
    else:
        heads = ("layer", "kind", "size", "took", "built", "used", "command")
        console.table(heads, _tree(found), right=(2, 3), cut=True)
    return 0


def _tree(found: Sequence[layers.LayerEntry]) -> Iterator[tuple[str, ...]]:
    """Rows: each image, and below it the layers that were built on it."""
    children_of: dict[tuple[str, str, str], list[layers.LayerEntry]] = {}
    for kept in found:
        children_of.setdefault((kept.image, kept.identity, kept.parent), []).append(kept)

    def branch(image: str, identity: str, parent: str, indent: str) -> Iterator[tuple[str, ...]]:
        children = children_of.get((image, identity, parent), [])
        for kept in children:
            is_last = kept is children[-1]
            yield _row(kept, indent + ("└─ " if is_last else "├─ "))
            yield from branch(image, identity, kept.key, indent + ("   " if is_last else "│  "))

    for image, identity in dict.fromkeys((kept.image, kept.identity) for kept in found):
        yield (f"{image} ({re.split('[: ]', identity)[-1][:12]})", *[""] * 6)
        yield from branch(image, identity, "", "")


def _row(kept: layers.LayerEntry, indent: str) -> tuple[str, ...]:
    used = "in use" if kept.in_use else f"{console.age(time.time() - kept.used)} ago"
    return (
        indent + _digits(kept),
        kept.kind,
        console.size(kept.size),
        f"{kept.seconds:.1f} s",
        f"{console.age(time.time() - kept.made)} ago",
        used,
        "; ".join(kept.commands) or (f"at {kept.commit}" if kept.commit else ""),
    )


@layer.command
def export(
    what: tuple[str, ...],
    /,
    *,
    to: Annotated[str, Parameter(allow_leading_hyphen=True)],
    image: Annotated[bool, Parameter(negative="--no-image")] = True,
) -> int:
    """Write layers with all layers below them to an archive, or add them to a directory.

    The archive is an OCI layout: with its image, other tools can use it as an image. In a directory, only
    missing layers are written, so one directory can serve many recipes and many machines.

    Parameters
    ----------
    what
        Recipe files, digits from 'dutyfree layer ls', or snapshot:NAME.
    to
        A file; a directory (an existing one, or a name that ends in "/"); or "-" for standard output.
    image
        --no-image leaves out the layers of the image. The other machine must have the image.
    """
    done = run_blocking(lambda cancel: layers.export(_parse_names(what), to, image=image, cancel=cancel))
    for name, digest in zip(done.names, done.digests, strict=True):
        console.say(f"{name} ({digest})")
    console.say(f"{console.size(done.size)} written to {'standard output' if to == '-' else to}")
    return 0


@layer.command(name="import")
def import_(
    source: Annotated[str, Parameter(allow_leading_hyphen=True)],
    what: tuple[str, ...] = (),
    /,
    *,
    digest: str | None = None,
    largest: str | None = None,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False,
) -> int:
    """Import layers from another machine. Only layers that are missing here are copied.

    Each layer is verified by its digest. After an interruption, import again: complete layers are not copied
    again. The digest does not prove that a layer contains what its recipe builds, so import only from
    machines that you trust as you would trust an image.

    Parameters
    ----------
    source
        An archive or a directory from 'dutyfree layer export' ("-" for standard input); the cache directory
        of another machine; or https://HOST:PORT, where 'dutyfree serve' listens. The token for a server is in
        DUTYFREE_PEER_TOKEN, in the file that DUTYFREE_PEER_TOKEN_FILE names, or from 'docker login'.
    what
        Recipe files, complete keys, or snapshot:NAME. Default for an export: everything in it.
    digest
        Refuse an export with another digest than this one, which 'dutyfree layer export' printed.
    largest
        Refuse layers that unpack to more than this many bytes. Default: 64G.
    quiet
        Show no progress.
    """
    limit = option_values.size(largest, "--largest")
    with LayerBars(quiet) as bars:
        fetched = run_blocking(
            lambda cancel: layers.bring(
                source, _parse_names(what), digest=digest, largest=limit, progress=bars.show, cancel=cancel
            )
        )
    for done in fetched:
        copied = (
            f"{console.layers(done.layers)}, {console.size(done.size)}" if done.layers else "complete already"
        )
        console.show(f"{done.chain.name}: {copied}")
    return 0


@layer.command(name="rm")
def remove(what: tuple[str, ...], /) -> int:
    """Remove named snapshots, and layers of stages. A stage is built again when a recipe needs it.

    Parameters
    ----------
    what
        snapshot:NAME, digits from 'dutyfree layer ls', or recipe files (their last stage).
    """
    for name in layers.remove(_parse_names(what)):
        console.show(f"removed {name}")
    return 0


def _parse_names(what: tuple[str, ...]) -> list[layers.What]:
    """Load what is a recipe file; pass on what is a key or a snapshot."""
    return [recipes.load(Path(one)) if one.endswith(".toml") else one for one in what]


def _digits(kept: layers.LayerEntry) -> str:
    return kept.name if kept.name != kept.key else kept.key.partition(":")[2][:12]
