"""``dutyfree layer``: recipes that were made and snapshots with names, here and between machines."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import App, Parameter

from dutyfree import layers
from dutyfree.cli import amounts, blocking, making, standard
from dutyfree.cli.amounts import shown
from dutyfree.cli.bars import Bars
from dutyfree.contract.errors import UsageError

if TYPE_CHECKING:
    from dutyfree.cli.sandbox_options import Wanted
    from dutyfree.contract import Recipe
    from dutyfree.engine.store.cancel import CancelToken

layer = App(name="layer")


@layer.command
def build(recipe: Path, /, *, option: tuple[str, ...] = ()) -> int:
    """Make every stage of a recipe that is not there yet, and say what each took.

    Commands are told on standard error as they begin. The exit status is 1 if a stage was not kept, such as
    on a full disk.

    For example:

        dutyfree layer build recipe.toml
        dutyfree layer build recipe.toml --option 'peers=["tcp://node-1:7400"]' --option longest_stage=600

    Parameters
    ----------
    recipe
        A TOML file, as docs/recipes.md describes.
    option
        NAME=VALUE, an option of the substrate native; may be repeated.
    """
    from dutyfree import recipes
    from dutyfree.cli.running import run
    from dutyfree.cli.sandbox_options import Wanted
    from dutyfree.engine.layers.disk_bridge import DEEPEST

    wanted = recipes.load(recipe)
    if not wanted.stages:
        raise UsageError(f"{recipe} has no stages: there is nothing to build")
    with making.told():
        run(partial(_build, wanted, Wanted(option=option)))
    known = {kept.recipe: kept for kept in layers.ls()}
    found = [known.get(key) for key in wanted.keys()[1:]]
    for stage, kept in zip(wanted.stages, found, strict=True):
        told = "not kept on the disk: see docs/recipes.md" if kept is None else _told(kept)
        standard.show(f"{stage.kind:<12} {told}")
    return 1 if None in found[:DEEPEST] else 0


async def _build(recipe: Recipe, wanted: Wanted) -> None:
    import dutyfree
    from dutyfree.substrates.native import Native

    async with dutyfree.open("native", **wanted.options()) as native:
        assert isinstance(native, Native)
        await native.prepare(recipe)
        for source, figures in native.peers.items():
            if figures.layers:
                standard.say(f"{figures.layers} layers came from {source}")


def _told(kept: layers.LayerEntry) -> str:
    commit = f", at {kept.commit}" if kept.commit else ""
    return f"{_digits(kept)}  {shown(kept.size)}, took {kept.seconds:.1f} s{commit}"


@layer.command(name="ls")
def list_(*, json: bool = False) -> int:
    """List the layers of recipes and snapshots that are kept, as trees: an image, and what stands on it.

    On a terminal long commands are cut at its width; a pipe gets them whole.

    Parameters
    ----------
    json
        Print JSON on standard output: also the whole keys, and commits.
    """
    found = layers.ls()
    if json:
        standard.tell([msgspec.to_builtins(kept) for kept in found])
    elif not found:
        standard.say("no layer is kept: 'dutyfree layer build' makes those of a recipe")
    else:
        heads = ("layer", "kind", "size", "took", "made", "used", "command")
        standard.table(heads, _tree(found), right=(2, 3), cut=True)
    return 0


def _tree(found: Sequence[layers.LayerEntry]) -> Iterator[tuple[str, ...]]:
    """Rows: each image, and below it what stands on it."""
    upon: dict[tuple[str, str, str], list[layers.LayerEntry]] = {}
    for kept in found:
        upon.setdefault((kept.image, kept.identity, kept.parent), []).append(kept)

    def branch(image: str, identity: str, parent: str, indent: str) -> Iterator[tuple[str, ...]]:
        children = upon.get((image, identity, parent), [])
        for kept in children:
            is_last = kept is children[-1]
            yield _row(kept, indent + ("└─ " if is_last else "├─ "))
            yield from branch(image, identity, kept.key, indent + ("   " if is_last else "│  "))

    for image, identity in dict.fromkeys((kept.image, kept.identity) for kept in found):
        yield (f"{image} ({re.split('[: ]', identity)[-1][:12]})", *[""] * 6)
        yield from branch(image, identity, "", "")


def _row(kept: layers.LayerEntry, indent: str) -> tuple[str, ...]:
    used = "in use" if kept.in_use else f"{amounts.age(time.time() - kept.used)} ago"
    return (
        indent + _digits(kept),
        kept.kind,
        shown(kept.size),
        f"{kept.seconds:.1f} s",
        f"{amounts.age(time.time() - kept.made)} ago",
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
    """Write layers, with all that they stand on, to one archive, or add them to a directory.

    The archive is an OCI layout: with its image it is an image to every other tool, too. In a directory only
    what is missing there is written, so that one can serve many recipes, and many machines.

    Parameters
    ----------
    what
        Recipes' files, digits, or snapshot:NAME.
    to
        A file; a directory (one that is there, or a name that ends in "/"); or "-" for standard output.
    image
        With --no-image the image's own layers are left out: the other machine must have it.
    """
    done = blocking.run(lambda cancel: layers.export(_meant(what), to, image=image, cancel=cancel))
    for name, digest in zip(done.names, done.digests, strict=True):
        standard.say(f"{name} ({digest})")
    standard.say(f"{shown(done.size)} written to {'standard output' if to == '-' else to}")
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
    """Take layers from another machine: what is missing here of them.

    All is verified by its digest before it has a name. What came before an interruption is not fetched again.
    What a layer holds is what its maker says: import from whom you would take an image.

    Parameters
    ----------
    source
        An archive or a directory of 'dutyfree layer export' ("-" for standard input); the cache directory of
        another machine; tcp://HOST:PORT, where 'dutyfree layer serve --bind' listens; or exec:COMMAND, a
        command that answers as 'dutyfree layer serve' does.
    what
        Recipes' files, whole keys, or snapshot:NAME; of an export by default all that it holds.
    digest
        Refuse an export that is another than this, as 'dutyfree layer export' told it.
    largest
        Refuse what would unpack to more than this: 64G by default.
    quiet
        No progress.
    """
    most = amounts.size(largest, "--largest")
    with Bars(quiet) as bars:
        fetched = blocking.run(
            lambda cancel: layers.bring(
                source, _meant(what), digest=digest, largest=most, progress=bars.show, cancel=cancel
            )
        )
    for done in fetched:
        count = "1 layer" if done.layers == 1 else f"{done.layers} layers"
        came = f"{count}, {shown(done.size)}" if done.layers else "all of it was here"
        standard.show(f"{done.chain.name}: {came}")
    return 0


@layer.command
def serve(*, bind: str | None = None) -> int:
    """Give layers to other machines: who connects to an address, or who is at the other end of a pipe.

    A native engine with the option peers asks by itself before it builds; 'dutyfree layer import' asks once.
    Their source is tcp://HOST:PORT; or, without --bind, exec:COMMAND, where this command ends with its input.

    Other than on the loopback both ends need the same token, in DUTYFREE_PEER_TOKEN or in the file that
    DUTYFREE_PEER_TOKEN_FILE names. It is never sent; what is sent is verified, but not encrypted.

    Parameters
    ----------
    bind
        HOST:PORT to listen at, until Ctrl-C; port 0 is any that is free.
    """
    from dutyfree.engine.exchange import messages, protocol, server
    from dutyfree.engine.store.store import Store

    if bind is not None:
        token = messages.token()
        listener = server.bound(bind, token)
        host, port = listener.getsockname()[:2]
        standard.say(f"layers at tcp://{f'[{host}]' if ':' in host else host}:{port}")
        blocking.run(server.LayerServer(Store(), listener, token, standard.say).serve)
        return 0

    def answer(cancel: CancelToken) -> None:
        pipe = messages.MessageStream(messages.CancellableReader(0, cancel), sys.stdout.buffer)
        protocol.serve(protocol.StorePeer(Store(), cancel), pipe, cancel)

    blocking.run(answer)
    return 0


@layer.command(name="rm")
def remove(what: tuple[str, ...], /) -> int:
    """Remove snapshots by name, and layers of stages: these are made again when a recipe wants them.

    Parameters
    ----------
    what
        snapshot:NAME, digits, or recipes' files (their last stage).
    """
    for name in layers.remove(_meant(what)):
        standard.show(f"removed {name}")
    return 0


def _meant(what: tuple[str, ...]) -> list[layers.What]:
    from dutyfree import recipes

    return [recipes.load(Path(one)) if one.endswith(".toml") else one for one in what]


def _digits(kept: layers.LayerEntry) -> str:
    return kept.name if kept.name != kept.key else kept.key.partition(":")[2][:12]
