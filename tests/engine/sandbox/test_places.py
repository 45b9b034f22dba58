"""Directories without an overlay: a plain one keeps what was written, a fixed one is read-only."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import dutyfree
from dutyfree import Limits, Recipe, Stage

pytestmark = [
    pytest.mark.native,
    pytest.mark.usefixtures("cache"),
    pytest.mark.root("without root, everything is overlay"),
]

PLAIN = ("/workspace", "/tmp")
FIXED = ("/usr",)


@pytest.fixture
async def native() -> AsyncIterator[Any]:
    async with dutyfree.open("native", plain=PLAIN, fixed=FIXED) as substrate:
        yield substrate


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    """A root file system with one program in it, and a directory for /usr."""
    busybox = shutil.which("busybox")
    if busybox is None or b"interpreter" in Path(busybox).read_bytes()[:4096]:
        pytest.skip("busybox is missing; to enable it: apt-get install busybox-static")
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    shutil.copy(busybox, root / "bin/busybox")
    for name in ("sh", "cat", "ls", "stat", "touch"):
        (root / "bin" / name).symlink_to("busybox")
    (root / "usr/share").mkdir(parents=True)
    (root / "usr/share/mine").write_text("of the image")
    return root


async def said(sandbox: Any, command: str) -> str:
    seen = await sandbox.exec(command)
    return str((seen.stdout + seen.stderr).decode()).strip()


async def test_a_fixed_directory_is_read_only(native: Any) -> None:
    async with native.sandbox() as sandbox:
        assert sandbox.without_overlay == (*PLAIN, *FIXED)
        assert "Read-only file system" in await said(sandbox, "touch /usr/lib/new")
        assert "Read-only file system" in await said(sandbox, "rm /usr/bin/env")
        assert await said(sandbox, "mount -o remount,rw /usr; echo $?") != "0"
        assert await said(sandbox, "stat -c %u:%g /usr/bin/env") == "0:0"
        assert (await sandbox.exec("ls /usr/bin | wc -l")).stdout.strip() == str(
            len(os.listdir("/usr/bin"))
        ).encode()
    facts = await native.facts()
    assert (facts["without overlay"], facts["still overlay"]) == ("/workspace, /tmp, /usr", "none")


async def test_a_stage_may_write_to_a_fixed_directory(native: Any) -> None:
    recipe = Recipe(stages=(Stage("setup", commands=("echo built > /usr/built",)),))
    async with native.sandbox() as idle, native.sandbox(recipe) as sandbox:
        assert await said(sandbox, "cat /usr/built") == "built"
        assert "/usr" not in sandbox.without_overlay  # two layers have it now
        assert await said(sandbox, "touch /usr/new && echo written") == "written"
        assert "No such file" in await said(idle, "cat /usr/built")
    assert "built" not in os.listdir("/usr")
    await native.prefetch([Recipe()], 1)
    async with native.group(recipe, 2) as sandboxes:  # an idle sandbox could not run the stage
        assert [await said(one, "cat /usr/built") for one in sandboxes] == ["built", "built"]


async def test_an_image_of_one_layer(native: Any, rootfs: Path) -> None:
    async with native.sandbox(Recipe(image=str(rootfs))) as sandbox:
        assert "/usr" in sandbox.without_overlay
        assert await said(sandbox, "cat /usr/share/mine") == "of the image"
        assert "Read-only" in await said(sandbox, "touch /usr/share/mine")


@pytest.mark.parametrize("target", ["/", "..", "../..", "bin"])
async def test_an_image_cannot_choose_what_is_mounted(native: Any, rootfs: Path, target: str) -> None:
    for name in ("usr", "tmp", "workspace"):
        if (rootfs / name).is_dir():
            shutil.rmtree(rootfs / name)
        (rootfs / name).symlink_to(target)
    (rootfs / "workspace").unlink()  # or no command could start there
    async with native.sandbox(Recipe(image=str(rootfs))) as sandbox:
        assert sandbox.without_overlay == ("/workspace",)
        assert (await said(sandbox, "ls /")).split() == [
            *("bin", "dev", "etc", "proc", "sys", "tmp", "usr", "workspace")
        ]


async def test_plain_directories_are_in_snapshots_and_forks(native: Any) -> None:
    async with native.sandbox() as sandbox:
        await sandbox.exec(
            "echo one > /workspace/file; mkdir /tmp/deep; echo two > /tmp/deep/file; chmod 700 /tmp"
        )
        kept = await sandbox.snapshot()
        named = await sandbox.snapshot("places")
        async with sandbox.fork(1) as (child,):
            assert await said(child, "cat /workspace/file /tmp/deep/file; stat -c %a /tmp") == "one\ntwo\n700"
            await child.exec("echo changed > /workspace/file; rm -r /tmp/deep")
        assert await said(sandbox, "cat /workspace/file /tmp/deep/file") == "one\ntwo"
        for recipe in (kept, named):
            async with native.sandbox(recipe) as other:
                assert await said(other, "cat /workspace/file /tmp/deep/file") == "one\ntwo"
                assert other.without_overlay == FIXED
                await other.exec("echo again > /workspace/file; touch /tmp/more")
                async with native.sandbox(await other.snapshot()) as third:
                    assert await said(third, "cat /workspace/file; ls /tmp") == "again\ndeep\nmore"
        await sandbox.reset()
        assert await said(sandbox, "ls -A /workspace /tmp; stat -c %a /tmp") == "/tmp:\n\n/workspace:\n1777"


async def test_a_plain_directory_with_files_of_a_stage_stays_overlay(native: Any) -> None:
    recipe = Recipe(stages=(Stage("setup", commands=("echo built > built",)),))
    async with native.sandbox(recipe) as sandbox:
        assert sandbox.without_overlay == ("/tmp", *FIXED)
        assert await said(sandbox, "cat built; echo mine > built; cat built") == "built\nmine"
    async with native.sandbox(recipe) as sandbox:
        assert await said(sandbox, "cat built") == "built"


async def test_a_plain_directory_counts_as_disk(native: Any) -> None:
    async with native.sandbox(limits=Limits(disk=16 << 20)) as sandbox:
        assert "No space left" in await said(sandbox, "head -c 67108864 /dev/zero > /workspace/file")


async def test_programs_between_plain_directories_and_the_rest(native: Any) -> None:
    script = """
    set -e
    cd /root && mkdir repository && cd repository && git init -q . && echo x > file && git add file
    git -c user.name=x -c user.email=x@example.org commit -qm x
    git clone -q /root/repository /workspace/clone && test -e /workspace/clone/file
    mv /workspace/clone /opt/moved && mv /opt/moved /workspace/back && test -e /workspace/back/file
    cp -al /workspace/back /workspace/linked && test /workspace/back/file -ef /workspace/linked/file
    echo y > /tmp/new && mv /tmp/new /workspace/back/file && test "$(cat /workspace/back/file)" = y
    ! ln /workspace/back/file /root/link 2>/dev/null
    echo done
    """
    async with native.sandbox() as sandbox:
        assert (await said(sandbox, script)).endswith("done")


@pytest.mark.parametrize("filtered", [True, False])
async def test_marks_of_the_overlay_in_a_plain_directory_harm_no_one(filtered: bool) -> None:
    """A whiteout hides nothing but itself, and the filter refuses it; the other marks cannot be made."""
    script = """
    import ctypes, errno, os, stat
    os.mkdir("directory"); open("directory/file", "w").close(); open("file", "w").close()
    libc = ctypes.CDLL(None, use_errno=True)
    refused = [libc.renameat2(-100, b"file", -100, b"other", 4) and ctypes.get_errno() == errno.EINVAL]
    for make in (os.mknod, lambda *how: os.mknod(*how, dir_fd=os.open(".", os.O_RDONLY))):
        try: make(f"whiteout{len(refused)}", stat.S_IFCHR | 0o600, 0)
        except PermissionError: refused.append(True)
        else: refused.append(False)
    os.mknod("pipe", stat.S_IFIFO | 0o600); os.remove("pipe"); os.system("rm -f file other")
    print(refused)
    for name in ("opaque", "redirect", "metacopy"):
        try: os.setxattr("directory", f"trusted.overlay.{name}", b"/usr")
        except PermissionError: continue
        raise SystemExit("a mark was set")
    """
    without = () if filtered else ("seccomp",)
    async with dutyfree.open("native", without=without) as native, native.sandbox() as sandbox:
        seen = await sandbox.exec(["python3", "-c", textwrap.dedent(script)])
        assert seen.ok, seen.stderr
        assert seen.stdout == (b"[True, True, True]\n" if filtered else b"[0, False, False]\n")
        async with native.sandbox(await sandbox.snapshot()) as child:
            assert await said(child, "ls /workspace /workspace/directory; touch /workspace/whiteout1") == (
                "/workspace:\ndirectory\n\n/workspace/directory:\nfile"
            )


async def test_nothing_of_the_former_holder_is_left(native: Any) -> None:
    pool = await native.pooled()
    for turn in range(3):
        async with pool.lease(Recipe()) as lease:
            (sandbox,) = lease.sandboxes
            assert await said(sandbox, "ls -A /workspace /tmp") == "/tmp:\n\n/workspace:"
            await sandbox.exec(f"touch /workspace/left{turn} /tmp/left{turn}")
