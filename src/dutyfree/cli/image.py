"""``dutyfree image``: images in the layer store of the native engine, and the image of the study."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated

import msgspec
from cyclopts import App, Parameter

from dutyfree import study_image as images
from dutyfree.cli import console, option_values
from dutyfree.cli.progress import LayerBars
from dutyfree.cli.signals import run_async, run_blocking
from dutyfree.contract.errors import UsageError
from dutyfree.engine.images import find, mirrors
from dutyfree.engine.images import reference as references
from dutyfree.engine.images.install import LeasedImage, disk_error
from dutyfree.engine.images.pull import Puller
from dutyfree.engine.store.store import Store

image = App(name="image")


@image.command
def build(
    *,
    reference: Annotated[str | None, Parameter(name="--from")] = None,
    force: bool = False,
) -> int:
    """Build the image of the study: Python, git and the tools that the tiers need.

    By default it is built from Debian packages with debootstrap, which needs root and about a minute, and
    kept in the cache. The study builds it itself if it is missing.

    For example:

        dutyfree image build
        dutyfree image build --from python:3.12

    Parameters
    ----------
    reference
        Use this OCI image instead, which the Docker engine pulls. It must contain sh, python3 and git.
    force
        Build again even if the cache has it.
    """
    say = console.say
    if reference is not None:
        from dutyfree.substrates.docker import adopt_image

        names = reference, images.REFERENCE, images.TOOLS
        digest = run_async(partial(adopt_image, *names, host=None, progress=say))
        images.use_adopted()
        console.show(f"{images.REFERENCE} is now {reference} ({digest})")
        return 0
    built = run_async(partial(images.build, progress=say, force=force))
    console.show(f"{built.tar} ({built.digest})")
    return 0


@image.command
def pull(
    reference: str,
    /,
    *,
    mirror: tuple[str, ...] = (),
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False,
) -> int:
    """Pull an image from its registry. An older image with the same name is replaced.

    After an interruption, pull again: layers that are complete are not downloaded again. Credentials are
    those of 'docker login'.

    For example:

        dutyfree image pull debian:12
        dutyfree image pull --mirror https://mirror.example:5000 ghcr.io/team/name:tag

    Parameters
    ----------
    reference
        A name as in Docker: debian:12, ghcr.io/team/name:tag, host:5000/name@sha256:...
    mirror
        Try this address (https://host[:port]) before the registry. May be repeated.
    quiet
        Show no progress, and print only the digest.
    """
    parsed = references.parse(reference)
    options = mirrors.pull_options({parsed.registry: mirror} if mirror else {})
    with LayerBars(quiet) as bars:
        held = run_blocking(lambda cancel: Puller(Store(), options, bars.show, cancel).pull(parsed))
    return _added(held, quiet)


@image.command(name="import")
def import_(
    source: str,
    name: str | None = None,
    /,
    *,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False,
) -> int:
    """Import an image from this machine.

    For example:

        dutyfree image import ./rootfs.tar mine
        dutyfree image import docker-daemon:team/name:tag

    Parameters
    ----------
    source
        A tar archive of a root file system or of 'docker save'; a directory with a root file system or an
        OCI layout; oci:PATH[:TAG]; or docker-daemon:NAME for an image of the Docker engine.
    name
        The name to give it. Default: its path, or its name in the Docker engine.
    quiet
        Show no progress, and print only the digest.
    """
    if source.startswith(find.DAEMON):
        from dutyfree.substrates.docker import export

        kept = str(references.parse(name or source.removeprefix(find.DAEMON)))
        bring = partial(export.bring, source, kept)
    else:
        bring = partial(find.import_image, source, name)
    with LayerBars(quiet) as bars:
        held = run_async(partial(bring, progress=bars.show))
    try:
        Store().sync(held.image.keys)  # after a crash it may not be possible to import it again
    except OSError as error:
        held.close()
        raise disk_error(error) from error
    return _added(held, quiet)


def _added(held: LeasedImage, quiet: bool) -> int:
    image = held.image
    held.close()
    if quiet:
        console.show(image.digest)
    else:
        console.show(
            f"{image.name} ({image.digest}), {console.layers(len(image.layers))}, {console.size(image.size)}"
        )
    return 0


@image.command(name="ls")
def list_(*, json: bool = False) -> int:
    """List the images in the layer store.

    Parameters
    ----------
    json
        Print JSON on standard output.
    """
    store = Store()
    images = store.images()
    if json:
        console.print_json(
            [{**msgspec.to_builtins(image), "used": store.image_last_use(image)} for image in images]
        )
        return 0
    rows = (
        (
            found.name,
            found.digest.partition(":")[2][:12],
            console.size(found.size),
            str(len(found.layers)),
            found.created[:10],
            f"{console.age(time.time() - store.image_last_use(found))} ago",
        )
        for found in images
    )
    console.table(("name", "digest", "size", "layers", "created", "used"), rows, right=(2, 3))
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
        Names from 'dutyfree image ls', or as they were pulled.
    keep_layers
        Keep the layers until 'dutyfree image gc'.
    """
    store = Store()
    if not names:
        raise UsageError("name at least one image", remedy="'dutyfree image ls' lists them")
    for name in names:
        full = name if store.image(name) else str(references.parse(name))
        if not store.remove_image(full):
            raise UsageError(f"there is no image {full}", remedy="'dutyfree image ls' lists them")
        console.show(f"removed {full}")
    return 0 if keep_layers else gc()


@image.command
def gc(*, spare: str = "0", dry_run: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Remove layers that no image and no sandbox uses, and what killed processes left.

    For example:

        dutyfree image gc --dry-run
        dutyfree image gc --spare 20G

    Parameters
    ----------
    spare
        Keep this many bytes of them, such as 20G, the most recently used first.
    dry_run
        Only say what would be removed.
    """
    done = Store().collect(option_values.size(spare, "--spare") or 0, dry_run=dry_run)
    verb = "would remove" if dry_run else "removed"
    half = f", and {console.size(done.half)} unfinished" if done.half else ""
    in_use = f"; {done.in_use} more are in use" if done.in_use else ""
    console.show(f"{verb} {console.layers(done.layers)}, {console.size(done.size)}{half}{in_use}")
    return 0
