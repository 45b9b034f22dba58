"""Snapshots and forks: every file is the same, other sandboxes go on, nothing is left."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import dutyfree
from dutyfree.contract import Limits, Recipe, Stage
from dutyfree.contract.abilities import Forkable, Snapshottable
from dutyfree.contract.errors import ActionError, CreateError, DispatchError, ExecError, UsageError
from dutyfree.engine.layers.memory_layers import merge_count
from tests.awaiting import enter, together
from tests.engine import counts
from tests.opening import open_native

pytestmark = pytest.mark.native

MANY = "for i in $(seq 200); do echo $i > many-$i; done"
"""Too many bytes to copy: a new sandbox replaces the old one."""

DESCRIBE = r"""
find . /usr/local /tmp /etc \
  -type d -printf '%P d %m %U %G\n' -o -printf '%P %y %m %U %G %s %n %l\n' 2>/dev/null | sort
find . -type f -size -100M -exec sha256sum {} + | sort
getfattr -dR . 2>/dev/null || true
"""

RENAMED = r"find /usr/share/p* /usr/bin/n* -type d -printf '%P %m\n' -o -printf '%P %m %s\n' | sort"

CHANGES = r"""
set -e
mkdir -p tree/a/b tree/c; echo deep > tree/a/b/file; ln tree/a/b/file tree/hard; ln -s a/b/file tree/link
printf '%0100000d' 7 > tree/large; truncate -s 1G tree/sparse; mkfifo tree/pipe; chmod 4711 tree/large
chown 1000:1001 tree/c; touch -d 2001-01-01 tree/a/b; echo > 'odd
name'
"""
OVER_LAYERS = r"""
set -e
rm /usr/bin/env; rm -r /usr/lib/python3; mkdir /usr/lib/python3; echo new > /usr/lib/python3/only
mv /usr/share/perl5 /usr/share/moved; chmod 700 /usr/bin/tail; mv /usr/bin/head /usr/bin/first
"""
SEE_OVER_LAYERS = r"""
ls /usr/bin/env /usr/share/perl5 2>&1; ls -A /usr/lib/python3; find /usr/share/moved | sort | sha256sum
stat -c '%a %s' /usr/bin/tail; sha256sum < /usr/bin/tail; sha256sum < /usr/bin/first; ls /usr/bin/head 2>&1
"""


@pytest.fixture
async def native() -> AsyncIterator[Any]:
    async with dutyfree.open("native") as substrate:
        yield substrate


async def _seen(sandbox: Any, command: str) -> bytes:
    seen = await sandbox.exec(command)
    return bytes(seen.stdout)


@pytest.mark.parametrize("how", ["few", "many", "busy"])
async def test_a_snapshot_holds_every_file_as_it_was(native: Any, how: str) -> None:
    async with native.sandbox() as sandbox:
        assert all(isinstance(sandbox, ability) for ability in (Snapshottable, Forkable))
        done = await sandbox.exec(CHANGES + (MANY if how == "many" else ""))
        assert done.ok, done
        done = await sandbox.exec(OVER_LAYERS)
        assert done.ok, done
        if how == "busy":
            await sandbox.start("sleep 1000")
        before = await _seen(sandbox, DESCRIBE), await _seen(sandbox, SEE_OVER_LAYERS)
        recipe = await sandbox.snapshot()
        assert before == (await _seen(sandbox, DESCRIBE), await _seen(sandbox, SEE_OVER_LAYERS))
        await sandbox.exec("rm -r tree; echo other > 'odd\nname'; rm -r /usr/share/moved")
        async with native.sandbox(recipe) as copy:
            assert before == (await _seen(copy, DESCRIBE), await _seen(copy, SEE_OVER_LAYERS))


async def test_chains_are_flattened_and_show_the_same(native: Any) -> None:
    async with native.sandbox() as sandbox:
        for turn in range(24):
            steps = [
                f"mkdir d{turn}; echo {turn} > d{turn}/f; {MANY}",
                f"mv d{turn - 1} e{turn - 1}; rm -rf e{turn - 4}; mkdir e{turn - 4}; echo > e{turn - 4}/g",
                f"mv /usr/share/p{turn - 1} /usr/share/p{turn} || mv /usr/share/perl5 /usr/share/p{turn}",
                f"cd /usr/share/p{turn}; mv m{turn - 1} m{turn} || mkdir m{turn}",
                f"mv /usr/bin/n{turn - 1} /usr/bin/n{turn} || mv /usr/bin/head /usr/bin/n{turn}",
                f"chmod 7{turn % 8}1 /usr/bin/n{turn} /usr/bin/tail; touch /usr/share/p{turn}/m{turn}/{turn}",
            ]
            await sandbox.exec("\n".join(steps))
            before = await _seen(sandbox, DESCRIBE + RENAMED)
            recipe = await sandbox.snapshot()
            async with native.sandbox(recipe) as copy:
                assert before == await _seen(copy, DESCRIBE + RENAMED)
                assert await _seen(copy, f"sha256sum < /usr/bin/n{turn}") == await _seen(
                    sandbox, f"sha256sum < /usr/bin/n{turn}"
                )
            native.forget(recipe)
        assert max(len(layers) for _, layers in sandbox.trees) < 16


def test_large_layers_are_not_copied_again_and_again() -> None:
    assert merge_count([1, 1, 1, 1, 1, 1, 1]) == 7
    assert merge_count([1, 1, 1, 1, 1, 1, 100]) == 6
    assert merge_count([1, 2, 4, 8, 16, 32, 64]) == 2
    assert merge_count([100, 1, 1, 1, 1, 1, 1]) == 7


async def test_processes_go_on_through_a_snapshot(native: Any) -> None:
    async with native.sandbox() as sandbox:
        process = await sandbox.start("trap 'echo told; exit 7' TERM; echo up; while :; do sleep 0.05; done")
        async with sandbox.shell() as shell:
            await shell.run("x=kept")
            await sandbox.snapshot()
            assert (await shell.run("echo $x")).stdout == b"kept\n"
        assert (await sandbox.exec("echo usable")).stdout == b"usable\n"
        await process.kill()


async def test_what_is_asked_meanwhile_waits(native: Any) -> None:
    """No action is lost or refused while a snapshot replaces the sandbox."""
    async with native.sandbox() as sandbox:
        await sandbox.exec(MANY)
        found: list[bytes] = []

        async def act() -> None:
            for number in range(40):
                seen = await sandbox.exec(f"echo {number} > said; cat said")
                found.append(seen.stdout)

        async def keep() -> None:
            for _ in range(8):
                native.forget(await sandbox.snapshot())
                await anyio.sleep(0.01)

        await together(act, keep)
        assert found == [f"{number}\n".encode() for number in range(40)]


async def test_shared_memory_stays_with_the_sandbox(native: Any) -> None:
    async with native.sandbox() as sandbox:
        await sandbox.exec(f"{MANY}; echo shared > /dev/shm/file")
        recipe = await sandbox.snapshot()
        assert await sandbox.read("/dev/shm/file") == b"shared\n"
        async with native.sandbox(recipe) as copy:
            assert await copy.list("/dev/shm") == ()
            assert await copy.read("many-7") == b"7\n"


async def test_reset_goes_back_to_the_hand_out(native: Any) -> None:
    async with native.sandbox() as sandbox:
        await sandbox.exec(MANY)
        recipe = await sandbox.snapshot()
        await sandbox.reset()
        assert await sandbox.list(".") == ()
        async with native.sandbox(recipe) as copy:
            native.forget(recipe)
            await copy.write("more", b"")
            await copy.snapshot()
            await copy.reset()
            assert await copy.read("many-7") == b"7\n"


async def test_snapshots_are_listed_and_forgotten(native: Any) -> None:
    async with native.sandbox() as sandbox:
        await sandbox.write("file", b"x" * 100_000)
        recipe = await sandbox.snapshot()
        (taken,) = native.snapshots()
        assert taken.recipe == recipe
        assert 100_000 <= taken.size < 1_000_000
        native.forget(recipe)
        assert native.snapshots() == ()
        with pytest.raises(UsageError, match="no snapshot"):
            native.forget(recipe)
        with pytest.raises(CreateError, match="forgotten"):
            await enter(native.sandbox(recipe))


async def test_memory_is_given_back_with_the_last_user(native: Any) -> None:
    async with native.sandbox() as sandbox:
        await sandbox.exec("head -c 20000000 /dev/zero > large")
        recipe = await sandbox.snapshot()
        async with native.sandbox(recipe) as copy:
            native.forget(recipe)
            assert native.node.layers.size > 20_000_000
            assert len(await copy.read("large")) == 20_000_000
    assert native.node.layers.size == 0


async def test_nothing_may_be_kept() -> None:
    async with dutyfree.open("native", kept=0) as substrate, substrate.sandbox() as sandbox:
        one: Any = sandbox
        await one.write("file", b"1")
        with pytest.raises(ExecError, match="of 0 are kept already"):
            await one.snapshot()
        assert await one.read("file") == b"1"


async def test_one_that_is_larger_than_all_that_may_be_kept_is_its_own_fault() -> None:
    async with open_native(kept=1_000_000) as native, native.sandbox() as sandbox:
        await sandbox.exec("head -c 6000000 /dev/zero > large")
        with pytest.raises(ActionError, match="1000000 can be kept") as refused:
            await sandbox.snapshot()
        assert refused.value.kind == "too_large"
        assert (await sandbox.exec("wc -c < large")).stdout == b"6000000\n"


async def test_what_is_kept_is_bounded() -> None:
    async with open_native(kept=10_000_000) as native, native.sandbox() as sandbox:
        await sandbox.exec("head -c 6000000 /dev/zero > large")
        await sandbox.snapshot()
        await sandbox.exec("head -c 6000000 /dev/zero > more")
        with pytest.raises(ExecError, match="kept already") as refused:
            await sandbox.snapshot()
        assert "forget" in refused.value.remedy
        assert (await sandbox.exec("wc -c < more")).stdout == b"6000000\n"
        for taken in native.snapshots():
            native.forget(taken.recipe)


async def test_a_paused_one_can_be_kept_and_stays_paused(native: Any) -> None:
    """As when a partial rollout moves to another machine."""
    async with native.sandbox() as sandbox:
        await sandbox.start("while echo . >> ticks; do sleep 0.01; done")
        while not (await sandbox.exec("test -s ticks")).ok:
            pass
        await sandbox.pause()
        kept = await sandbox.snapshot()
        async with native.sandbox(kept) as later, sandbox.fork(2) as children:
            first = await later.read("ticks")
            assert [await child.read("ticks") for child in children] == [first] * 2, "nothing ran meanwhile"
        with pytest.raises(DispatchError, match="is paused"):
            await sandbox.read("ticks")
        await sandbox.resume()
        while len(await sandbox.read("ticks")) == len(first):
            pass


async def test_who_is_paused_while_it_is_kept_stands_still(native: Any) -> None:
    async with native.sandbox() as sandbox:
        await sandbox.start("while echo . >> ticks; do :; done")
        for _ in range(5):
            await together(sandbox.snapshot, sandbox.pause)
            sizes = []
            for _ in range(2):
                async with sandbox.fork(1) as (child,):
                    sizes.append((await child.exec("stat -c %s ticks")).stdout)
            assert sizes[0] == sizes[1]
            await sandbox.resume()


async def test_forks_have_limits_and_network_of_their_parent(native: Any) -> None:
    async with native.sandbox(limits=Limits(pids=20, network="on")) as sandbox:
        if hasattr(sandbox, "set_network"):
            await sandbox.set_network("off")
        async with sandbox.fork(2) as children:
            for child in children:
                bomb = await child.exec("for i in $(seq 60); do sleep 30 & done; wait", timeout=60)
                assert b"fork" in bomb.stderr
                tried = await child.exec("exec 3<>/dev/tcp/198.51.100.1/80 || echo closed", timeout=60)
                assert not tried.timed_out
        assert native.snapshots() == ()
    assert list(await native.sandboxes()) == []


async def test_how_copies_were_served(native: Any) -> None:
    recipe = Recipe(stages=(Stage("setup", ("sleep 0.1; touch made",)),))
    async with native.sandbox(recipe) as sandbox, sandbox.fork(2) as children:
        for child in children:
            assert (child.served.kind, child.served.stage) == ("forked", "snapshot")
            assert child.served.cold_seconds == sandbox.served.cold_seconds >= 0.1
        kept = await sandbox.snapshot()
        async with native.sandbox(kept) as later:
            assert later.served.kind == "layer"
        native.forget(kept)


async def test_a_fork_that_fails_leaves_nothing(native: Any) -> None:
    async with native.sandbox() as sandbox:
        for number in (-1, 1.5, "2"):
            with pytest.raises(UsageError):
                await enter(sandbox.fork(number))
        async with sandbox.fork(0) as none:
            assert list(none) == []
        with pytest.raises(ZeroDivisionError):
            async with sandbox.fork(3):
                raise ZeroDivisionError
        with anyio.move_on_after(0.003):
            async with sandbox.fork(32):
                await anyio.sleep(10)
        assert list(await native.sandboxes()) == [sandbox.id]
        assert native.snapshots() == ()
        assert (await sandbox.exec("echo usable")).stdout == b"usable\n"
    assert native.node.layers.size == 0


async def test_marks_of_the_overlay_cannot_be_forged(native: Any) -> None:
    """Links that a sandbox writes cannot lead out of the layers of its forks."""
    forge = r"""
import os
os.mkdir("d")
for name in ("opaque", "redirect", "metacopy", "whiteout", "origin"):
    for kind in ("trusted", "user"):
        for path in ("d", "/usr/share/perl5", "/dev/shm"):
            try:
                os.setxattr(path, f"{kind}.overlay.{name}", b"/etc")
                print("set", kind, name, path)
            except OSError:
                pass
for path in ("white", "/usr/share/white"):
    try:
        os.mknod(path, 0o20000, 0)
        print("device", path)
    except OSError:
        pass
"""
    async with native.sandbox() as sandbox:
        said = (await sandbox.exec(["python3", "-c", forge])).stdout.decode()
        assert "trusted" not in said
        assert "device" not in said
        before = await _seen(sandbox, "find d /usr/share/perl5 -printf '%M %u %s %p\\n' | sort")
        await sandbox.start("sleep 1000")
        recipe = await sandbox.snapshot()
        async with native.sandbox(recipe) as copy:
            assert await _seen(copy, "find d /usr/share/perl5 -printf '%M %u %s %p\\n' | sort") == before


async def test_nothing_is_left_when_the_owner_is_killed_while_copying(tmp_path: Path) -> None:
    program = tmp_path / "owner.py"
    program.write_text(
        "import anyio, dutyfree, os, signal\n"
        "async def main():\n"
        "    async with dutyfree.open('native') as n, n.sandbox() as s:\n"
        "        await s.exec('head -c 200000000 /dev/zero > large'); await s.start('sleep 1000')\n"
        "        async with anyio.create_task_group() as g:\n"
        "            g.start_soon(s.snapshot)\n"
        "            await anyio.sleep(0.01); print(n.node.launcher.pid, flush=True)\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "anyio.run(main)\n"
    )
    done = await anyio.run_process([sys.executable, str(program)], check=False, stderr=subprocess.STDOUT)
    launcher = int(done.stdout.split()[0])
    with anyio.fail_after(60):
        await anyio.to_thread.run_sync(_await_end, launcher, abandon_on_cancel=True)


def _await_end(process: int) -> None:
    while counts.started(process) or _copies_of(process):
        time.sleep(0.02)


def _copies_of(launcher: int) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            found.append(path.read_text())
    copies = [text.split() for text in found if "(dutyfree-copy)" in text]
    return [words[0] for words in copies if words[3] == str(launcher) and words[2] not in "ZX"]
