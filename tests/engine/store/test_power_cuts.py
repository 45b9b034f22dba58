"""Power cuts: a layer that the store lists is whole after the next boot.

The store lies on a file system of its own within a file. A copy of that file, taken at any moment, is what a
disk has after a power cut at that moment; it is mounted elsewhere, as by the next boot.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio.to_thread
import msgspec
import pytest

from dutyfree import layers
from dutyfree.contract import Recipe, Stage
from dutyfree.engine.store.layer_lease import LayerInfo
from dutyfree.engine.store.records import ImageSettings, NamedSnapshot, StoredImage
from dutyfree.engine.store.store import Store
from tests.opening import open_native
from tests.processes import ran

pytestmark = [pytest.mark.root("only root can mount a file system")]

FILES = {f"d{number % 7}/{number}": str(number) * 300 for number in range(400)}
KEY = "stage:" + "0" * 64


class Machine:
    """A machine whose power can be cut."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._disk = root / "disk"
        self._mounted: list[Path] = []

    def start(self) -> Path:
        """Mount an empty disk. Returns the mount point."""
        with self._disk.open("wb") as file:
            file.truncate(96 << 20)
        subprocess.run(["mkfs.ext4", "-q", str(self._disk)], check=True)
        return self._mount(self._disk)

    def cut(self) -> Path:
        """Mount the present content of the disk as after a reboot; the machine goes on."""
        copy = self._root / f"cut-{len(self._mounted)}"
        subprocess.run(["cp", "--sparse=always", str(self._disk), str(copy)], check=True)
        mounted = self._mount(copy)
        for path in mounted.glob("layers/kept/*/*/facts"):
            with contextlib.suppress(msgspec.DecodeError):  # torn
                facts = msgspec.json.decode(path.read_bytes(), type=LayerInfo)
                path.write_bytes(msgspec.json.encode(msgspec.structs.replace(facts, boot="former")))
        return mounted

    def end(self) -> None:
        for path in self._mounted:
            subprocess.run(["umount", "-l", str(path)], check=True)

    def _mount(self, disk: Path) -> Path:
        target = self._root / f"mounted-{disk.name}"
        target.mkdir()
        done = ran(["mount", "-o", "loop", str(disk), str(target)])
        if done.returncode:
            pytest.skip(f"no file system can be mounted from a file: {done.stderr.strip()}")
        self._mounted.append(target)
        return target


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.end()


@pytest.fixture
def cache(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Path:
    mounted = machine.start()
    monkeypatch.setenv("DUTYFREE_CACHE", str(mounted))
    return mounted


def fill(tree: Path) -> tuple[int, int, int]:
    for name, text in FILES.items():
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text(text)
    return 1, len(FILES), 0


def contents(tree: Path) -> dict[str, str]:
    return {str(path.relative_to(tree)): path.read_text() for path in tree.rglob("*") if path.is_file()}


def test_a_layer_is_believed_once_it_is_on_the_disk(machine: Machine, cache: Path) -> None:
    live = Store(cache / "layers")
    live.add(KEY, fill).close()
    assert Store(machine.cut() / "layers").lease(KEY) is None  # whatever is left of it
    live.sync([KEY])
    lease = Store(machine.cut() / "layers").lease(KEY)
    assert lease is not None
    assert contents(lease.tree) == FILES
    lease.close()


def test_a_name_that_was_given_stays(machine: Machine, cache: Path) -> None:
    live = Store(cache / "layers")
    with live.add(KEY, fill):
        live.sync([KEY])
        live.put_image(
            StoredImage(name="i", digest="d", layers=(KEY,), mounted=(KEY,), settings=ImageSettings(), size=1)
        )
        live.snapshots.put(NamedSnapshot(name="s", layer=KEY, below=(), size=1, made=0.0))
    after = Store(machine.cut() / "layers")
    assert [image.name for image in after.images()] == ["i"]
    assert [snapshot.name for snapshot in after.snapshots.all()] == ["s"]


def test_an_image_that_was_imported_stays(machine: Machine, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "rootfs" / "bin").mkdir(parents=True)
    fill(tmp_path / "rootfs")
    command = [sys.executable, "-m", "dutyfree", "image", "import", str(tmp_path / "rootfs"), "mine"]
    subprocess.run(command, check=True, capture_output=True)
    after = Store(machine.cut() / "layers")
    (image,) = after.images()
    (lease,) = [after.lease(key) for key in image.mounted]
    assert lease is not None
    assert contents(lease.tree) == FILES
    lease.close()


async def test_stages_of_a_closed_substrate_stay(
    machine: Machine, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = _recipe()
    async with open_native() as native, native.sandbox(recipe) as sandbox:
        former = await sandbox.read("copy")
    monkeypatch.setenv("DUTYFREE_CACHE", str(await anyio.to_thread.run_sync(machine.cut)))
    async with open_native() as native, native.sandbox(recipe) as sandbox:
        assert (sandbox.served.kind, await sandbox.read("copy")) == ("layer", former)


async def test_a_snapshot_that_was_taken_stays_with_all_that_it_stands_on(
    machine: Machine, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = _recipe()
    async with open_native() as native:
        await native.prepare(recipe)
    async with open_native() as native, native.sandbox(recipe) as sandbox:
        former = await sandbox.read("copy")
        await sandbox.write("own", b"1" * 100_000)
        await sandbox.snapshot("kept")
        after = await anyio.to_thread.run_sync(machine.cut)
    monkeypatch.setenv("DUTYFREE_CACHE", str(after))
    assert [kept.below for kept in await anyio.to_thread.run_sync(layers.ls)] == [0, 1, 2]
    async with open_native() as native, native.sandbox(Recipe("snapshot:kept")) as sandbox:
        assert (await sandbox.read("copy"), await sandbox.read("own")) == (former, b"1" * 100_000)


@pytest.mark.parametrize("settled", [1, 2])
async def test_what_was_lost_is_not_mixed_with_what_was_not(
    machine: Machine, cache: Path, monkeypatch: pytest.MonkeyPatch, settled: int
) -> None:
    """The sync marker of one of two stages had not reached the disk."""
    recipe = _recipe()
    async with open_native() as native, native.sandbox(recipe) as sandbox:
        former = await sandbox.read("copy")
    after = await anyio.to_thread.run_sync(machine.cut)
    monkeypatch.setenv("DUTYFREE_CACHE", str(after))
    listed = await anyio.to_thread.run_sync(layers.ls)
    lost = Store().path(listed[2 - settled].key)
    await anyio.to_thread.run_sync(partial((lost / "settled").unlink))
    async with open_native() as native, native.sandbox(recipe) as sandbox:
        stamp, copy = await sandbox.read("stamp"), await sandbox.read("copy")
    assert copy.startswith(stamp)
    assert copy != former


def _recipe() -> Recipe:
    """With stages that write different files on each run."""
    stamp = Stage("setup", ("cat /proc/sys/kernel/random/uuid > stamp",))
    copy = Stage("setup", ("cat stamp /proc/sys/kernel/random/uuid > copy; sleep 0",))
    return Recipe(stages=(stamp, copy))
