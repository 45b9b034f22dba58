"""Named snapshots: on disk, whole or not at all, for every process, in short chains."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from dutyfree import layers
from dutyfree.contract import Recipe, Stage
from dutyfree.contract.errors import CreateError, UsageError
from dutyfree.engine.layers.disk_bridge import MAX_CHAIN
from dutyfree.engine.store.store import Store
from tests.awaiting import enter, until
from tests.engine.layers.test_snapshots import CHANGES, DESCRIBE, MANY, OVER_LAYERS, SEE_OVER_LAYERS
from tests.opening import open_native
from tests.processes import speaking_python

pytestmark = [
    pytest.mark.usefixtures("cache"),
    pytest.mark.native,
    pytest.mark.root("they lie on the disk with root only"),
]

LAYERS = 16
"""More layers than this slow down every lookup."""


async def _said(sandbox: Any, command: str) -> bytes:
    seen = await sandbox.exec(command)
    return bytes(seen.stdout)


@pytest.mark.parametrize("how", ["few", "many", "busy"])
async def test_it_outlives_the_process_with_every_file_as_it_was(how: str) -> None:
    below = "echo below > below; mkdir -p old/deep; echo 1 > old/deep/f"
    recipe = Recipe(stages=(Stage("setup", commands=(below,)),))
    change = (
        CHANGES.replace("1G", "100M")
        + (MANY if how == "many" else "")
        + "\nmv old new; echo 2 > new/deep/g; chmod 600 below"
    )
    async with open_native() as native, native.sandbox(recipe) as sandbox:
        for command in (change, OVER_LAYERS):
            done = await sandbox.exec(command)
            assert done.ok, done
        if how == "busy":
            await sandbox.start("sleep 1000")
        before = await _said(sandbox, DESCRIBE), await _said(sandbox, SEE_OVER_LAYERS)
        taken = await sandbox.snapshot("good-1")
        assert taken == Recipe("snapshot:good-1")
        async with native.sandbox(taken) as copy:
            assert before == (await _said(copy, DESCRIBE), await _said(copy, SEE_OVER_LAYERS))
        assert native.node.layers.size > 0  # the sandbox's own
        assert native.snapshots() == ()
    async with open_native() as native, native.sandbox(taken) as copy:
        assert before == (await _said(copy, DESCRIBE), await _said(copy, SEE_OVER_LAYERS))
        assert b"new/deep/g" in before[0]
        assert native.node.layers.size == 0


async def test_names_are_checked_before_anything_is_done() -> None:
    async with open_native() as native, native.sandbox() as sandbox:
        await sandbox.snapshot("taken")
        for name in ("", "../up", "a/b", "#1", "x" * 200, "a b", "taken"):
            with pytest.raises(UsageError):
                await sandbox.snapshot(name)
        with pytest.raises(CreateError, match="no snapshot absent"):
            await enter(native.sandbox(Recipe("snapshot:absent")))
        with pytest.raises(UsageError, match="layer rm"):
            native.forget(Recipe("snapshot:taken"))
    assert len(await anyio.to_thread.run_sync(Store().layers)) == 1


async def test_stages_upon_it_are_kept_too() -> None:
    async with open_native() as native, native.sandbox() as sandbox:
        await sandbox.write("file", b"1")
        await sandbox.snapshot("base")
    recipe = Recipe("snapshot:base", (Stage("setup", commands=("cat file > copy; date +%N > stamp",)),))
    stamps = []
    for _ in range(2):
        async with open_native() as native, native.sandbox(recipe) as sandbox:
            assert await sandbox.read("copy") == b"1"
            stamps.append(await sandbox.read("stamp"))
    assert stamps[0] == stamps[1]


async def test_collecting_spares_what_a_name_needs() -> None:
    commands = ("echo 1 > a", "echo 2 > b")
    recipe = Recipe(stages=tuple(Stage("setup", commands=(command,)) for command in commands))
    async with open_native() as native, native.sandbox(recipe) as sandbox:
        await sandbox.write("c", b"3\n")
        await native.prepare(recipe)
    async with open_native() as native, native.sandbox(recipe) as sandbox:
        await sandbox.write("c", b"3\n")
        await sandbox.snapshot("whole")
    store = Store()
    await anyio.to_thread.run_sync(store.collect)
    assert len(await anyio.to_thread.run_sync(store.layers)) == 3
    async with open_native() as native, native.sandbox(Recipe("snapshot:whole")) as sandbox:
        assert await _said(sandbox, "cat a b c") == b"1\n2\n3\n"
    await anyio.to_thread.run_sync(store.snapshots.remove, "whole")
    await anyio.to_thread.run_sync(store.collect)
    assert await anyio.to_thread.run_sync(store.layers) == []


async def test_a_cancelled_taker_leaves_nothing() -> None:
    """The name is free again, and no layer without a name is left."""
    named, opened = 0, open_native()
    async with opened as native, native.sandbox() as sandbox:
        await sandbox.exec("head -c 3000000 /dev/urandom > large")
        for number in range(30):
            with anyio.move_on_after(number * 0.002) as scope:
                await sandbox.snapshot("name")
            if scope.cancelled_caught:
                assert await anyio.to_thread.run_sync(layers.ls) == []
            else:
                named += 1
                await anyio.to_thread.run_sync(layers.remove, ["snapshot:name"])
            assert await anyio.to_thread.run_sync(Store().layers) == []
        assert named < 30


async def test_a_killed_taker_leaves_nothing(cache: Path) -> None:
    program = """
    import anyio, dutyfree
    async def main():
        async with dutyfree.open("native") as native, native.sandbox() as sandbox:
            await sandbox.exec("for i in $(seq 300); do head -c 1000000 /dev/zero > f$i; done")
            print("begun", flush=True)
            await sandbox.snapshot("never")
            print("done", flush=True)
    anyio.run(main)
    """

    def kill() -> str:
        with speaking_python(program) as (process, _):
            while process.poll() is None and not copying():
                time.sleep(0.001)
            process.kill()
            return process.communicate()[0]

    def copying() -> bool:
        with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
            return bool(list(cache.glob("layers/making/*/tree/0/workspace/*")))
        return False

    for _ in range(10):
        if await anyio.to_thread.run_sync(kill) == "":
            break
        await anyio.to_thread.run_sync(layers.remove, ["snapshot:never"])  # the write was faster: try again
    store = Store()

    def is_clean() -> bool:
        assert store.snapshots.all() == []
        store.collect()
        assert store.layers() == []
        return os.listdir(cache / "layers/making") == [".lock"]

    await until(lambda: anyio.to_thread.run_sync(is_clean))  # the writer ends a moment later


@pytest.mark.parametrize("named", [False, True])
async def test_a_chain_of_sixty_stays_short_and_as_fast(named: bool) -> None:
    """Each is taken in a sandbox of the one before. Lookups reach the lowest layer, or find nothing."""
    async with open_native() as native:
        recipe = Recipe()
        depths = []
        for turn in range(60):
            async with native.sandbox(recipe) as sandbox:
                depths.append(max(len(layers) for _, layers in sandbox.trees))
                steps = f"mkdir d{turn}; echo {turn} > d{turn}/f; rm -rf d{turn - 3}; echo {turn} >> log"
                await sandbox.exec(steps)
                former, recipe = recipe, await sandbox.snapshot(f"at-{turn}" if named else None)
                if former.image and not named:
                    native.forget(former)
        async with native.sandbox(recipe) as last, native.sandbox() as first:
            assert await _said(last, "cat log") == "".join(f"{n}\n" for n in range(60)).encode()
            assert await _said(last, "ls -d d*") == b"d57\nd58\nd59\n"
            depths.append(max(len(layers) for _, layers in last.trees))
            assert max(depths) <= min(LAYERS, MAX_CHAIN + 8)
            # Not timed here: bench/layers.py does that. The number of layers is what matters.
            assert await _said(first, "ls") == b""
