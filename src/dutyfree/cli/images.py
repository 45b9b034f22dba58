"""``dutyfree image``: the study's root filesystem."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console

from dutyfree.cli.running import run

image = App(name="image", help="Make the root filesystem that every substrate of the study uses.")


@image.command
def build(
    *,
    reference: Annotated[str | None, Parameter(name="--from")] = None,
    force: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Make the study's image: python, git and the tools that the tiers need.

    From Debian packages by default, with debootstrap, kept in the cache (needs root, and about a
    minute). The study does it by itself when the image is missing.

    Parameters
    ----------
    reference
        Take this OCI image instead, pulled by the Docker engine; it must hold sh, python3 and git.
    force
        Build anew even if the cache has it.
    """
    from dutyfree import image as images

    console = Console(stderr=True)
    say = partial(console.print, highlight=False, markup=False)
    if reference is not None:
        digest = run(partial(images.from_reference, reference, progress=say))
        print(f"{images.REFERENCE} is now {reference} ({digest})")  # noqa: T201
        return 0
    made = run(partial(images.build, progress=say, force=force))
    print(f"{made.tar} ({made.digest})")  # noqa: T201 (the command's output)
    return 0
