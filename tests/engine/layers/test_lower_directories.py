"""The layers of a recipe as directories: what an overlay of them shows is what a sandbox shows."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from dutyfree.contract import Recipe, Stage
from dutyfree.engine.layers.disk_bridge import MAX_CHAIN
from dutyfree.engine.layers.lower_directories import DirectoryLayers, LowerDirectories
from dutyfree.engine.store.store import Store
from tests.opening import open_native

pytestmark = [
    pytest.mark.usefixtures("cache"),
    pytest.mark.native,
    pytest.mark.root("layers lie on the disk with root only"),
]

DESCRIBE = """
find /workspace /etc -printf '%p %y %m %l\\n' | sort
find /workspace -type f | sort | xargs grep ''
find /usr | wc -l
"""

MOUNT = """mount -t overlay -o redirect_dir=on,metacopy=on,lowerdir="$0" none /mnt &&
mount -t tmpfs none /mnt/tmp && chroot /mnt sh -c "$1" """


def setup(*commands: str) -> Stage:
    return Stage("setup", commands=commands)


async def _mounted(found: LowerDirectories) -> bytes:
    """What the overlay of the directories shows, in a mount namespace that ends with the command."""
    lower = ":".join(map(str, found.paths))
    command = ["unshare", "--mount", "sh", "-c", MOUNT, lower, DESCRIBE]
    done = await anyio.to_thread.run_sync(lambda: subprocess.run(command, capture_output=True, check=True))
    return done.stdout


async def _directories(native: Any, path: Path) -> DirectoryLayers:
    await anyio.Path(path).mkdir()
    opened: DirectoryLayers = native.node.directories(path)
    return opened


async def _entries(path: Path) -> list[Path]:
    return await anyio.to_thread.run_sync(lambda: list(path.iterdir()))


async def test_they_show_the_files_of_a_sandbox_and_stay_as_long_as_they_are_open(tmp_path: Path) -> None:
    first = setup("echo one > one; echo gone > gone; mkdir -p old/deep; echo 1 > old/deep/file")
    recipe = Recipe(stages=(first, setup("rm gone; mv old new; chmod 600 one")), env={"COLOUR": "red"})
    async with open_native() as native:
        directories = await _directories(native, tmp_path / "scratch")
        async with directories.open(recipe) as found, directories.open(recipe) as again:
            async with native.sandbox(recipe) as sandbox:
                seen = await sandbox.exec(DESCRIBE)
            assert await _mounted(found) == seen.stdout
            assert b"new/deep/file" in seen.stdout
            assert again.paths == found.paths
            assert found.defaults.environment["COLOUR"] == "red"
            assert len(await _entries(tmp_path / "scratch")) == 1
            stages = [info.key for info in await anyio.to_thread.run_sync(Store().layers)]
            assert len(stages) == 2
        key = found.key
        await directories.close()
        assert not await _entries(tmp_path / "scratch")
    in_use = await anyio.to_thread.run_sync(lambda: [Store().is_in_use(stage) for stage in stages])
    assert in_use == [False, False]
    async with open_native() as native:
        directories = await _directories(native, tmp_path / "again")
        async with directories.open(recipe) as found:
            assert found.key == key != ""
            assert await anyio.to_thread.run_sync(lambda: all(Store().is_in_use(stage) for stage in stages))


async def test_layers_in_memory_are_written_to_disk(tmp_path: Path) -> None:
    stages = tuple(setup(f"echo {number} > file{number}; rm -f file{number - 2}") for number in range(10))
    assert len(stages) > MAX_CHAIN
    async with open_native() as native:
        directories = await _directories(native, tmp_path / "scratch")
        async with native.sandbox(Recipe(stages=stages)) as sandbox:
            await sandbox.exec("mkdir own; mv file9 own; echo more > file8")
            taken = await sandbox.snapshot()
        for recipe in (Recipe(stages=stages), taken):
            async with directories.open(recipe) as found, native.sandbox(recipe) as sandbox:
                assert await _mounted(found) == (await sandbox.exec(DESCRIBE)).stdout
                assert found.key == ""


async def test_a_root_file_system_and_an_image_of_the_store(tmp_path: Path) -> None:
    root = tmp_path / "root"
    script = f"mkdir -p {root}/bin {root}/etc {root}/tmp && echo hello > {root}/etc/hello"
    await anyio.run_process(script)
    await anyio.run_process(f"tar -C {root} -cf {tmp_path}/image.tar .")
    async with open_native() as native:
        directories = await _directories(native, tmp_path / "scratch")
        async with directories.open(Recipe(str(root))) as found:
            top, below = found.paths
            assert below == root
            assert found.key == ""
            assert await anyio.Path(top, "workspace").is_dir()
            assert await anyio.Path(top, "etc/hosts").is_file()
        async with directories.open(Recipe(str(tmp_path / "image.tar"))) as found:
            assert found.key
            assert await anyio.Path(found.paths[-1], "etc/hello").read_text() == "hello\n"
