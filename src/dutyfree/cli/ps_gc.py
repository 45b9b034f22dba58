"""``dutyfree ps`` and ``dutyfree gc``: list running sandboxes, remove what killed processes left."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from dutyfree.cli import console, option_values
from dutyfree.cli.signals import run_async

if TYPE_CHECKING:
    from dutyfree.engine.host.census import SandboxStatus


def ps(*, json: bool = False) -> int:
    """List the native engine's sandboxes on this machine, of all owners.

    It reads /proc and the control groups only, and does not contact the owners. As root you see all
    sandboxes.

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
        console.print_json(found)
        return 0
    if not found:
        console.say("no sandbox is running on this machine")
        return 0
    labelled = any(living.labels for living in found)
    heads = ["sandbox", "image", "state", "processes", "memory", "age", *["labels"] * labelled, "owner"]
    console.table(heads, (_row(living, labelled) for living in found), right=range(3, 6), cut=True)
    return 0


def _row(living: SandboxStatus, labelled: bool) -> list[str]:
    labels = " ".join(f"{name}={value}" for name, value in living.labels.items())
    return [
        living.id,
        living.image,
        living.state if living.isolation == "full" else f"{living.state}, not isolated",
        str(living.processes),
        console.size(living.memory),
        _age(time.time() - living.since),
        *[labels] * labelled,
        f"{living.owner} {living.program}",
    ]


def _age(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02}m" if hours else f"{minutes}m {rest:02}s" if minutes else f"{rest}s"


def gc(
    *,
    spare: str = "20G",
    dry_run: bool = False,
    json: bool = False,
) -> int:
    """Remove what killed processes left behind, here and in the services that they used.

    On this machine: control groups, directories, Docker containers and images, disks of virtual machines,
    unfinished images and layers, and layers that nothing uses. Elsewhere: cloud instances, and the pods and
    Leases in the Kubernetes cluster of the current context.

    With the variable E2B_API_KEY or DAYTONA_API_KEY, also their sandboxes at E2B or Daytona.

    It does not touch what belongs to a running process, or to a process that may run on another machine.
    Layers of recipes stay, unless they take more than --spare. The exit status is 1 if something could not
    be removed.

    For example:

        dutyfree gc --dry-run
        dutyfree gc
        dutyfree gc --spare 0

    Parameters
    ----------
    spare
        Keep this many bytes of unused layers, the most recently used first. Layers of images are always kept.
    dry_run
        Only say what would be removed.
    json
        Print JSON on standard output.
    """
    from dutyfree import gc as garbage

    kept = option_values.size(spare, "--spare") or 0
    found = run_async(partial(garbage.collect, spare=kept, dry_run=dry_run))
    if json:
        console.print_json(found)
    else:
        verb = "would be removed" if dry_run else "removed"
        for left in found:
            size = "" if left.size is None else f", {console.size(left.size)}"
            state = f"cannot be removed: {left.failure}" if left.failure else verb
            console.show(f"{left.kind} {left.what}{size}: {state}")
        gone = [left for left in found if not left.failure]
        total = console.size(sum(left.size or 0 for left in gone))
        console.show(f"{len(gone)} {verb}, {total}" if found else "nothing to remove")
    return 1 if any(left.failure for left in found) else 0
