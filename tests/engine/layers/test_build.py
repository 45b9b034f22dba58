"""Stages: each prefix is built once per machine, whole or not at all; errors say what to do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import dutyfree
from dutyfree import recipes
from dutyfree.contract import Recipe, Stage
from dutyfree.contract.errors import CreateError, StageError
from dutyfree.engine.images import rootfs
from dutyfree.engine.layers.build_request import layer_key
from dutyfree.engine.layers.run_stage import LOGS
from dutyfree.engine.store.store import Store
from tests.awaiting import enter, together, until
from tests.engine import counts
from tests.opening import open_native
from tests.processes import speaking_python

pytestmark = [pytest.mark.usefixtures("cache"), pytest.mark.root("stages lie on the disk with root only")]


def setup(*commands: str, **more: Any) -> Stage:
    return Stage("setup", commands=commands, **more)


async def _said(recipe: Recipe, command: str) -> bytes:
    async with open_native() as native, native.sandbox(recipe) as sandbox:
        return bytes((await sandbox.exec(command)).stdout)


async def _layers() -> list[str]:
    return [facts.key for facts in await anyio.to_thread.run_sync(Store().layers)]


async def test_a_prefix_is_made_once_and_shared() -> None:
    stamp = setup("date +%s%N > stamp")
    first = await _said(Recipe(stages=(stamp,)), "cat stamp")
    again = await _said(Recipe(stages=(stamp,)), "cat stamp")
    longer = await _said(Recipe(stages=(stamp, setup("cat stamp > copy"))), "cat stamp copy")
    other = await _said(Recipe(stages=(stamp, setup("rm stamp; echo other"))), "ls")
    assert first == again
    assert longer == first * 2
    assert other == b""
    assert len(await _layers()) == 3


async def test_what_the_disk_has_is_not_called_cold() -> None:
    """Also in a process that has not opened the image before."""
    recipe = Recipe(stages=(Stage("repository", ("touch a",)), setup("touch b")))
    told = []
    for _ in range(2):
        async with open_native() as native, native.sandbox(recipe) as sandbox:
            told.append((sandbox.served.kind, sandbox.served.stage))
            assert sandbox.served.cold_seconds >= sandbox.served.seconds > 0
    async with open_native() as native, native.group(recipe, 2) as group:
        told += [(sandbox.served.kind, sandbox.served.stage) for sandbox in group]
    assert told == [("cold", "none"), ("layer", "setup"), ("layer", "setup"), ("forked", "setup")]


async def test_a_layer_on_the_disk_shows_what_the_stage_left() -> None:
    change = setup(
        "mkdir d; echo 1 > d/f; ln d/f d/hard; ln -s f d/link; chmod 711 d; chown 7:8 d/f; mkfifo pipe",
        "rm -r /usr/share/perl5; mkdir /usr/share/perl5; echo > /usr/share/perl5/only; rm /usr/bin/env",
        "chmod 700 /usr/bin/tail; mv /usr/bin/head /usr/bin/first; echo left > /dev/shm/left",
    )
    see = r"""find . -type f -printf '%P %m %U %G %n\n' -o -printf '%P %y %m %U %G %l\n' | sort
    ls /usr/share/perl5 /usr/bin/env /usr/bin/head 2>&1
    stat -c %a /usr/bin/tail; sha256sum < /usr/bin/tail; sha256sum < /usr/bin/first; ls /dev/shm"""
    recipe = Recipe(stages=(change, setup("echo 2 >> d/f; rm d/link")))
    async with open_native() as native, native.sandbox(recipe) as sandbox:
        in_memory = (await sandbox.exec(see)).stdout
    assert await _said(recipe, see) == in_memory
    assert b"only" in in_memory
    assert b"left" not in in_memory


async def test_memory_goes_when_the_disk_has_it() -> None:
    recipe = Recipe(stages=(setup("head -c 9000000 /dev/zero > a"), setup("head -c 9000000 /dev/zero > b")))
    async with open_native() as native:
        await native.prepare(recipe)
        await settled(native)
        assert native.node.layers.size == 0
        async with native.sandbox(recipe) as sandbox:
            assert (await sandbox.exec("cat a b | wc -c")).stdout == b"18000000\n"
            await sandbox.reset()
            assert (await sandbox.exec("cat a b | wc -c")).stdout == b"18000000\n"


async def test_many_ask_and_one_makes(tmp_path: Path) -> None:
    """Among the tasks of a process, and among processes."""
    program = tmp_path / "ask.py"
    program.write_text(
        "import anyio, dutyfree\n"
        "from dutyfree import Recipe, Stage\n"
        "recipe = Recipe(stages=(Stage('setup', commands=('sleep 0.5; date +%N > stamp',)),))\n"
        "async def ask(native):\n"
        "    async with native.sandbox(recipe) as sandbox: print((await sandbox.read('stamp')).decode())\n"
        "async def main():\n"
        "    async with dutyfree.open('native') as native, anyio.create_task_group() as group:\n"
        "        for _ in range(3): group.start_soon(ask, native)\n"
        "anyio.run(main)\n"
    )
    said: list[bytes] = []

    async def run() -> None:
        said.append((await anyio.run_process([sys.executable, str(program)])).stdout)

    await together(*[run] * 3)
    assert len(b"".join(said).split()) == 9
    assert len(set(b"".join(said).split())) == 1


async def test_a_maker_that_dies_leaves_nothing(cache: Path) -> None:
    program = """
    import anyio, dutyfree
    from dutyfree import Recipe, Stage
    async def main():
        async with dutyfree.open("native") as native:
            print("open", flush=True)
            await native.prepare(Recipe(stages=(Stage("setup", commands=("echo 1 > a; sleep 60",)),)))
    anyio.run(main)
    """

    def kill() -> None:
        with speaking_python(program) as (process, _):
            time.sleep(0.3)
            process.kill()

    await anyio.to_thread.run_sync(kill)
    assert await _layers() == []
    recipe = Recipe(stages=(setup("echo 1 > a; sleep 60"),))
    async with open_native() as native:
        with anyio.move_on_after(0.5):
            await native.prepare(recipe)
        assert list(await native.sandboxes()) == []
        async with native.sandbox(Recipe(stages=(setup("echo 2 > a"),))) as sandbox:
            assert await sandbox.read("a") == b"2\n"
    assert len(await _layers()) == 1
    await anyio.to_thread.run_sync(Store().collect, 1 << 40)
    left = await anyio.to_thread.run_sync(os.listdir, cache / "layers/making")
    assert left == [".lock"]


async def test_many_stages_may_fail_at_once() -> None:
    """More builds than worker threads: no build blocks another one that it waits for."""
    told = []

    async def one(native: Any, number: int) -> None:
        with pytest.raises(CreateError, match="ended with 3"):
            await native.prepare(Recipe(stages=(setup(f"sleep 1; exit 3 # {number}"),)))
        told.append(number)

    async with open_native() as native:
        with anyio.fail_after(100):
            await together(*(partial(one, native, number) for number in range(48)))
    assert len(told) == 48


async def busy() -> int:
    """PID 1 of the only sandbox with a running process, once there is one."""

    def look() -> list[int]:
        return [init for init in counts.sandboxes(os.getpid()) if counts.children(init)]

    return int((await until(lambda: anyio.to_thread.run_sync(look))).pop())


async def sleepers() -> list[int]:
    """The ``sleep`` processes of a stage, once there are some."""

    def look() -> list[int]:
        shells = [child for init in counts.sandboxes(os.getpid()) for child in counts.children(init)]
        asleep = counts.processes(("sleep",))
        return [child for shell in shells for child in counts.children(shell) if child in asleep]

    return list(await until(lambda: anyio.to_thread.run_sync(look)))


async def wake_all() -> None:
    while True:
        for sleeper in await sleepers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(sleeper, signal.SIGKILL)


async def test_a_builder_that_dies_is_a_failed_creation() -> None:
    recipe = Recipe(stages=(setup("true"), setup("sleep 100")))
    async with open_native() as native:
        await native.prepare(Recipe(stages=recipe.stages[:1]))
        making = asyncio.create_task(native.prepare(recipe))
        os.kill(await busy(), signal.SIGKILL)
        with pytest.raises(CreateError, match=r"stage 'setup' \(number 2\) could not be made: .* died"):
            await making


async def test_who_comes_while_a_stage_is_given_up_is_served() -> None:
    recipe = Recipe(stages=(setup("sleep 1000; echo 1 > a"),))
    async with open_native() as native:
        first = asyncio.create_task(native.prepare(recipe))
        await sleepers()
        first.cancel()
        await asyncio.sleep(0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wake_all)
            async with native.sandbox(recipe) as sandbox:
                assert await sandbox.read("a") == b"1\n"
            tasks.cancel_scope.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first


async def test_what_is_forgotten_meanwhile_is_still_stood_upon() -> None:
    """A pool evicts a prefix while a longer one is built on it."""
    first, second = setup("echo 1 > a"), setup("sleep 1000; cat a a > b")
    recipe, shorter = Recipe(stages=(first, second)), Recipe(stages=(first,))
    async with open_native() as native:
        await native.prepare(shorter)
        await settled(native)
        making = asyncio.create_task(native.prepare(recipe))
        (sleeper,) = await sleepers()
        native.node.builder.prefixes.forget(shorter.key(1))
        os.kill(sleeper, signal.SIGKILL)
        await making
        await settled(native)
        async with native.sandbox(recipe) as sandbox:
            assert (await sandbox.exec("cat a b")).stdout == b"1\n1\n1\n"
    assert await _said(recipe, "cat a b") == b"1\n1\n1\n"


async def test_who_asks_at_the_same_time_shares_what_the_disk_has() -> None:
    recipe = Recipe(stages=(setup("echo 1 > a"), setup("echo 2 > b")))
    await _said(recipe, "true")
    async with open_native() as native:
        await together(*(partial(native.prepare, recipe) for _ in range(16)))
        assert native.node.builder.leased == 2


# --- The budget ---------------------------------------------------------------------------------------------


def large(name: str) -> Stage:
    return setup(f"head -c 300000 /dev/urandom > {name}")


async def host() -> str:
    return await anyio.to_thread.run_sync(rootfs.host_identity)


async def settled(native: Any) -> None:
    """Wait until nothing is written to disk or removed from it."""
    with anyio.fail_after(60):
        await native.node.builder.wait_until_idle()


async def later(cache: Path) -> None:
    """Wait for the next tick of the file system's clock, so that later uses have a later time."""

    def now() -> int:
        (cache / "clock").touch()
        return (cache / "clock").stat().st_mtime_ns

    before = await anyio.to_thread.run_sync(now)
    while await anyio.to_thread.run_sync(now) == before:
        pass


async def test_the_last_used_stay_on_the_disk_and_those_in_use(cache: Path) -> None:
    recipes = [Recipe(stages=(large(str(number)),)) for number in range(6)]
    async with open_native(budget={"disk": 1_000_000}) as native:
        names = [layer_key(recipe.key(1), await host()) for recipe in recipes]
        await native.prepare(recipes[0])
        await settled(native)
        async with native.sandbox(recipes[0]) as held:
            for number in (1, 2, 3, 1, 4, 1, 5):
                await native.prepare(recipes[number])
                await settled(native)
                await later(cache)
            assert len((await held.exec("cat 0")).stdout) == 300_000
            assert set(await _layers()) == {names[number] for number in (0, 1, 5)}


async def test_what_lies_in_memory_alone_is_bounded_too() -> None:
    async with open_native(kept=1_000_000) as native:
        async with native.sandbox() as sandbox:
            image = (await sandbox.snapshot()).image
        recipes = [Recipe(image, (large(str(number)),)) for number in range(6)]
        async with native.sandbox(recipes[0]) as held:
            for recipe in recipes:
                await native.prepare(recipe)
                assert native.node.layers.size < 1_400_000
            assert len((await held.exec("cat 0")).stdout) == 300_000
        async with native.sandbox(recipes[1]) as sandbox:
            assert len((await sandbox.exec("cat 1")).stdout) == 300_000


async def test_a_chain_is_shortened_from_its_end(cache: Path) -> None:
    """Use of a layer counts as use of the layers below it."""
    stages = tuple(large(str(number)) for number in range(3))
    for length in (3, 1):
        await _said(Recipe(stages=stages[:length]), "true")
        await later(cache)
    await _said(Recipe(stages=stages), "true")
    await anyio.to_thread.run_sync(Store().collect, 700_000)
    async with open_native() as native:
        wanted = [layer_key(Recipe(stages=stages).key(number), await host()) for number in (1, 2)]
        assert sorted(await _layers()) == sorted(wanted)
        await native.prepare(Recipe(stages=stages[:1]))
        native.node.builder.prefixes.forget(Recipe(stages=stages).key(1))
        await settled(native)
    assert sorted(await _layers()) == sorted(wanted)  # the second needs the first


async def test_many_recipes_need_few_open_files() -> None:
    """Layers that no sandbox uses are closed, and found on disk again."""
    base = setup("echo 1 > a")
    recipes = [Recipe(stages=(base, setup(f"echo {number} > b"))) for number in range(60)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with open_native() as native:
        most = max(map(int, os.listdir("/proc/self/fd"))) + 65
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
        try:
            for recipe in recipes:
                await native.prepare(recipe)
            await settled(native)
            assert native.node.builder.leased <= most // 4 + 2
            async with native.sandbox(recipes[0]) as sandbox:
                assert (sandbox.served.kind, sandbox.served.stage) == ("layer", "setup")
                assert (await sandbox.exec("cat a b")).stdout == b"1\n0\n"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(await _layers()) == 61


async def test_a_layer_that_the_disk_does_not_take_is_told_and_used(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await anyio.run_process(["mkdir", str(cache)])
    await anyio.run_process(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(cache)])
    try:
        async with open_native() as native:
            recipe = Recipe(stages=(setup("head -c 3000000 /dev/zero > a"),))
            async with native.sandbox(recipe) as sandbox:
                assert len(await sandbox.read("a")) == 3_000_000
                await settled(native)
        assert "'setup' is not kept on disk, only in memory" in caplog.text
    finally:
        await anyio.run_process(["umount", "-l", str(cache)])


async def test_what_one_run_left_is_never_put_upon_another(cache: Path) -> None:
    """Neither layers on a stage that did not fit on disk, nor those that others built on theirs."""
    noise = setup("head -c 3000000 /dev/urandom > noise")
    both = Recipe(stages=(noise, setup("sha256sum noise > sum")))
    await anyio.run_process(["mkdir", str(cache)])
    await anyio.run_process(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(cache)])
    try:
        assert b"noise: OK" in await _said(both, "sha256sum -c sum")
        assert await _layers() == []
        async with open_native() as native:
            await native.prepare(Recipe(stages=(noise,)))
            await settled(native)
            await anyio.run_process(["mount", "-o", "remount,size=50m", str(cache)])
            assert b"noise: OK" in await _said(both, "sha256sum -c sum")
            assert len(await _layers()) == 2
            async with native.sandbox(both) as sandbox:
                assert (await sandbox.exec("sha256sum -c sum")).ok
    finally:
        await anyio.run_process(["umount", "-l", str(cache)])


async def test_a_failing_stage_says_where_and_keeps_its_log(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "hunter2-hunter2")
    recipe = Recipe(
        stages=(setup("true"), setup("echo early", "echo $TOKEN; echo why >&2; exit 4", secrets=("TOKEN",)))
    )
    async with open_native() as native:
        for _ in range(2):  # failures are not cached
            with pytest.raises(CreateError, match=r"'setup'.*exit 4.*ended with 4: why") as failed:
                await native.prepare(recipe)
    assert "hunter2" not in str(failed.value)
    log = Path(failed.value.remedy.split()[-1])
    assert log.is_relative_to(cache)
    mode, text = await anyio.to_thread.run_sync(lambda: (log.stat().st_mode, log.read_text()))
    assert mode & 0o77 == 0
    assert "early" in text
    assert "why" in text
    assert "hunter2" not in text
    assert len(await _layers()) == 1


async def test_what_came_before_a_stage_that_fails_is_there_the_next_time() -> None:
    """After a fix of the last stage, the others do not run again."""
    long = setup("date +%s%N > stamp; for i in $(seq 2000); do echo $i > file$i; done")
    fails, works = (Recipe(stages=(long, setup(f"cat stamp; {last}"))) for last in ("false", "true"))
    with pytest.raises(StageError):
        async with open_native() as native:
            await enter(native.sandbox(fails))
    assert len(await _layers()) == 1
    async with open_native() as native, native.sandbox(works) as sandbox:
        assert (sandbox.served.kind, sandbox.served.stage) == ("layer", "setup")


@pytest.mark.parametrize(
    ("stage", "hint"),
    [
        (recipes.pip("pytest"), "virtual environment"),
        (recipes.repository("file:///nowhere/project"), "copy a repository of this machine"),
        (recipes.apt("git"), "use another image"),
        (recipes.repository("http://127.0.0.1:9/project"), "169.254.1.2 there"),
        (recipes.checkout("0" * 40), "must create the directory"),
    ],
)
async def test_usual_mistakes_get_a_hint(stage: Stage, hint: str, tmp_path: Path) -> None:
    manages = tmp_path / "EXTERNALLY-MANAGED"
    await anyio.to_thread.run_sync(manages.write_text, "[externally-managed]\nError=no\n")
    beside = "$(python3 -c 'import sysconfig; print(sysconfig.get_path(\"stdlib\"))')"
    managed = setup(f"mv mark {beside}/EXTERNALLY-MANAGED", files={"mark": manages})
    async with open_native() as native:
        with pytest.raises(StageError) as told:
            await native.prepare(Recipe(stages=(managed, stage)))
    if "No module named pip" in told.value.message:
        pytest.skip("pip is missing; to enable it: apt-get install python3-pip")
    assert hint in told.value.remedy
    assert "all that it printed is in" in told.value.remedy


@pytest.mark.parametrize("pooled", [False, True])
async def test_a_stage_that_hangs_is_ended(pooled: bool) -> None:
    hangs = Recipe(stages=(setup("echo begun; echo careful >&2; sleep 1000"),))
    for seconds in (0.5, 5, 50):  # a slow machine needs longer until it has begun
        policy = {"deepest_layer": 0} if pooled else {}
        async with open_native(longest_stage=seconds, policy=policy) as native:
            if pooled:
                await native.pooled()
            with pytest.raises(StageError, match=f"was stopped after {seconds} s") as told:
                await enter(native.sandbox(hangs))
        if told.value.output == "careful\nbegun":
            break
    assert f"after {seconds} s: careful\nbegun" in str(told.value)


async def test_the_last_logs_are_kept(cache: Path) -> None:
    async with dutyfree.open("bare") as bare:
        for _ in range(LOGS + 3):
            with pytest.raises(CreateError):
                await enter(bare.sandbox(Recipe(stages=(setup("false"),))))
    kept = await anyio.to_thread.run_sync(os.listdir, cache / "logs")
    assert len(kept) == LOGS


async def test_files_that_change_meanwhile_make_no_layer(tmp_path: Path) -> None:
    """A layer has the files of its key, or does not exist."""
    file = tmp_path / "file"
    recipe = Recipe(stages=(setup("sleep 1000; true"), setup("true", files={"file": file})))
    await anyio.to_thread.run_sync(file.write_text, "1")
    async with open_native() as native:
        making = asyncio.create_task(native.prepare(recipe))
        (sleeper,) = await sleepers()
        await anyio.to_thread.run_sync(file.write_text, "2")
        os.kill(sleeper, signal.SIGKILL)
        with pytest.raises(CreateError, match="changed while it was built"):
            await making
        async with native.sandbox(recipe) as sandbox:
            assert await sandbox.read("file") == b"2"
    await anyio.to_thread.run_sync(file.write_text, "1")
    assert await _said(recipe, "cat file") == b"1"


async def test_secrets_enter_neither_key_nor_layer(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = setup('test "$TOKEN" && echo ${#TOKEN} > length', secrets=("TOKEN",))
    with pytest.raises(CreateError, match="needs the secret TOKEN"):
        await _said(Recipe(stages=(stage,)), "true")
    monkeypatch.setenv("TOKEN", "hunter2-hunter2")
    key = Recipe(stages=(stage,)).key()
    assert (
        key != Recipe(stages=(Stage("setup", stage.commands),)).key()
    )  # a layer without the secret has another key
    assert await _said(Recipe(stages=(stage,)), "cat length; printenv TOKEN") == b"15\n"
    found = await anyio.run_process(["grep", "-r", "hunter2-hunter2", str(cache)], check=False)
    assert found.returncode == 1
    monkeypatch.setenv("TOKEN", "another")
    assert Recipe(stages=(stage,)).key() == key


async def test_stage_seconds_are_told_and_remembered() -> None:
    recipe = Recipe(stages=(setup("true"), setup("sleep 0.3")))
    told = []
    for _ in range(2):
        async with open_native() as native:
            await native.prepare(recipe)
            told.append([native.stage_seconds[recipe.key(length)] for length in (1, 2)])
    assert told[0] == told[1]
    assert told[0][0] > 0
    assert told[0][1] >= 0.3


async def test_long_recipes_work() -> None:
    stages = tuple(setup(f"echo {number} >> list") for number in range(40))
    for _ in range(2):
        assert (await _said(Recipe(stages=stages), "cat list | wc -l")) == b"40\n"
