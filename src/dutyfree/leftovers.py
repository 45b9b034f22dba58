"""What killed runs have left on this machine, of every kind that dutyfree makes; nothing that is alive.

By construction there is little of it: a launcher's death ends its sandboxes, reapers follow owners. What
remains when those were killed too (a cut of power, ``kill -9`` of everything) is found by its owner's name.
Files that serve as locks are no leftovers: the kernel frees a lock with its holder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from dutyfree import image, paths
from dutyfree.engine import census
from dutyfree.engine.images import sweeping
from dutyfree.engine.images.store import Store
from dutyfree.engine.scheduling.values import Budget
from dutyfree.errors import CleanupError, Unavailable
from dutyfree.substrates.bare import leftovers as bare


class Leftover(msgspec.Struct, frozen=True):
    """One thing found. ``failure`` says why it is still there; empty once it is gone, or would be."""

    kind: str
    what: str
    size: int | None = None
    failure: str = ""


async def collect(*, spare: int = Budget().disk, dry_run: bool = False) -> list[Leftover]:
    """Find all, and remove it unless this is a dry run; of unused layers, the last ``spare`` bytes stay."""
    found = await anyio.to_thread.run_sync(lambda: list(_local(spare, dry_run)))
    return found + await _docker(dry_run)


def _local(spare: int, dry_run: bool) -> Iterator[Leftover]:
    yield from _control_groups(dry_run)
    for path in bare.leftovers(Path(tempfile.gettempdir()).resolve()):
        yield _removed("sandbox of bare", path, bare.remove_leftover, dry_run)
    cache = paths.cache()
    yield from _unlocked("build of the study's image", image.folder(), "lock", "build-*", dry_run)
    yield from _unlocked("build of the fixture", cache, "fixture.lock", "fixture-making-*", dry_run)
    yield from _layers(spare, dry_run)


# --- Control groups ------------------------------------------------------------------------------------


def _control_groups(dry_run: bool) -> Iterator[Leftover]:
    """Groups first, then launchers: one that starts in between has its group in neither."""
    groups = list(_groups())
    living = {number for launcher in census.launchers() for number in launcher.numbers}
    for group in groups:
        if int(group.name.rpartition("-")[2]) not in living:
            yield _removed("control group", group, _remove_group, dry_run)


def _groups() -> Iterator[Path]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if right.split()[0] not in ("cgroup", "cgroup2"):
            continue
        for directory, names, _ in os.walk(left.split()[4]):
            mine = [name for name in names if re.fullmatch(r"dutyfree-\d+", name)]
            yield from (Path(directory, name) for name in mine)
            names[:] = [name for name in names if name not in mine]


def _remove_group(group: Path) -> None:
    for directory, names, _ in os.walk(group, topdown=False):
        for name in names:
            Path(directory, name).rmdir()
    group.rmdir()


# --- Directories ---------------------------------------------------------------------------------------


def _unlocked(kind: str, directory: Path, lock: str, pattern: str, dry_run: bool) -> Iterator[Leftover]:
    """What builders leave who hold a lock while they build: theirs no more if the lock can be had."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(FileNotFoundError):
            file = stack.enter_context(open(directory / lock))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
        for path in sorted(directory.glob(pattern)):
            yield _removed(kind, path, _remove_tree, dry_run)


def _layers(spare: int, dry_run: bool) -> Iterator[Leftover]:
    """Layers that no image has and no sandbox uses, and what was half unpacked; the store knows both.

    What recipes were made into is no leftover, but dear: it goes as it does by itself, the oldest first.
    """
    store = Store()
    if store.root.is_dir():
        done = store.collect(spare, dry_run=dry_run)
        if done.layers:
            yield Leftover("layers", f"{done.layers} in {store.root}", done.size)
        if done.half:
            yield Leftover("layers half made", f"in {store.root}", done.half)


def _removed(kind: str, path: Path, remove: Callable[[Path], None], dry_run: bool) -> Leftover:
    size = None if kind == "control group" else sweeping.size(path)
    try:
        if not dry_run:
            remove(path)
    except OSError as error:
        return Leftover(kind, str(path), size, error.strerror or str(error))
    return Leftover(kind, str(path), size)


def _remove_tree(path: Path) -> None:
    shutil.rmtree(path)


# --- Docker --------------------------------------------------------------------------------------------


async def _docker(dry_run: bool) -> list[Leftover]:
    from dutyfree.substrates.docker import http, leftovers, reaching
    from dutyfree.substrates.docker import images as pictures

    found = []
    try:
        async with reaching.connected() as engine:
            for container in await leftovers.leftovers(engine, "containers"):
                facts = await engine.request("GET", f"/containers/{container}/json", query={"size": "1"})
                failure = ""
                try:
                    if not dry_run:
                        await leftovers.remove(engine, container)
                except CleanupError as error:
                    failure = error.message
                found.append(Leftover("Docker container", container[:12], facts.get("SizeRw"), failure))
            orphans = await leftovers.leftovers(engine, "images")
            for orphan in orphans:
                held = await pictures.inspect(engine, orphan) or {}
                found.append(Leftover("Docker image", orphan.removeprefix("sha256:")[:12], held.get("Size")))
            if not dry_run:
                await pictures.remove(engine, orphans)
    except Unavailable:
        return found  # no engine, nothing in it
    except (http.EngineError, http.EngineLost) as error:
        found.append(Leftover("Docker engine", "its containers and images", failure=str(error)))
    return found
