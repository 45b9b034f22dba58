"""Find and remove what killed runs left on this machine: ``dutyfree gc``. It never touches what is in use.

Little is left as a rule: sandboxes end with their launcher, and reapers clean up after their owners. If those
were killed too (a power cut, ``kill -9`` of everything), the identity of the owner finds what they left.
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
from dutyfree.contract.errors import CleanupError, SubstrateError, Unavailable
from dutyfree.engine.host import census
from dutyfree.engine.pool.scheduler.values import Budget
from dutyfree.engine.store import sweep
from dutyfree.engine.store.locks import try_lock
from dutyfree.engine.store.store import Store
from dutyfree.substrates.bare import substrate as bare
from dutyfree.substrates.hosted import own_server
from dutyfree.substrates.local.reaper import remove_tree
from dutyfree.substrates.oci import gc as oci
from dutyfree.substrates.vm import disks as vm_disks
from dutyfree.substrates.vm import kernel as vm_kernel
from dutyfree.substrates.vm import substrate as vm

DYING_SECONDS = 10.0
"""How long the kernel may take to end killed processes."""


class Leftover(msgspec.Struct, frozen=True):
    """One leftover. ``failure`` says why it could not be removed; empty if it was, or would be."""

    kind: str
    what: str
    size: int | None = None
    failure: str = ""


async def collect(*, spare: int = Budget().disk, dry_run: bool = False) -> list[Leftover]:
    """Find all leftovers, and remove them unless ``dry_run``. Keep ``spare`` bytes of unused layers."""
    found = await anyio.to_thread.run_sync(lambda: list(_local(spare, dry_run)))
    return (
        found
        + await _docker(dry_run)
        + await _e2b(dry_run)
        + await _daytona(dry_run)
        + await _cloud(dry_run)
        + await _kubernetes(dry_run)
    )


def _local(spare: int, dry_run: bool) -> Iterator[Leftover]:
    yield from _control_groups(dry_run)
    for parent in {Path(tempfile.gettempdir()).resolve(), Path(bare.MEMORY_DIRECTORY).resolve()}:
        for path in bare.leftovers(parent):
            yield _removed("sandbox of bare", path, bare.remove_leftover, dry_run)
        for path in oci.leftovers(parent):
            yield _removed("containers of oci", path, oci.remove_leftover, dry_run)
    for path in own_server.leftovers():
        yield _removed("directory of a server", path, lambda path: remove_tree(str(path)), dry_run)
    cache = paths.cache()
    yield from _unlocked("build of the study's image", study_image.folder(), "lock", "build-*", dry_run)
    yield from _unlocked("build of the fixture", cache, "fixture.lock", "fixture-making-*", dry_run)
    yield from _layers(spare, dry_run)
    yield from _machines(dry_run)


# --- Control groups ------------------------------------------------------------------------------------


def _control_groups(dry_run: bool) -> Iterator[Leftover]:
    """List groups before launchers, so that a launcher that starts in between is not mistaken for dead."""
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
    """Take the lock of a path. Yields False if an owner has it, also an owner that is not visible here."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags, 0o644)
    except OSError:
        yield False  # it is gone, or belongs to another user
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
    """Remove a control group. Launchers may do the same, and dying processes keep it for a moment."""
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
    """Leftovers of builders that hold a lock while they build: abandoned if the lock is free."""
    # Create the lock file if it is missing, because a builder may start now.
    with _held(directory / lock, os.O_CREAT) as abandoned:
        for path in sorted(directory.glob(pattern)) if abandoned else ():
            yield _removed(kind, path, lambda path: remove_tree(str(path)), dry_run)


def _layers(spare: int, dry_run: bool) -> Iterator[Leftover]:
    """Layers that no image and no sandbox uses, and unfinished layers.

    Layers of recipes took time to build, so they are removed only above ``spare``, the oldest first.
    """
    store = Store()
    if store.root.is_dir():
        done = store.collect(spare, dry_run=dry_run)
        if done.layers:
            yield Leftover("layers", f"{done.layers} in {store.root}", done.size)
        if done.half:
            yield Leftover("unfinished layers", f"in {store.root}", done.half)


def _machines(dry_run: bool) -> Iterator[Leftover]:
    """What killed users of virtual machines left, and the disks of layers that no machine uses now."""
    for path in vm.leftovers():
        yield _removed("directory of vm", path, lambda path: remove_tree(str(path)), dry_run)
    yield from _unlocked("download of vm", vm_kernel.folder(), "lock", "fetch-*", dry_run)
    yield from _unlocked("unfinished disk of vm", vm_kernel.folder() / "disks", "lock", "making-*", dry_run)
    for path in vm_disks.unused():
        yield _removed("disk of vm", path, Path.unlink, dry_run)


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
                        continue  # another process was faster
                    raise
                failure = ""
                try:
                    if not dry_run:
                        await docker.remove(engine, container)
                except CleanupError as error:
                    failure = error.message
                found.append(Leftover("Docker container", container[:12], facts.get("SizeRw"), failure))
            orphans = await docker.leftovers(engine, "images") + await docker.baked_leftovers(engine)
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


# --- E2B -----------------------------------------------------------------------------------------------


async def _e2b(dry_run: bool) -> list[Leftover]:
    """Sandboxes at E2B, if there is an API key: those of programs of this machine that are dead."""
    if not os.environ.get("E2B_API_KEY"):
        return []
    from dutyfree.substrates.e2b import substrate as e2b

    kind = "E2B sandbox"
    found = []
    try:
        for sandbox in await e2b.leftovers():
            failure = ""
            try:
                if not dry_run:
                    await e2b.remove(sandbox)
            except CleanupError as error:
                failure = error.message
            found.append(Leftover(kind, sandbox, failure=failure))
    except Unavailable:
        pass  # it is not used here
    except SubstrateError as error:
        found.append(Leftover(kind, "all that are there", failure=error.message))
    return found


# --- Daytona -------------------------------------------------------------------------------------------


async def _daytona(dry_run: bool) -> list[Leftover]:
    """Sandboxes at Daytona, if there is an API key: those of programs of this machine that are dead."""
    if not os.environ.get("DAYTONA_API_KEY"):
        return []
    from dutyfree.substrates.daytona.substrate import remove_leftovers

    kind = "Daytona sandbox"
    try:
        gone = await remove_leftovers(dry_run)
    except Unavailable:
        return []  # it is not used here
    except SubstrateError as error:
        return [Leftover(kind, "all that are there", failure=error.message)]
    return [Leftover(kind, name, failure=failure) for name, failure in gone]


# --- Cloud ---------------------------------------------------------------------------------------------


async def _cloud(dry_run: bool) -> list[Leftover]:
    """Instances of programs of this machine that are dead: they cost money."""
    from dutyfree.substrates.cloud import leftovers

    found = await anyio.to_thread.run_sync(leftovers.collect, dry_run)
    return [Leftover("cloud instance", what, failure=failure) for what, failure in found]


# --- Kubernetes ----------------------------------------------------------------------------------------


async def _kubernetes(dry_run: bool) -> list[Leftover]:
    """Pods and Leases of dead owners in the cluster that the usual kubeconfig names, if it answers."""
    from dutyfree.substrates.kubernetes.api import ApiError, ApiLost, connect
    from dutyfree.substrates.kubernetes.config import KubernetesConfig
    from dutyfree.substrates.kubernetes.ownership import remove_leftovers

    try:
        api = await connect(KubernetesConfig(answer_seconds=10.0))
    except Unavailable:
        return []  # it is not used here
    try:
        return [Leftover(kind, name) for kind, name in await remove_leftovers(api, dry_run=dry_run)]
    except (ApiError, ApiLost):
        return []  # a cluster that was removed, or of which this account may read nothing
    finally:
        await api.close()
