"""Poisoned layers: ambiguous keys, layers that break the store, secrets that stay behind."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import dutyfree
from dutyfree import Recipe, Stage, recipes
from dutyfree.contract.errors import ActionError, CreateError, StageError, UsageError
from dutyfree.engine.layers import run_stage
from dutyfree.engine.store.store import Store
from tests.awaiting import enter
from tests.opening import open_native
from tests.processes import ran

pytestmark = pytest.mark.usefixtures("cache")
rooted = pytest.mark.root("stages lie on the disk with root only")


def test_layers_are_closed_to_other_users_of_the_host(cache: Path) -> None:
    """With any umask of the owner, and any mode that the stage set on the directory."""

    def make(tree: Path) -> tuple[int, int, int]:
        tree.parent.chmod(0o777)
        (tree / "root-only").touch(0o4755)
        return 0, 1, 0

    before = os.umask(0)
    try:
        Store().obtain("stage:" + "0" * 64, make).close()
    finally:
        os.umask(before)
    layer = Store().path("stage:" + "0" * 64)
    closed = [path for path in (layer, *layer.parents) if path.is_relative_to(cache / "layers")]
    assert [path.stat().st_mode & 0o777 for path in closed] == [0o700] * 4, closed
    assert (layer / "tree" / "root-only").exists()


# --- Keys ---------------------------------------------------------------------------------------------------


@rooted
@pytest.mark.native
async def test_files_that_change_under_their_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copied files are not those of the key: no other request may get the layer."""
    source = tmp_path / "source"
    await anyio.to_thread.run_sync(source.mkdir)
    await anyio.to_thread.run_sync((source / "file").write_text, "honest")
    recipe = Recipe(stages=(await anyio.to_thread.run_sync(recipes.repository, source),))
    apply = run_stage.apply

    async def meanwhile(*arguments: Any) -> str:
        await anyio.to_thread.run_sync((source / "file").write_text, "poison")
        return await apply(*arguments)

    monkeypatch.setattr(run_stage, "apply", meanwhile)
    async with open_native() as native:
        with pytest.raises(CreateError, match="files changed while it was built"):
            await native.prepare(recipe)
        assert native.node.layers.size == 0
    monkeypatch.setattr(run_stage, "apply", apply)
    await anyio.to_thread.run_sync((source / "file").write_text, "honest")
    async with open_native() as native, native.sandbox(recipe) as sandbox:
        assert await sandbox.read("repository/file") == b"honest"


async def test_files_are_copied_in_one_order(native: Any, tmp_path: Path) -> None:
    """The key does not depend on the order in which they were named."""

    def prepare() -> None:
        (tmp_path / "tree").mkdir()
        (tmp_path / "tree/file").write_text("of the tree")
        (tmp_path / "file").write_text("alone")

    await anyio.to_thread.run_sync(prepare)
    one = {"t": tmp_path / "tree", "t/file": tmp_path / "file"}
    recipe, other = (Recipe(stages=(Stage("files", files=x),)) for x in (one, dict(reversed(one.items()))))
    assert await anyio.to_thread.run_sync(recipe.key) == await anyio.to_thread.run_sync(other.key)
    async with native.sandbox(other) as sandbox:
        assert await sandbox.read("t/file") == b"alone"


def test_a_pipe_among_the_files_holds_up_no_key(tmp_path: Path) -> None:
    before = Recipe(stages=(recipes.repository(tmp_path),)).key()
    os.mkfifo(tmp_path / "pipe")
    keys: list[str] = []
    thread = threading.Thread(
        target=lambda: keys.append(Recipe(stages=(recipes.repository(tmp_path),)).key()), daemon=True
    )
    thread.start()
    thread.join(60)
    assert keys == [before]  # and it is not copied


def test_keys_tell_recipes_apart(tmp_path: Path) -> None:
    """However their parts are split and joined."""
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("1")

    def setup(*commands: Any, **more: Any) -> Stage:
        return Stage("setup", commands, **more)

    told = [
        (setup("a", "b"),),
        (setup("a"), setup("b")),
        (setup(("a", "b")),),
        (setup("('a', 'b')"),),
        (setup("a\nb"),),
        (setup("a", "b", secrets=("A",)),),
        (setup("a", "b", secrets=("A', 'B",)),),
        (setup("a", "b", secrets=("A", "B")),),
        (setup("a", "b", files={"x": tmp_path / "a"}),),
        (setup("a", "b", files={"y": tmp_path / "a"}),),
        (setup("a", "b", files={"x": tmp_path / "a", "y": tmp_path / "b"}),),
        (setup("a", "b", files={"x', 'y": tmp_path / "a"}),),
        (Stage("files", ("a", "b")),),
    ]
    keys = [Recipe(stages=one).key() for one in told] + [Recipe("None").key(), Recipe().key()]
    assert len(set(keys)) == len(keys)


# --- Layers -------------------------------------------------------------------------------------------------

DEEP = "python3 -c \"import os\nfor _ in range({}): os.mkdir('d'); os.chdir('d')\""


@rooted
@pytest.mark.native
async def test_deep_trees_do_not_break_the_store() -> None:
    """Such a layer can still be measured, packed and removed, and is never half written."""
    deep = Recipe(stages=(Stage("setup", (DEEP.format(1500),)),))
    async with open_native() as native:
        async with native.sandbox(deep) as sandbox:
            assert (await sandbox.exec("cd d/d/d && echo fine")).stdout == b"fine\n"
        async with native.sandbox() as sandbox:
            await sandbox.exec(DEEP.format(1500))
            with pytest.raises(ActionError, match="File name too long"):
                await sandbox.snapshot("deep")
    collected = await anyio.to_thread.run_sync(Store().collect)
    assert (collected.layers, collected.half) == (0, 0)
    async with open_native() as native:  # which removes leftovers on close
        await native.prepare(Recipe(stages=(Stage("setup", ("echo > fine",)),)))


WRITER = """
import mmap, os
if os.fork() == 0:
    os.setsid()
    file = open("written", "w+b"); file.truncate(4096)
    mapped, unnamed, number = mmap.mmap(file.fileno(), 4096), os.open(".", os.O_TMPFILE | os.O_RDWR), 0
    while True:
        number += 1
        mapped[0:8] = b"%08d" % (number % 10**8)
        os.pwrite(unnamed, b"x", 0)
"""


async def test_who_goes_on_writing_changes_no_layer(native: Any) -> None:
    """Neither a process that a stage left running, nor one in a snapshotted sandbox."""
    begun = "until grep -q '[1-9]' written; do sleep 0.02; done"
    start = "python3 -c '" + WRITER.replace("'", '"') + f"' > /dev/null 2>&1; {begun} 2> /dev/null"
    recipe = Recipe(stages=(Stage("setup", (start,)),))
    async with native.sandbox(recipe) as one, native.sandbox(recipe) as two, native.sandbox() as writing:
        await writing.exec(start)
        kept = await writing.snapshot()
        async with native.sandbox(kept) as three, native.sandbox(kept) as four:
            first = [await sandbox.read("written") for sandbox in (one, two, three, four)]
            await anyio.sleep(0.3)
            assert [await sandbox.read("written") for sandbox in (one, two, three, four)] == first
        native.forget(kept)
    assert (first[0], first[2]) == (first[1], first[3])


async def test_those_on_one_layer_do_not_meet_in_it(native: Any) -> None:
    """Through locks, pipes, sockets and access times of shared files."""
    make = "import os, socket; os.mkfifo('pipe'); socket.socket(socket.AF_UNIX).bind('socket')"
    stage = Stage("setup", (f'python3 -c "{make}"; echo x > file',))
    recipe = Recipe(stages=(stage,))
    hold = "import fcntl, time; held = open('file'); fcntl.flock(held, 2); print(flush=True); time.sleep(60)"
    async with native.sandbox(recipe) as one, native.sandbox(recipe) as two:
        holder = await one.start(["python3", "-c", hold])
        async for _ in holder.output():
            break
        before = (await two.exec("stat -c %x file")).stdout
        await one.exec("cat file; (echo left > pipe) > /dev/null 2>&1 &")
        await one.exec("python3 -c \"import socket; s = socket.socket(socket.AF_UNIX); s.bind('new')\"")
        assert (await two.exec("flock -n file echo free")).stdout == b"free\n"
        assert (await two.exec("timeout 0.5 cat pipe")).stdout == b""
        assert (await two.exec("stat -c %x file; ls new")).stdout == before


# --- Secrets ------------------------------------------------------------------------------------------------


def test_secrets_are_hidden_whole() -> None:
    secrets = {"A": "abcd", "B": "abcdefgh", "C": "-----\nfirst line\nsecond line\n", "D": "end\n", "E": ""}
    text = b"abcdefgh, abcd; + echo second line; first line\r\n end -----"
    hidden = run_stage.hide(text, secrets)
    for part in (b"efgh", b"abcd", b"second", b"first"):
        assert part not in hidden


@rooted
@pytest.mark.native
async def test_a_secret_stays_in_its_stage(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in processes that it left, in services, in another stage's log, or on disk."""
    monkeypatch.setenv("TOKEN", "hunter2-hunter2")
    stage = Stage("setup", ("(setsid sleep 1000 &) > /dev/null 2>&1; test $TOKEN",), secrets=("TOKEN",))
    service = dutyfree.Service("one", "exec sleep 1000")
    recipe = Recipe(
        stages=(stage, Stage("setup", ("cat /proc/*/environ > seen; env >> seen",))), services=(service,)
    )
    async with open_native() as native, native.sandbox(recipe) as sandbox:
        seen = await sandbox.exec("cat seen /proc/*/environ /proc/*/cmdline")
        assert b"PATH" in seen.stdout
        assert b"hunter2" not in seen.stdout
    found = await anyio.run_process(["grep", "-r", "hunter2", str(cache)], check=False)
    assert found.returncode == 1


def test_a_token_goes_to_its_own_server() -> None:
    """A repository can make git contact other hosts: by .lfsconfig, and by redirects."""
    (command, *_) = recipes.repository("https://example.org:8443/x.git", token="TOKEN").commands
    assert isinstance(command, str)
    fill = command.partition(" clone ")[0] + " credential fill"

    def password(host: str) -> str:
        asked = f"protocol=https\nhost={host}\n\n"
        done = ran(
            ["sh", "-c", fill],
            input=asked,
            env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", "TOKEN": "hunter2"},
        )
        return done.stdout

    assert "password=hunter2" in password("example.org:8443")
    for other in ("evil.example", "example.org", "example.org:8443.evil.example"):
        assert "hunter2" not in password(other)


def test_passwords_do_not_come_in_urls() -> None:
    with pytest.raises(UsageError, match=r"contains a password.*token="):
        recipes.repository("https://user:hunter2@example.org/x.git")
    with pytest.raises(UsageError, match="not the name of a variable"):
        recipes.repository("https://example.org/x.git", token="ghp_x; echo")
    recipes.repository("https://user@example.org/x.git")
    recipes.repository("git@example.org:x.git")


def make_later(logs: Path) -> None:
    """As if the clock had gone back, or all were of the same tick."""
    for path in logs.iterdir():
        os.utime(path, (4e9, 4e9))


@rooted
@pytest.mark.native
async def test_logs_of_what_fails_again_and_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_stage, "LOGS", 3)
    monkeypatch.setattr(run_stage, "LOG_BYTES", 10_000)
    async with open_native() as native:
        for number in range(6):
            stage = Stage("setup", (f"head -c {2000 * number} /dev/zero; exit 1",))
            with pytest.raises(StageError, match="all that it printed") as failed:
                await native.prepare(Recipe(stages=(stage,)))
            assert await anyio.Path(failed.value.remedy.split()[-1]).exists()
            await anyio.to_thread.run_sync(make_later, cache / "logs")
    kept = await anyio.to_thread.run_sync(
        lambda: {path: path.stat().st_size for path in (cache / "logs").iterdir()}
    )
    assert Path(failed.value.remedy.split()[-1]) in kept
    assert len(kept) <= 3
    assert sum(kept.values()) <= 10_000


# --- Foreign text -------------------------------------------------------------------------------------------


async def test_errors_give_no_orders_to_a_terminal(native: Any) -> None:
    """They cannot forge a line in a log either."""
    said = r"\033]0;owned\007\033[2J\r\302\233 \342\200\256 over"
    with pytest.raises(StageError) as failed:
        await native.prepare(Recipe(stages=(Stage("setup", (f"printf '{said}'; exit 1",)),)))
    service = dutyfree.Service("s", f"printf '{said}'; exit 1", dutyfree.Ready(line="never"))
    with pytest.raises(CreateError) as refused:
        await enter(native.sandbox(Recipe(services=(service,))))
    for told in (str(failed.value), failed.value.message, str(refused.value)):
        assert r"\x1b]0;owned\x07\x1b[2J\r" in told
        assert all(one.isprintable() or one == "\n" for one in told)
