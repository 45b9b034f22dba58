"""A stage that runs twice may write different files: a layer is never used on another build of its parent."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dutyfree import layers
from dutyfree.contract import Recipe, Stage
from dutyfree.contract.errors import CreateError
from dutyfree.engine.images import rootfs
from dutyfree.engine.layers.build_request import layer_key
from dutyfree.engine.store import provenance
from dutyfree.engine.store.layer_lease import LayerInfo
from dutyfree.engine.store.store import Store
from tests.awaiting import enter
from tests.opening import open_native

pytestmark = [pytest.mark.usefixtures("cache"), pytest.mark.root("stages lie on the disk with root only")]


def staged(number: int, branch: str = "") -> Stage:
    """A recipe whose file lists the builds of all stages up to it."""
    command = f"{{ cat last || :; date +%s%N; }} 2>/dev/null > s{number}; cp s{number} last; : {branch}"
    return Stage("setup", commands=(command,))


def recipe(depth: int, branch: str = "") -> Recipe:
    return Recipe(stages=(staged(1), *(staged(number, branch) for number in range(2, depth + 1))))


HOST = rootfs.host_identity()


def key_of(wanted: Recipe) -> str:
    return layer_key(wanted.keys()[-1], HOST)


async def runs(native: Any, wanted: Recipe) -> list[bytes]:
    """The build of each stage, as a sandbox sees them; they must be consistent."""
    async with native.sandbox(wanted) as sandbox:
        told = [await sandbox.read(f"s{number}") for number, _ in enumerate(wanted.stages, 1)]
    for before, after in itertools.pairwise(told):
        assert after.startswith(before), (before, after)
    assert [text.count(b"\n") for text in told] == list(range(1, len(told) + 1))
    return told


async def seen(wanted: Recipe) -> list[bytes]:
    """As another process sees it."""
    async with open_native() as native:
        return await runs(native, wanted)


def removed(key: str) -> None:
    Store().remove(key)


def damaged(key: str) -> None:
    """As after an interrupted ``rm -r``."""
    with contextlib.suppress(FileNotFoundError):
        (Store().path(key) / "lease").unlink()


def crashed(key: str) -> None:
    """As after a crash, before all of it reached the disk."""
    path = Store().path(key)
    with contextlib.suppress(FileNotFoundError):
        facts = msgspec.json.decode((path / "facts").read_bytes(), type=LayerInfo)
        (path / "settled").unlink(missing_ok=True)
        (path / "facts").write_bytes(msgspec.json.encode(msgspec.structs.replace(facts, boot="former")))


LOSSES = [removed, damaged, crashed]


@pytest.mark.parametrize("lose", LOSSES)
async def test_what_was_made_upon_a_lost_layer_is_made_anew(lose: Any) -> None:
    former = await seen(recipe(3))
    await anyio.to_thread.run_sync(lose, key_of(recipe(1)))
    again = await seen(recipe(3))
    assert again[0] != former[0]
    assert await seen(recipe(3)) == again
    await anyio.to_thread.run_sync(lose, key_of(recipe(2)))
    later = await seen(recipe(3))
    assert (later[0] == again[0], later[1] == again[1]) == (True, False)


async def test_a_shorter_recipe_does_not_bring_back_what_stood_on_another_run() -> None:
    """The lowest stage was built again for a shorter recipe, and the old layers on it are still there."""
    former = await seen(recipe(2))
    await anyio.to_thread.run_sync(removed, key_of(recipe(1)))
    first = await seen(recipe(1))
    assert first[0] != former[0]
    listed = await anyio.to_thread.run_sync(layers.ls)
    assert [kept.key for kept in listed] == [key_of(recipe(1))]
    assert not await anyio.to_thread.run_sync(Store().path(key_of(recipe(2))).exists)  # collected
    assert (await seen(recipe(2)))[0] == first[0]


async def test_a_loose_layer_is_not_removed_while_it_is_used() -> None:
    await seen(recipe(2))

    def lose() -> tuple[int, int, bool]:
        store = Store()
        lease = store.lease(key_of(recipe(2)))
        assert lease is not None
        assert store.remove(key_of(recipe(1)))
        assert store.lease(key_of(recipe(2)), "another") is None
        with lease:
            held = store.collect(1 << 40)
        return held.in_use, store.collect(1 << 40).layers, store.path(key_of(recipe(2))).exists()

    assert await anyio.to_thread.run_sync(lose) == (1, 1, False)


async def test_a_snapshot_upon_a_lost_layer_is_told_and_can_be_removed() -> None:
    await seen(recipe(1))
    async with open_native() as native, native.sandbox(recipe(1)) as sandbox:
        await sandbox.snapshot("kept")
    upon = Recipe("snapshot:kept", stages=(Stage("setup", ("touch more",)),))
    async with open_native() as native, native.sandbox(upon) as sandbox:
        assert await sandbox.read("s1")
    await anyio.to_thread.run_sync(removed, key_of(recipe(1)))
    for again in (False, True):
        if again:
            await seen(recipe(1))
        async with open_native() as native:
            with pytest.raises(CreateError, match=r"not whole: .*(gone|built again)"):
                await enter(native.sandbox(upon))
    assert "snapshot:kept" in [kept.name for kept in await anyio.to_thread.run_sync(layers.ls)]
    assert await anyio.to_thread.run_sync(layers.remove, ["snapshot:kept"]) == ["snapshot:kept"]
    await anyio.to_thread.run_sync(Store().collect, 1 << 40)
    assert [kept.key for kept in await anyio.to_thread.run_sync(layers.ls)] == [key_of(recipe(1))]


async def test_an_export_takes_no_two_runs(tmp_path: Path) -> None:
    def former_one() -> bool:
        """The old layer of the longer prefix, on another build of the shorter one."""
        path = Store().path(key_of(recipe(2)))
        shutil.copytree(path, tmp_path / "saved", symlinks=True)
        return Store().remove(key_of(recipe(1)))

    await seen(recipe(2))
    assert await anyio.to_thread.run_sync(former_one)
    first = await seen(recipe(1))

    def put_back() -> None:
        shutil.copytree(tmp_path / "saved", Store().path(key_of(recipe(2))), symlinks=True)

    await anyio.to_thread.run_sync(put_back)
    exported = await anyio.to_thread.run_sync(layers.export, [recipe(2)], tmp_path / "chain.tar")
    assert exported.names == (key_of(recipe(1)),)
    assert (await seen(recipe(2)))[0] == first[0]


async def test_an_import_replaces_what_fits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the parent of a layer is gone, a peer may deliver both."""
    there = await seen(recipe(2))
    await anyio.to_thread.run_sync(layers.export, [recipe(2)], tmp_path / "chain.tar")
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "other"))
    await seen(recipe(2))
    await anyio.to_thread.run_sync(removed, key_of(recipe(1)))
    (fetched,) = await anyio.to_thread.run_sync(layers.bring, tmp_path / "chain.tar")
    assert fetched.layers == 2
    assert await seen(recipe(2)) == there


async def test_what_stands_on_memory_alone_stays_there_too(cache: Path) -> None:
    """It would fit no layer on disk, and another process may write another build there."""
    async with on_small_disk(cache) as disk, open_native() as native:
        await anyio.to_thread.run_sync(disk.fill)
        ours = await runs(native, recipe(1))
        await native.node.builder.wait_until_idle()
        await anyio.to_thread.run_sync(disk.clear)
        theirs = await seen(recipe(2))
        assert theirs[0] != ours[0]
        assert (await runs(native, recipe(2)))[0] == ours[0]
        await native.node.builder.wait_until_idle()
        assert await seen(recipe(2)) == theirs


async def test_copies_for_a_group_are_of_the_run_of_their_first(cache: Path) -> None:
    """Also if its layers are in memory only, and were evicted since."""
    async with on_small_disk(cache) as disk, open_native() as native:
        await anyio.to_thread.run_sync(disk.fill)
        await native.prefetch([recipe(1)], 1)
        await native.pool.until_idle(recipe(1), 1)
        native.node.builder.prefixes.forget(recipe(1).keys()[-1])
        async with native.group(recipe(1), 3) as group:
            assert len({await sandbox.read("s1") for sandbox in group}) == 1


async def test_what_is_built_is_known_to_be_on_the_disk_when_the_substrate_is_closed() -> None:
    await seen(recipe(2))
    for depth in (1, 2):
        assert await anyio.to_thread.run_sync((Store().path(key_of(recipe(depth))) / "settled").exists)


async def test_what_a_killed_process_left_unsettled_is_settled_by_who_uses_it() -> None:
    former = await seen(recipe(1))
    path = Store().path(key_of(recipe(1)))
    await anyio.to_thread.run_sync((path / "settled").unlink)
    async with open_native() as native:
        assert await runs(native, recipe(1)) == former
        await anyio.to_thread.run_sync(native.node.builder.store.wait_for_sync)
    assert await anyio.to_thread.run_sync((path / "settled").exists)


async def test_a_snapshot_is_whole_after_a_crash() -> None:
    """All layers below it are synced, even if their builder ended before that."""
    await seen(recipe(1))
    below = Store().path(key_of(recipe(1)))
    async with open_native() as native, native.sandbox(recipe(1)) as sandbox:
        await anyio.to_thread.run_sync(native.node.builder.store.wait_for_sync)
        await anyio.to_thread.run_sync((below / "settled").unlink)
        await sandbox.snapshot("kept")
        assert await anyio.to_thread.run_sync((below / "settled").exists)


# --- In arbitrary orders ----------------------------------------------------------------------------------


class SmallDisk:
    def __init__(self, cache: Path) -> None:
        self._filler = cache / "filler"

    def fill(self) -> None:
        with contextlib.suppress(OSError), self._filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def clear(self) -> None:
        self._filler.unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def on_small_disk(cache: Path) -> AsyncIterator[SmallDisk]:
    stack = contextlib.ExitStack()
    disk = await anyio.to_thread.run_sync(stack.enter_context, mounted(cache))
    try:
        yield disk
    finally:
        await anyio.to_thread.run_sync(stack.close)


@contextlib.contextmanager
def mounted(cache: Path) -> Iterator[SmallDisk]:
    cache.mkdir(exist_ok=True)
    assert os.system(f"mount -t tmpfs -o size=2m tmpfs {cache}") == 0
    try:
        yield SmallDisk(cache)
    finally:
        assert os.system(f"umount -l {cache}") == 0


DEPTHS = st.integers(1, 3)
BRANCHES = st.sampled_from(["", "other"])
WHO = st.integers(0, 1)
STEPS = st.one_of(
    st.tuples(st.just("want"), WHO, DEPTHS, BRANCHES),
    st.tuples(st.just("want"), WHO, DEPTHS, BRANCHES),
    st.tuples(st.just("lose"), st.sampled_from(LOSSES), DEPTHS, BRANCHES),
    st.tuples(st.just("reopen"), WHO),
    st.tuples(st.just("forget"), WHO, DEPTHS, BRANCHES),
    st.tuples(st.just("disk"), st.sampled_from(["fill", "clear"])),
    st.tuples(st.just("collect"), st.sampled_from([0, 8192, 1 << 30])),
)


class World:
    """Two open substrates with one store on a small disk."""

    def __init__(self, disk: SmallDisk) -> None:
        self._disk = disk
        self._stacks = [contextlib.AsyncExitStack() for _ in range(2)]
        self._natives: list[Any] = [None, None]

    async def begin(self) -> None:
        for who in range(2):
            await self.reopen(who)

    async def want(self, who: int, depth: int, branch: str) -> None:
        await runs(self._natives[who], recipe(depth, branch))

    async def lose(self, how: Any, depth: int, branch: str) -> None:
        key = key_of(recipe(depth, branch))
        if await anyio.to_thread.run_sync(Store().is_unused, key):  # as after a crash, or a removal
            await anyio.to_thread.run_sync(how, key)

    async def reopen(self, who: int) -> None:
        await self._stacks[who].aclose()
        self._natives[who] = await self._stacks[who].enter_async_context(open_native())

    async def forget(self, who: int, depth: int, branch: str) -> None:
        self._natives[who].node.builder.prefixes.forget(recipe(depth, branch).keys()[-1])

    async def disk(self, what: str) -> None:
        await anyio.to_thread.run_sync(getattr(self._disk, what))

    async def collect(self, spare: int) -> None:
        await anyio.to_thread.run_sync(Store().collect, spare)

    async def end(self) -> None:
        for stack in self._stacks:
            await stack.aclose()
        await anyio.to_thread.run_sync(check_disk)


def check_disk() -> None:
    """The layers that it exports are consistent too."""
    store = Store()
    for facts in store.layers():
        told = provenance.read(store.path(facts.key) / "tree")
        assert told is not None
        if told.below and not store.is_stale(facts.key):
            ground = provenance.read(store.path(told.below[-1]) / "tree")
            assert ground is not None
            assert ground.build_id == told.parent_build


@given(st.lists(STEPS, min_size=3, max_size=10))
@example(
    [("want", 0, 2, ""), ("reopen", 0), ("lose", removed, 1, ""), ("want", 0, 1, ""), ("want", 1, 2, "")]
)
@example([("disk", "fill"), ("want", 0, 1, ""), ("disk", "clear"), ("want", 1, 2, ""), ("want", 0, 2, "")])
@settings(max_examples=12)
def test_no_two_runs_are_mixed_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Any]
) -> None:
    cache = tmp_path_factory.mktemp("cache")

    async def live(disk: SmallDisk) -> None:
        world = World(disk)
        await world.begin()
        try:
            for what, *how in steps:
                await getattr(world, what)(*how)
        finally:
            await world.end()

    with pytest.MonkeyPatch.context() as patch, mounted(cache) as disk:
        patch.setenv("DUTYFREE_CACHE", str(cache))
        anyio.run(live, disk)
