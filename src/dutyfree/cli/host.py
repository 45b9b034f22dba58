"""``dutyfree ps`` and ``dutyfree gc``: what lives on this machine, and what was left there."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from dutyfree.cli import amounts, standard
from dutyfree.cli.amounts import shown
from dutyfree.cli.running import run

if TYPE_CHECKING:
    from dutyfree.engine.host.census import SandboxStatus


def ps(*, json: bool = False) -> int:
    """List the native engine's sandboxes that live on this machine, of all owners.

    Nobody is asked and nothing is disturbed: it is what /proc and the control groups tell, so root sees
    all of it.

    For example:

        dutyfree ps
        dutyfree ps --json

    Parameters
    ----------
    json
        Print JSON on standard output.
    """
    from dutyfree.engine.host import census

    found = census.sandboxes()
    if json:
        standard.tell(found)
        return 0
    if not found:
        standard.say("no sandbox lives on this machine")
        return 0
    labelled = any(living.labels for living in found)
    heads = ["sandbox", "image", "state", "processes", "memory", "since", *["labels"] * labelled, "owner"]
    standard.table(heads, (_row(living, labelled) for living in found), right=range(3, 6), cut=True)
    return 0


def _row(living: SandboxStatus, labelled: bool) -> list[str]:
    labels = " ".join(f"{name}={value}" for name, value in living.labels.items())
    return [
        living.id,
        living.image,
        living.state,
        str(living.processes),
        shown(living.memory),
        _ago(time.time() - living.since),
        *[labels] * labelled,
        f"{living.owner} {living.program}",
    ]


def gc(
    *,
    spare: str = "20G",
    dry_run: bool = False,
    json: bool = False,
) -> int:
    """Remove what killed runs have left: control groups, directories, containers, images half made.

    What belongs to a process that lives, or that may live on another machine, is not touched. Layers of
    recipes stay, unless they take more than --spare. The exit status is 1 when something could not be
    removed.

    For example:

        dutyfree gc --dry-run
        dutyfree gc
        dutyfree gc --spare 0

    Parameters
    ----------
    spare
        Of the layers that no image has and nobody uses, keep the last used ones, up to so many bytes.
    dry_run
        Only say what would be removed.
    json
        Print JSON on standard output.
    """
    from dutyfree import gc as leftovers

    kept = amounts.size(spare, "--spare") or 0
    found = run(partial(leftovers.collect, spare=kept, dry_run=dry_run))
    if json:
        standard.tell(found)
    else:
        verb = "would be removed" if dry_run else "removed"
        for left in found:
            size = "" if left.size is None else f", {shown(left.size)}"
            state = f"cannot be removed: {left.failure}" if left.failure else verb
            standard.show(f"{left.kind} {left.what}{size}: {state}")
        gone = [left for left in found if not left.failure]
        total = shown(sum(left.size or 0 for left in gone))
        standard.show(f"{len(gone)} {verb}, {total}" if found else "nothing was left")
    return 1 if any(left.failure for left in found) else 0


def _ago(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02}m" if hours else f"{minutes}m {rest:02}s" if minutes else f"{rest}s"
