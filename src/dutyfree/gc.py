"""What killed runs have left on this machine, of every kind that dutyfree makes; nothing that is alive.

By construction there is little of it: a launcher's death ends its sandboxes, reapers follow owners. What
remains when those were killed too (a cut of power, ``kill -9`` of everything) is found by its owner's name.
Files that serve as locks are no leftovers: the kernel frees a lock with its holder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from dutyfree import paths, study_image
from dutyfree.contract.errors import CleanupError, Unavailable
from dutyfree.engine.host import census
from dutyfree.engine.pool.scheduler.values import Budget
from dutyfree.engine.store import sweep
from dutyfree.engine.store.locks import try_lock
from dutyfree.engine.store.store import Store
from dutyfree.substrates.bare import substrate as bare
from dutyfree.substrates.local.reaper import remove_tree

DYING_SECONDS = 10.0
"""So long the kernel may take to end processes that were killed."""


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
    yield from _unlocked("build of the study's image", study_image.folder(), "lock", "build-*", dry_run)
    yield from _unlocked("build of the fixture", cache, "fixture.lock", "fixture-making-*", dry_run)
    yield from _layers(spare, dry_run)


# --- Control groups ------------------------------------------------------------------------------------


def _control_groups(dry_run: bool) -> Iterator[Leftover]:
    """Groups first, then launchers: one that starts in between has its group in neither."""
    groups = list(_groups())
    living = {number for launcher in census.launchers() for number in launcher.numbers}
    for group in groups:
        if int(group.name.split("-")[1]) in living:
            continue
        with _held(group, os.O_DIRECTORY) as dead:
            if dead:
                yield _removed("control group", group, _remove_group, dry_run)


@contextlib.contextmanager
def _held(path: Path, flags: int) -> Iterator[bool]:
    """Whether its lock can be had, held meanwhile: an owner has it, also one that we cannot see from here."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags, 0o644)
    except OSError:
        yield False  # it is gone, or not ours to remove
        return
    try:
        yield try_lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def _groups() -> Iterator[Path]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if right.split()[0] not in ("cgroup", "cgroup2"):
            continue
        for directory, names, _ in os.walk(left.split()[4]):
            mine = [name for name in names if re.fullmatch(r"dutyfree-\d+(-[0-9a-f]+)?", name)]
            yield from (Path(directory, name) for name in mine)
            names[:] = [name for name in names if name not in mine]


def _remove_group(group: Path) -> None:
    """Launchers may do so at the same time, and processes that are dying keep it for a moment."""
    until = time.monotonic() + DYING_SECONDS
    for directory, _, _ in os.walk(group, topdown=False):
        while True:
            try:
                Path(directory).rmdir()
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno == errno.EBUSY and time.monotonic() < until:
                    time.sleep(0.02)
                    continue
                raise
            break


# --- Directories ---------------------------------------------------------------------------------------


def _unlocked(kind: str, directory: Path, lock: str, pattern: str, dry_run: bool) -> Iterator[Leftover]:
    """What builders leave who hold a lock while they build: theirs no more if the lock can be had."""
    # Made if need be: a builder may be about to begin.
    with _held(directory / lock, os.O_CREAT) as abandoned:
        for path in sorted(directory.glob(pattern)) if abandoned else ():
            yield _removed(kind, path, lambda path: remove_tree(str(path)), dry_run)


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
    size = None if kind == "control group" else sweep.size(path)
    try:
        if not dry_run:
            remove(path)
    except OSError as error:
        return Leftover(kind, str(path), size, error.strerror or str(error))
    return Leftover(kind, str(path), size)


# --- Docker --------------------------------------------------------------------------------------------


async def _docker(dry_run: bool) -> list[Leftover]:
    from dutyfree.substrates.docker import gc as docker
    from dutyfree.substrates.docker import images
    from dutyfree.substrates.docker.engine import EngineError, EngineLost, connected

    found = []
    try:
        async with connected() as engine:
            for container in await docker.leftovers(engine, "containers"):
                try:
                    facts = await engine.request("GET", f"/containers/{container}/json", query={"size": "1"})
                except EngineError as error:
                    if error.status == 404:
                        continue  # somebody else was faster
                    raise
                failure = ""
                try:
                    if not dry_run:
                        await docker.remove(engine, container)
                except CleanupError as error:
                    failure = error.message
                found.append(Leftover("Docker container", container[:12], facts.get("SizeRw"), failure))
            orphans = await docker.leftovers(engine, "images")
            for orphan in orphans:
                held = await images.inspect(engine, orphan) or {}
                found.append(Leftover("Docker image", orphan.removeprefix("sha256:")[:12], held.get("Size")))
            if not dry_run:
                await images.remove(engine, orphans)
    except Unavailable:
        return found  # no engine, nothing in it
    except (EngineError, EngineLost) as error:
        found.append(Leftover("Docker engine", "its containers and images", failure=str(error)))
    return found
