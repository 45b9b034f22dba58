"""``storage="disk"``: bounded, reserved, isolated, and gone with the sandbox however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import dutyfree
from dutyfree import Limits, Recipe, Stage
from dutyfree.contract.errors import CreateError, ExecError, Unavailable
from dutyfree.engine.launcher import disk_storage
from tests.awaiting import enter, until_not
from tests.engine import unprivileged
from tests.opening import open_native
from tests.processes import speaking_python

pytestmark = [pytest.mark.native, pytest.mark.loop, pytest.mark.root("only root mounts images")]

MIB = 1 << 20
SMALL = Limits(disk=32 * MIB, memory=256 * MIB)


@pytest.fixture(autouse=True)
def _cache(cache: Path) -> Path:
    return cache


def images(cache: Path) -> list[str]:
    """The files of this cache that loop devices hold."""
    found = []
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            found.append(path.read_text().strip())
    return [name for name in found if name.startswith(f"{cache}/")]


async def no_images_left(cache: Path) -> None:
    await until_not(lambda: anyio.to_thread.run_sync(images, cache))
    assert os.listdir(cache / "disk") == []


async def out(sandbox: Any, command: str) -> str:
    seen = await sandbox.exec(command)
    return (bytes(seen.stdout) + bytes(seen.stderr)).decode()


async def test_bytes_and_inodes_are_bounded_for_each_sandbox_alone(cache: Path) -> None:
    async with open_native(storage="disk", limits={"disk": 32 * MIB}) as native:
        assert " (ext4 image on " in (await native.facts())["storage"]
        async with native.sandbox() as full, native.sandbox() as other:
            assert "No space left" in await out(full, "head -c 64M /dev/zero > large; stat -c %s large")
            written = int((await out(full, "stat -c %s large")).strip())
            assert 32 * MIB <= written < 34 * MIB
            await full.exec("rm large")
            many = "import itertools\nfor n in itertools.count(): open(f'f{n}', 'w').close()"
            assert "No space left" in (await full.exec(["python3", "-c", many])).stderr.decode()
            assert 0 < int(await out(full, "ls | wc -l")) <= disk_storage.inodes(32 * MIB)
            # The other one has all of its own room, and sees nothing of this one.
            assert (
                await out(other, "head -c 30M /dev/zero > mine; stat -c %s mine; ls") == f"{30 * MIB}\nmine\n"
            )
            assert "tmpfs" in await out(other, "stat -f -c %T /dev/shm")
    await no_images_left(cache)


async def test_more_than_the_memory_limit_can_be_written() -> None:
    limits = Limits(disk=192 * MIB, memory=64 * MIB)
    opened = open_native(storage="disk", ready=0, limits=limits)
    async with opened as native, native.sandbox() as sandbox:
        done = await sandbox.exec("head -c 160M /dev/urandom > f; sha1sum < f; sync f; sha1sum < f")
        first, second = done.stdout.splitlines()
        assert done.ok
        assert first == second


async def test_snapshots_forks_and_groups_are_on_disk_too(cache: Path) -> None:
    recipe = Recipe(stages=(Stage("setup", commands=("mkdir d; echo 1 > d/below",)),))
    async with open_native(storage="disk", limits=SMALL) as native:
        async with native.sandbox(recipe) as sandbox:
            await sandbox.exec("mv d e; head -c 3M /dev/urandom > large; echo 2 > /dev/shm/shared")
            before = await out(sandbox, "find . -type f | sort | xargs sha1sum")
            taken = await sandbox.snapshot()  # a copy: what is in /dev/shm would be lost
            assert await out(sandbox, "cat /dev/shm/shared; rm /dev/shm/shared") == "2\n"
            moved = await sandbox.snapshot()
            named = await sandbox.snapshot("kept")
            for one in (taken, moved, named):
                async with native.sandbox(one) as copy:
                    assert await out(copy, "find . -type f | sort | xargs sha1sum") == before
            async with sandbox.fork(2) as children:
                for child in children:
                    await child.write("own", b"1")
                assert "own" not in await out(sandbox, "ls")
            await sandbox.reset()
            assert await out(sandbox, "find . -type f") == "./d/below\n"
        recipes = Recipe()
        for turn in range(9):  # more than a chain may have, so some are merged
            async with native.sandbox(recipes) as sandbox:
                await sandbox.write(f"f{turn}", b"x" * 100_000)
                recipes = await sandbox.snapshot()
        async with native.sandbox(recipes) as sandbox:
            assert await out(sandbox, "cat f* | wc -c") == "900000\n"
        async with native.group(recipe, 3) as group:
            assert [await out(one, "cat d/below") for one in group] == ["1\n"] * 3
    async with open_native(storage="memory") as native, native.sandbox(named) as copy:
        assert await out(copy, "find . -type f | sort | xargs sha1sum") == before
    await no_images_left(cache)


async def test_verification_finds_what_is_left_on_disk_and_in_shared_memory() -> None:
    async with open_native(storage="disk", ready=0, limits=SMALL) as native:
        for dirt in ("echo > /dev/shm/file", "echo > file", "rm /etc/hosts"):
            async with native.sandbox() as sandbox:
                await sandbox.exec("true")
                await sandbox.verify()
                await sandbox.exec(dirt)
                with pytest.raises(ExecError, match="not as new: files"):
                    await sandbox.verify()


@pytest.mark.parametrize("victim", ["owner", "launcher"])
async def test_nothing_is_left_after_a_kill(victim: str, cache: Path) -> None:
    program = """
    import anyio, dutyfree
    async def main():
        async with dutyfree.open("native", storage="disk", limits={"disk": 32 << 20}) as native:
            async with native.sandbox() as one, native.sandbox() as two:
                for sandbox in (one, two):
                    await sandbox.exec("head -c 8M /dev/urandom > f")
                    await sandbox.start("while :; do echo x >> g; done")
                await two.snapshot()
                print(native.node.launcher.pid, flush=True)
                await anyio.sleep_forever()
    anyio.run(main)
    """

    def kill() -> None:
        with speaking_python(program, stderr=subprocess.DEVNULL) as (process, launcher):
            assert len(images(cache)) >= 3
            os.kill(process.pid if victim == "owner" else int(launcher), signal.SIGKILL)
            process.kill()

    await anyio.to_thread.run_sync(kill)
    await no_images_left(cache)


async def unmounter(native: Any) -> int:
    """The pid of the launcher's helper that unmounts images. It may be about to take its name."""
    launcher = native.node.launcher.pid

    def find() -> int | None:
        for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{child}/comm").read_text() == "dutyfree-umount\n":
                    return int(child)
        return None

    with anyio.fail_after(60):
        while (found := await anyio.to_thread.run_sync(find)) is None:  # noqa: ASYNC110 (nothing tells)
            await anyio.sleep(0.02)
    return found


async def test_a_slow_unmount_blocks_nothing(cache: Path) -> None:
    async with open_native(storage="disk", ready=0, limits={"disk": 4 * MIB}) as native:
        async with native.sandbox():
            pass
        helper = await unmounter(native)
        os.kill(helper, signal.SIGSTOP)  # as one that waits for a slow disk
        try:
            for turn in range(12):  # more than its socket holds
                async with native.sandbox() as sandbox:
                    await sandbox.write("file", b"1")
                    assert await out(sandbox, f"cat file; echo {turn}") == f"1{turn}\n"
            assert len(images(cache)) >= 12
        finally:
            os.kill(helper, signal.SIGCONT)
    await no_images_left(cache)


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache on a file system of 320 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=320m", "small", str(path)], check=True)
    monkeypatch.setenv("DUTYFREE_CACHE", str(path))
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


async def test_a_full_disk_refuses_new_sandboxes_and_loses_no_write(small_disk: Path) -> None:

    def fill() -> None:
        with (small_disk / "filling").open("wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(MIB))

    async def create_many(native: Any) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(9):
                await stack.enter_async_context(native.sandbox())

    limits = Limits(disk=48 * MIB, memory=24 * MIB)
    async with open_native(storage="disk", ready=0, limits=limits) as native:
        async with native.sandbox() as sandbox:
            await anyio.to_thread.run_sync(fill)
            with pytest.raises(CreateError, match="reserves its disk limit of 50331648 bytes") as refused:
                await create_many(native)
            assert "DUTYFREE_CACHE" in refused.value.remedy
            # The memory limit is smaller than the file, so this reads it back from the image.
            done = await sandbox.exec("head -c 40M /dev/urandom | tee f | sha1sum; sync f; sha1sum < f")
            written, read = done.stdout.splitlines()
            assert done.ok
            assert written == read
            await anyio.to_thread.run_sync((small_disk / "filling").unlink)
        for _ in range(12):  # each waits for the space that the one before gives back
            async with native.sandbox() as sandbox:
                assert await out(sandbox, "head -c 30M /dev/zero > f; echo done") == "done\n"


async def test_a_request_that_waits_for_space_survives_the_death_of_the_helper(small_disk: Path) -> None:
    limits = Limits(disk=48 * MIB)
    async with open_native(storage="disk", ready=0, limits=limits) as native:
        async with native.sandbox():
            pass
        helper = await unmounter(native)
        os.kill(helper, signal.SIGSTOP)

        async def create() -> None:
            async with native.sandbox() as sandbox:
                assert await out(sandbox, "echo done") == "done\n"

        async def kill_when_full() -> None:
            def room() -> int:
                found = os.statvfs(small_disk)
                return (found.f_bavail - found.f_blocks // 20) * found.f_frsize

            while await anyio.to_thread.run_sync(room) > disk_storage.image_size(48 * MIB):  # noqa: ASYNC110 (nothing tells)
                await anyio.sleep(0.02)
            await anyio.sleep(0.2)  # the next request probably waits now; if not, the test is only less sharp
            os.kill(helper, signal.SIGKILL)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(kill_when_full)
                created = 0
                while created < 8:  # more than fit
                    with contextlib.suppress(CreateError):  # until the kernel has freed the space
                        await create()
                        created += 1


async def test_without_room_for_one_sandbox_it_cannot_be_opened(small_disk: Path) -> None:
    with pytest.raises(CreateError, match="reserves its disk limit of 536870912 bytes"):
        await enter(dutyfree.open("native", storage="disk"))


async def test_without_the_formatter_it_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_storage, "FORMATTER", "mke2fs-missing")
    with pytest.raises(Unavailable, match="e2fsprogs"):
        await enter(dutyfree.open("native", storage="disk"))


def test_without_root_it_is_unavailable() -> None:
    program = (
        "import anyio, dutyfree\n"
        "from dutyfree.contract.errors import Unavailable\n"
        "async def main():\n"
        "    try:\n"
        "        async with dutyfree.open('native', storage='disk'):\n"
        "            pass\n"
        "    except Unavailable as error:\n"
        "        print(error)\n"
        "anyio.run(main)\n"
    )
    try:
        assert "needs root" in unprivileged.run("-c", program)
    finally:
        unprivileged.remove()


async def test_a_limit_without_room_for_a_journal_is_refused() -> None:
    async with dutyfree.open("native", storage="disk", ready=0, limits={"disk": 4 * MIB}) as native:
        with pytest.raises(CreateError, match="at least 4194304 bytes, not 1048576"):
            await native.sandbox(limits=Limits(disk=MIB)).__aenter__()
