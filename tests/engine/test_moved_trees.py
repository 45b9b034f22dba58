"""Files after arbitrary changes are the same in every copy: snapshots, forks, stages, exports.

Directories that are moved are what is difficult. An overlay does not copy them: it notes where they were
(a redirect), and whatever copies or merges layers has to follow that through all of them.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import pytest

import dutyfree
from dutyfree import layers
from dutyfree.contract import Recipe, Stage
from tests.engine import unprivileged
from tests.engine.images.composing import Image, busybox, directory, hard, layout, link, member, tar

pytestmark = [pytest.mark.anyio, pytest.mark.native]
with_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs layers on the disk; run as root")

WALKER = Path(__file__).with_name("tree_walker.py").read_text()
PYTHON = ("python3", "-S", "-I", "-c")
SEEDS = range(int(os.environ.get("DUTYFREE_WALKS", "3")))
GENERATIONS = 9
"""More than snapshots in memory, and those with names, are kept upon each other."""
STEPS = 14

ROOTS = {"host": "/usr/share/perl5:/workspace", "image": "/opt:/srv:/workspace"}

MODULES = """
import __future__, errno, os, stat, sys, collections.abc
print(*(module.__file__ for module in sys.modules.values() if hasattr(module, "__file__")))
"""
FILL = "head -c 1100000 /dev/zero > /tmp/fill"
"""More than is copied for convenience: the sandbox is replaced by one upon its own layer."""


def python() -> bytes:
    """A layer with as much of this machine's Python as the walker needs."""
    modules = subprocess.run(["/usr/bin/" + PYTHON[0], *PYTHON[1:], MODULES], capture_output=True, check=True)
    libraries = subprocess.run(["ldd", "/usr/bin/python3"], capture_output=True, check=True)
    words = [*modules.stdout.split(), *libraries.stdout.split(), b"/usr/bin/python3"]
    files = sorted({os.fsdecode(word) for word in words if word.startswith(b"/")})
    return tar(*[member(name[1:], Path(name).read_bytes(), mode=0o755) for name in files])


def content(*numbers: int) -> bytes:
    """A layer of an image with trees that the next one changes."""
    members: list[tuple[tarfile.TarInfo, bytes]] = [directory("opt"), directory("srv")]
    for number in numbers:
        top = f"opt/t{number}"
        members += [
            directory(top),
            directory(f"{top}/sub", 0o2750, uid=3, gid=4, mtime=1_500_000_000),
            directory(f"{top}/sub/deep"),
            member(f"{top}/sub/deep/file", b"deep %d" % number, mode=0o600),
            member(f"{top}/file", b"%d" % number * 3000, uid=9),
            member(f"{top}/shared", b"image, two names"),
            hard(f"{top}/sub/again", f"{top}/shared"),
            link(f"{top}/link", "sub/deep"),
            directory(f"srv/s{number}"),
            member(f"srv/s{number}/x", b"x" * number),
        ]
    return tar(*members)


CHANGED = tar(
    directory("opt/t1"),
    member("opt/t1/.wh..wh..opq"),
    member("opt/t1/new", b"upon what is hidden"),
    member("opt/t2/.wh.file"),
    member("opt/t2/sub/more", b"merged"),
    member("opt/.wh.t3"),
)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = Image([busybox(), python(), content(1, 2, 3), CHANGED, content(4)])
    return f"oci:{layout(tmp_path_factory.mktemp('image') / 'layout', made)}"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Trees:
    """Trees of sandboxes upon one image."""

    def __init__(self, kind: str, image: str, seed: int) -> None:
        self.recipe = Recipe(None if kind == "host" else image)
        self._roots = ROOTS[kind]
        self.chance = random.Random(f"{kind} {seed}")
        self.moved = 0

    def command(self) -> list[str]:
        numbers = [f"{self.chance.getrandbits(32):x}" for _ in range(STEPS * 8)]
        return [*PYTHON, WALKER, "walk", self._roots, str(STEPS), *numbers]

    async def walk(self, sandbox: Any, command: list[str] | None = None) -> None:
        done = await sandbox.exec(command or self.command())
        assert done.ok, done.stderr.decode()
        self.moved += int(done.stdout)

    async def described(self, sandbox: Any) -> Described:
        done = await sandbox.exec([*PYTHON, WALKER, "describe", self._roots])
        assert done.ok, done.stderr.decode()
        lines = [line.split("\t") for line in done.stdout.decode().splitlines()]
        names: dict[str, list[str]] = {}
        for path, inode, *_ in lines:
            names.setdefault(inode, []).append(path)
        return Described(
            {path: tuple(more) for path, _, *more in lines},
            {frozenset(linked) for linked in names.values() if len(linked) > 1},
        )


class Described(NamedTuple):
    files: dict[str, tuple[str, ...]]
    links: set[frozenset[str]]
    """Names of the same file."""


@pytest.fixture(params=[f"{kind}-{seed}" for kind in ROOTS for seed in SEEDS])
def trees(request: pytest.FixtureRequest, image: str) -> Iterator[Trees]:
    kind, _, seed = request.param.partition("-")
    made = Trees(kind, image, int(seed))
    yield made
    assert made.moved > STEPS // 3, "directories were moved"


async def test_in_memory(trees: Trees) -> None:
    native: Any
    async with dutyfree.open("native") as native, native.sandbox(trees.recipe) as sandbox:
        for _ in range(GENERATIONS):
            await trees.walk(sandbox)
            how = trees.chance.choice(["take", "copy", "busy"])
            await sandbox.exec(FILL if how == "take" else "rm -f /tmp/fill")
            process = await sandbox.start("sleep 1000") if how == "busy" else None
            before = await trees.described(sandbox)
            recipe = await sandbox.snapshot()
            assert await trees.described(sandbox) == before, how
            async with native.sandbox(recipe) as copy, sandbox.fork(1) as (child,):
                assert await trees.described(copy) == before, how
                assert await trees.described(child) == before, how
            native.forget(recipe)
            if process is not None:
                await process.kill()


@with_root
async def test_by_name_and_elsewhere(trees: Trees, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native: Any
    recipe = trees.recipe
    async with dutyfree.open("native") as native:
        for generation in range(GENERATIONS):
            async with native.sandbox(recipe) as sandbox:
                for _ in range(1 + generation % 3):  # several layers in memory become one
                    await trees.walk(sandbox)
                    await sandbox.exec(FILL)
                    native.forget(await sandbox.snapshot())
                before = await trees.described(sandbox)
                recipe = await sandbox.snapshot(f"s{generation}")
            async with native.sandbox(recipe) as copy:
                after = await trees.described(copy)
                assert after.files == before.files
                # What was moved is copied, and so parts from names that stayed in the layers below.
                assert all(any(group <= former for former in before.links) for group in after.links)
    archive = str(tmp_path / "archive.tar")
    name = str(recipe.image)
    await anyio.to_thread.run_sync(lambda: layers.export([name], archive))
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "elsewhere"))
    await anyio.to_thread.run_sync(lambda: layers.bring(archive, [name]))
    async with dutyfree.open("native") as native, native.sandbox(recipe) as copy:
        assert await trees.described(copy) == after


@with_root
async def test_in_stages(trees: Trees) -> None:
    """The layers of stages show what their commands leave in one sandbox; times aside, for these are two runs."""
    native: Any
    commands = [trees.command() for _ in range(1)]
    shell = [" ".join(f"'{word}'" for word in command) for command in commands]
    staged = Recipe(trees.recipe.image, tuple(Stage("setup", (command,)) for command in shell))
    async with dutyfree.open("native") as native, native.sandbox(trees.recipe) as sandbox:
        for command in commands:
            await trees.walk(sandbox, command)
        async with native.sandbox(staged) as made:
            first = await trees.described(made)
            assert _timeless(first) == _timeless(await trees.described(sandbox))
    async with dutyfree.open("native") as native, native.sandbox(staged) as again:
        assert again.served.kind == "layer"
        assert await trees.described(again) == first


def _timeless(described: Described) -> dict[str, tuple[str, ...]]:
    return {path: (*more[:3], *more[4:]) for path, more in described.files.items()}
