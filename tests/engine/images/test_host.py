"""The image ``host``: this machine's software at its usual paths, in one overlay if possible."""

from __future__ import annotations

import os
from typing import Any

import anyio.to_thread
import pytest

import dutyfree
from dutyfree.contract import Recipe
from dutyfree.engine.images import rootfs
from dutyfree.engine.store.store import Store
from tests.opening import open_native

pytestmark = [
    pytest.mark.usefixtures("cache"),
    pytest.mark.native,
    pytest.mark.root("only overlays of root follow marks"),
    pytest.mark.skipif(rootfs.host_trees() != 1, reason="this host has software outside of /usr"),
]


async def _said(sandbox: Any, command: str) -> list[str]:
    seen = await sandbox.exec(command)
    assert seen.ok, seen
    return list(map(str, seen.stdout.decode().splitlines()))


def _of_host() -> dict[str, list[str]]:
    """The entries of ``/usr``, and of each directory in it."""
    return {str(at): sorted(os.listdir(at)) for at in (rootfs.USR, *rootfs.USR.iterdir()) if at.is_dir()}


async def test_one_overlay_shows_the_hosts_software_and_nothing_twice() -> None:
    theirs = await anyio.to_thread.run_sync(_of_host)
    ours = {name.partition("/")[0] for name in rootfs.DIRECTORIES} | set(rootfs.SOFTWARE)
    async with dutyfree.open("native") as native, native.sandbox() as sandbox:
        assert await _said(sandbox, "grep -c '^overlay ' /proc/mounts") == ["1"]
        for path, names in theirs.items():
            assert sorted(await _said(sandbox, f"ls -A {path}/")) == names
        assert set(await _said(sandbox, "ls -A /")) <= ours
        for name in ("etc", "home", "opt"):  # the host's directory of that name in /usr is hidden
            seen = await _said(sandbox, f"ls -A /{name}")
            assert set(seen).isdisjoint(theirs.get(f"/usr/{name}", []))


async def test_marks_that_lead_there_are_followed_whatever_is_renamed() -> None:
    change = """
    mv /usr/share /usr/moved; mv /usr/local /opt/local; mkdir /usr/local; echo 1 > /usr/local/new
    mv /usr/lib/python3 /workspace/libraries; rm -r /usr/games; mkdir /share; echo 2 > /share/own"""
    look = """ls -A /usr /usr/local /share; cd /usr/moved; find . -maxdepth 2 | sort | sha256sum
    cd /opt/local; find . -maxdepth 2 | sort | sha256sum
    cd /workspace/libraries; find . | sort | sha256sum"""
    async with open_native() as native, native.sandbox() as sandbox:
        await _said(sandbox, change)
        seen = await _said(sandbox, look)
        assert {"moved", "own", "new"} <= set(seen)
        assert {"share", "games"}.isdisjoint(seen)
        async with native.sandbox(await sandbox.snapshot()) as copy:
            assert await _said(copy, look) == seen


def _only_layer() -> list[str]:
    """The files of the only layer in the store."""
    (layer,) = Store().layers()
    lease = Store().lease(layer.key)
    assert lease is not None
    with lease:
        kept = lease.tree / "0"
        return sorted(str(path.relative_to(kept)) for path in kept.rglob("*") if not path.is_dir())


async def test_what_is_kept_on_the_disk_is_what_was_written() -> None:
    async with open_native() as native, native.sandbox() as sandbox:
        await _said(sandbox, "echo 1 > /usr/local/bin/made; chmod 700 /usr/bin/tail; mkdir /usr/share/made")
        await sandbox.snapshot("little")
    assert await anyio.to_thread.run_sync(_only_layer) == ["usr/bin/tail", "usr/local/bin/made"]
    async with open_native() as native, native.sandbox(Recipe("snapshot:little")) as sandbox:
        assert len(await _said(sandbox, "ls /usr/bin; ls /usr/local/bin")) > len(os.listdir("/usr/bin"))
        assert await _said(sandbox, "stat -c '%a' /usr/bin/tail") == ["700"]
