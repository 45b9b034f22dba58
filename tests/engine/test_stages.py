"""Stages: every prefix made once per machine, whole or not at all; failures that say what to do."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import dutyfree
from dutyfree.contract import Recipe, Stage
from dutyfree.engine.images.store import Store
from dutyfree.errors import CreateError

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(os.geteuid() != 0, reason="stages lie on the disk with root only; run as root"),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def setup(*commands: str, **more: Any) -> Stage:
    return Stage("setup", commands=commands, **more)


def opened(**options: Any) -> Any:
    return dutyfree.open("native", **options)


async def _said(recipe: Recipe, command: str) -> bytes:
    async with opened() as native, native.sandbox(recipe) as sandbox:
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
    """Though a process opens the image for the first time."""
    recipe = Recipe(stages=(Stage("repository", ("touch a",)), setup("touch b")))
    told = []
    for _ in range(2):
        async with opened() as native, native.sandbox(recipe) as sandbox:
            told.append((sandbox.served.kind, sandbox.served.stage))
    async with opened() as native, native.group(recipe, 2) as group:
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
    async with opened() as native, native.sandbox(recipe) as sandbox:
        in_memory = (await sandbox.exec(see)).stdout
    assert await _said(recipe, see) == in_memory
    assert b"only" in in_memory
    assert b"left" not in in_memory


async def test_memory_goes_when_the_disk_has_it() -> None:
    recipe = Recipe(stages=(setup("head -c 9000000 /dev/zero > a"), setup("head -c 9000000 /dev/zero > b")))
    async with opened() as native:
        await native.prepare(recipe)
        with anyio.fail_after(20):
            await asyncio.wait([making.task for making in native._stages._making.values()])
        assert native._layers.size == 0
        async with native.sandbox(recipe) as sandbox:
            assert (await sandbox.exec("cat a b | wc -c")).stdout == b"18000000\n"
            await sandbox.reset()
            assert (await sandbox.exec("cat a b | wc -c")).stdout == b"18000000\n"


async def test_many_ask_and_one_makes(tmp_path: Path) -> None:
    """Tasks of a process, and processes."""
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

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(run)
    assert len(b"".join(said).split()) == 9
    assert len(set(b"".join(said).split())) == 1


async def test_a_maker_that_dies_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    program = tmp_path / "die.py"
    program.write_text(
        "import anyio, dutyfree\n"
        "from dutyfree import Recipe, Stage\n"
        "async def main():\n"
        "    async with dutyfree.open('native') as native:\n"
        "        print('open', flush=True)\n"
        "        await native.prepare(Recipe(stages=(Stage('setup', commands=('echo 1 > a; sleep 60',)),)))\n"
        "anyio.run(main)\n"
    )

    def kill() -> None:
        process = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.3)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()

    await anyio.to_thread.run_sync(kill)
    assert await _layers() == []
    recipe = Recipe(stages=(setup("echo 1 > a; sleep 60"),))
    async with opened() as native:
        with anyio.move_on_after(0.5):
            await native.prepare(recipe)
        assert list(await native.sandboxes()) == []
        async with native.sandbox(Recipe(stages=(setup("echo 2 > a"),))) as sandbox:
            assert await sandbox.read("a") == b"2\n"
    assert len(await _layers()) == 1
    await anyio.to_thread.run_sync(Store().collect, 1 << 40)
    left = await anyio.to_thread.run_sync(os.listdir, cache / "layers/making")
    assert left == [".lock"]


async def test_a_failing_stage_says_where_and_keeps_its_log(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "hunter2-hunter2")
    recipe = Recipe(
        stages=(setup("true"), setup("echo early", "echo $TOKEN; echo why >&2; exit 4", secrets=("TOKEN",)))
    )
    async with opened() as native:
        for _ in range(2):  # a failure is not kept
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


async def test_secrets_enter_neither_key_nor_layer(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = setup('test "$TOKEN" && echo ${#TOKEN} > length', secrets=("TOKEN",))
    with pytest.raises(CreateError, match="wants the secret TOKEN"):
        await _said(Recipe(stages=(stage,)), "true")
    monkeypatch.setenv("TOKEN", "hunter2-hunter2")
    assert Recipe(stages=(stage,)).key() == Recipe(stages=(Stage("setup", commands=stage.commands),)).key()
    assert await _said(Recipe(stages=(stage,)), "cat length; printenv TOKEN") == b"15\n"
    found = await anyio.run_process(["grep", "-r", "hunter2-hunter2", str(cache)], check=False)
    assert found.returncode == 1


async def test_stage_seconds_are_told_and_remembered() -> None:
    recipe = Recipe(stages=(setup("true"), setup("sleep 0.3")))
    told = []
    for _ in range(2):
        async with opened() as native:
            await native.prepare(recipe)
            told.append([native.stage_seconds[recipe.key(length)] for length in (1, 2)])
    assert told[0] == told[1]
    assert told[0][0] > 0
    assert told[0][1] >= 0.3


async def test_long_recipes_work() -> None:
    stages = tuple(setup(f"echo {number} >> list") for number in range(40))
    for _ in range(2):
        assert (await _said(Recipe(stages=stages), "cat list | wc -l")) == b"40\n"
