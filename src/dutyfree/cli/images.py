"""``dutyfree image``: the images of the native engine, and the study's root filesystem."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import App, Parameter

from dutyfree.cli import amounts, blocking, standard
from dutyfree.cli.amounts import shown
from dutyfree.cli.bars import Bars
from dutyfree.contract.errors import UsageError

if TYPE_CHECKING:
    from dutyfree.engine.images.install import LeasedImage

image = App(name="image")


@image.command
def build(
    *,
    reference: Annotated[str | None, Parameter(name="--from")] = None,
    force: bool = False,
) -> int:
    """Make the study's image: python, git and the tools that the tiers need.

    From Debian packages by default, with debootstrap, kept in the cache (needs root, and about a
    minute). The study does it by itself when the image is missing.

    For example:

        dutyfree image build
        dutyfree image build --from python:3.12

    Parameters
    ----------
    reference
        Take this OCI image instead, pulled by the Docker engine; it must hold sh, python3 and git.
    force
        Build anew even if the cache has it.
    """
    from dutyfree import study_image as images
    from dutyfree.cli.running import run

    say = standard.say
    if reference is not None:
        digest = run(partial(images.from_reference, reference, progress=say))
        standard.show(f"{images.REFERENCE} is now {reference} ({digest})")
        return 0
    made = run(partial(images.build, progress=say, force=force))
    standard.show(f"{made.tar} ({made.digest})")
    return 0


@image.command
def pull(
    reference: str,
    /,
    *,
    mirror: tuple[str, ...] = (),
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False,
) -> int:
    """Fetch an image from its registry, also if an older one is here under the name.

    What was fetched before an interruption is not fetched again. Logins are those of 'docker login'.

    For example:

        dutyfree image pull debian:12
        dutyfree image pull --mirror https://mirror.example:5000 ghcr.io/team/name:tag

    Parameters
    ----------
    reference
        As Docker takes it: debian:12, ghcr.io/team/name:tag, host:5000/name@sha256:...
    mirror
        Ask this address (https://host[:port]) before the registry; can be given several times.
    quiet
        No progress; print the digest alone.
    """
    from dutyfree.engine.images import mirrors
    from dutyfree.engine.images import reference as references
    from dutyfree.engine.images.pull import Puller
    from dutyfree.engine.store.store import Store

    wanted = references.parse(reference)
    options = mirrors.options({wanted.registry: mirror} if mirror else {})
    with Bars(quiet) as bars:
        held = blocking.run(lambda cancel: Puller(Store(), options, bars.show, cancel).pull(wanted))
    return _added(held, quiet)


@image.command(name="import")
def import_(
    source: str,
    name: str | None = None,
    /,
    *,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False,
) -> int:
    """Take an image that is on this machine.

    For example:

        dutyfree image import ./rootfs.tar mine
        dutyfree image import docker-daemon:team/name:tag

    Parameters
    ----------
    source
        A tar of a root file system or of 'docker save', a directory (a root file system, or an OCI
        layout), oci:PATH[:TAG], or docker-daemon:NAME for one that the Docker engine holds.
    name
        What to call it; by default, its path, or its name in the Docker engine.
    quiet
        No progress; print the digest alone.
    """
    from dutyfree.cli.running import run
    from dutyfree.engine.images import find, reference
    from dutyfree.engine.images.install import disk_error
    from dutyfree.engine.store.store import Store

    if source.startswith(find.DAEMON):
        from dutyfree.substrates.docker import export

        kept = str(reference.parse(name or source.removeprefix(find.DAEMON)))
        bring = partial(export.bring, source, kept)
    else:
        bring = partial(find.import_image, source, name)
    with Bars(quiet) as bars:
        held = run(partial(bring, progress=bars.show))
    try:
        Store().sync(held.image.keys)  # what it came from may be gone after the next boot
    except OSError as error:
        held.close()
        raise disk_error(error) from error
    return _added(held, quiet)


def _added(held: LeasedImage, quiet: bool) -> int:
    image = held.image
    held.close()
    if quiet:
        standard.show(image.digest)
    else:
        standard.show(f"{image.name} ({image.digest}), {_layers(len(image.layers))}, {shown(image.size)}")
    return 0


@image.command(name="ls")
def list_(*, json: bool = False) -> int:
    """List the images that are kept.

    Parameters
    ----------
    json
        Print JSON on standard output.
    """
    from dutyfree.engine.store.store import Store

    store = Store()
    images = store.images()
    if json:
        standard.tell(
            [{**msgspec.to_builtins(image), "used": store.image_last_use(image)} for image in images]
        )
        return 0
    rows = (
        (
            found.name,
            found.digest.partition(":")[2][:12],
            shown(found.size),
            str(len(found.layers)),
            found.created[:10],
            f"{amounts.age(time.time() - store.image_last_use(found))} ago",
        )
        for found in images
    )
    standard.table(("name", "digest", "size", "layers", "created", "used"), rows, right=(2, 3))
    return 0


@image.command(name="rm")
def remove(
    names: tuple[str, ...],
    /,
    *,
    keep_layers: bool = False,
) -> int:
    """Remove images by name, and the layers that no other image and no sandbox uses.

    Parameters
    ----------
    names
        As 'dutyfree image ls' tells them, or shorter, as they were pulled.
    keep_layers
        Leave the layers for 'dutyfree image gc'.
    """
    from dutyfree.engine.images import reference
    from dutyfree.engine.store.store import Store

    store = Store()
    if not names:
        raise UsageError("no image is named", remedy="see `dutyfree image ls`")
    for name in names:
        full = name if store.image(name) else str(reference.parse(name))
        if not store.remove_image(full):
            raise UsageError(f"there is no image {full}", remedy="see `dutyfree image ls`")
        standard.show(f"removed {full}")
    return 0 if keep_layers else gc()


@image.command
def gc(*, spare: str = "0", dry_run: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Remove layers that no image has and no sandbox uses, and what killed processes left.

    For example:

        dutyfree image gc --dry-run
        dutyfree image gc --spare 20G

    Parameters
    ----------
    spare
        Keep the last used ones of them, up to so many bytes: 20G.
    dry_run
        Only say what would be removed.
    """
    from dutyfree.engine.store.store import Store

    done = Store().collect(amounts.size(spare, "--spare") or 0, dry_run=dry_run)
    verb = "would remove" if dry_run else "removed"
    half = f", and {shown(done.half)} half made" if done.half else ""
    in_use = f"; {done.in_use} more are in use" if done.in_use else ""
    standard.show(f"{verb} {_layers(done.layers)}, {shown(done.size)}{half}{in_use}")
    return 0


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"
