"""After random changes, files are the same in every copy: snapshots, forks, stages, exports.

Directories that are moved are what is difficult. An overlay does not copy them: it notes where they were
(a redirect), and whatever copies or merges layers has to follow that through all of them.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import pytest

from dutyfree import layers
from dutyfree.contract import Recipe, Stage
from tests.engine import unprivileged
from tests.engine.images.composing import Image, busybox, directory, hard, layout, link, member, tar
from tests.opening import open_native
from tests.processes import ran

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("cache")]
with_root = pytest.mark.root("needs layers on the disk")

WALKER = Path(__file__).with_name("tree_walker.py").read_text()
PYTHON = ("python3", "-S", "-I", "-c")
SEEDS = range(int(os.environ.get("DUTYFREE_WALKS", "3")))
GENERATIONS = 9
"""More than the most layers in a chain of snapshots, in memory or with names."""
STEPS = 14

ROOTS = {"host": "/usr/share/perl5:/srv", "image": "/opt:/srv"}

MODULES = """
import __future__, errno, os, stat, sys, collections.abc
print(*(module.__file__ for module in sys.modules.values() if hasattr(module, "__file__")))
"""
FILL = "head -c 1100000 /dev/zero > /tmp/fill"
"""Too many bytes to copy: a sandbox on the new layer replaces the old one."""


def python() -> bytes:
    """A layer with the part of this machine's Python that the walker needs."""
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
    made = Image([busybox(), python(), content(1, 2, 3, 4, 5), CHANGED, content(6, 7, 8)])
    return f"oci:{layout(tmp_path_factory.mktemp('image') / 'layout', made)}"


class Trees:
    """Directory trees in sandboxes of one image."""

    def __init__(self, kind: str, image: str, seed: int, roots: str = "") -> None:
        self.recipe = Recipe(None if kind == "host" else image)
        self._roots = roots or ROOTS[kind]
        self.describe = [*PYTHON, WALKER, "describe", self._roots]
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
        done = await sandbox.exec(self.describe)
        assert done.ok, done.stderr.decode()
        return parsed(done.stdout)


class Described(NamedTuple):
    files: dict[str, tuple[str, ...]]
    links: set[frozenset[str]]
    """Hard links of the same file."""

    def lost(self, later: Described, *, links: bool = True) -> list[object]:
        """A few of the differences: pytest would compare thousands of lines for minutes."""
        paths = sorted(self.files.keys() | later.files.keys())
        changed = [
            (path, self.files.get(path), later.files.get(path))
            for path in paths
            if self.files.get(path) != later.files.get(path)
        ]
        # A copied-up file is no longer linked with its names in the layers below.
        parted = self.links ^ later.links if links else later.links - _parts(self.links, later.links)
        return [*changed[:5], *list(parted)[:5]]


def parsed(text: bytes) -> Described:
    lines = [line.split("\t") for line in text.decode().splitlines()]
    assert len(lines) > 8, "there is something to be lost"
    names: dict[str, list[str]] = {}
    for path, inode, *_ in lines:
        names.setdefault(inode, []).append(path)
    return Described(
        {path: tuple(more) for path, _, *more in lines},
        {frozenset(linked) for linked in names.values() if len(linked) > 1},
    )


def _parts(links: set[frozenset[str]], of: set[frozenset[str]]) -> set[frozenset[str]]:
    return {group for group in of if any(group <= former for former in links)}


@pytest.fixture(params=[f"{kind}-{seed}" for kind in ROOTS for seed in SEEDS])
def trees(request: pytest.FixtureRequest, image: str) -> Iterator[Trees]:
    kind, _, seed = request.param.partition("-")
    made = Trees(kind, image, int(seed))
    yield made
    assert made.moved > 1, "directories were moved"


EXCHANGE = 'python3 -c \'import ctypes; assert not ctypes.CDLL(None).renameat2(-100, b"{}", -100, b"{}", 2)\''

LIBRARY = ran(
    ["/usr/bin/python3", "-c", "import sysconfig; print(sysconfig.get_path('stdlib'))"], check=True
).stdout.strip()
"""Directories that every machine with Python has; the walker needs none of the files changed there."""

CHANGED_THERE = ("xml", "email", "json", "this.py", "ast.py", "a", "n", "new", "z")
"""All names in the library that an example changes."""

EXAMPLES = {
    "into a new directory": "mkdir -p /srv/new; mv xml /srv/new/a",
    "back into one replaced": "mv xml/etree /srv; rm -r xml; mkdir xml; mv /srv/* xml",
    "another in the old place": "mkdir new; mv xml new/x; mv email xml; mv new/x email",
    "a renamed one in a moved one": "mv xml/etree xml/d; mkdir -p a/b; mv xml a/b/c; mv a z",
    "removed and replaced in a moved one": "mkdir n; mv xml n/d; rm -r n/d/sax; mkdir n/d/sax",
    "metadata alone": "mkdir n; chmod 600 this.py ast.py; mv this.py n/e; mv n/e this.py; mv ast.py n/p",
    "metadata alone under two names": "chmod 600 this.py; mkdir n; ln this.py n/e; ln this.py json/e",
    "exchanged": EXCHANGE.format("xml/sax", "email") + "; mkdir n; mv email n/x; mv xml/sax email",
    "a pipe with a mode": "mkdir n; mkfifo n/p; chown 5:6 n/p; chmod 4755 n/p; mv xml n/d",
}


@pytest.mark.parametrize("command", EXAMPLES.values(), ids=EXAMPLES.keys())
async def test_examples(command: str) -> None:
    trees = Trees("host", "", 0, roots=":".join([*(f"{LIBRARY}/{name}" for name in CHANGED_THERE), "/srv"]))
    async with open_native() as native, native.sandbox() as sandbox:
        for generation in range(2):
            done = await sandbox.exec(f"set -e; cd {LIBRARY}; {command}; rm -rf /srv/kept; mkdir /srv/kept")
            assert done.ok or generation, done
            before = await trees.described(sandbox)
            copied = await sandbox.snapshot()
            named = [await sandbox.snapshot(f"s{generation}")] if os.geteuid() == 0 else []
            for recipe in (copied, *named):
                async with native.sandbox(recipe) as copy:
                    assert not before.lost(await trees.described(copy), links=recipe is copied)
            await sandbox.exec(FILL)
            await sandbox.snapshot()


async def test_in_memory(trees: Trees) -> None:
    async with open_native() as native, native.sandbox(trees.recipe) as sandbox:
        for _ in range(GENERATIONS):
            await trees.walk(sandbox)
            how = trees.chance.choice(["take", "copy", "busy"])
            await sandbox.exec(FILL if how == "take" else "rm -f /tmp/fill")
            process = await sandbox.start("sleep 1000") if how == "busy" else None
            before = await trees.described(sandbox)
            recipe = await sandbox.snapshot()
            assert not before.lost(await trees.described(sandbox)), how
            async with native.sandbox(recipe) as copy, sandbox.fork(1) as (child,):
                assert not before.lost(await trees.described(copy)), how
                assert not before.lost(await trees.described(child)), how
            native.forget(recipe)
            if process is not None:
                await process.kill()


@with_root
async def test_by_name_and_elsewhere(trees: Trees, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = trees.recipe
    async with open_native() as native:
        for generation in range(GENERATIONS):
            async with native.sandbox(recipe) as sandbox:
                for _ in range(1 + generation % 3):  # several layers in memory are merged
                    await trees.walk(sandbox)
                    await sandbox.exec(FILL)
                    native.forget(await sandbox.snapshot())
                before = await trees.described(sandbox)
                recipe = await sandbox.snapshot(f"s{generation}")
            async with native.sandbox(recipe) as copy:
                after = await trees.described(copy)
                assert not before.lost(after, links=False)
    archive = str(tmp_path / "archive.tar")
    name = str(recipe.image)
    await anyio.to_thread.run_sync(lambda: layers.export([name], archive))
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "elsewhere"))
    await anyio.to_thread.run_sync(lambda: layers.bring(archive, [name]))
    async with open_native() as native, native.sandbox(recipe) as copy:
        assert not after.lost(await trees.described(copy))


@with_root
async def test_in_stages(trees: Trees) -> None:
    """The layers of stages have the files that their last command saw."""
    described = shlex.join(trees.describe)
    commands = [f"{shlex.join(trees.command())} > /tmp/moved-{number}" for number in range(4)]
    stages = [Stage("setup", (command,)) for command in commands[:-1]]
    stages.append(Stage("setup", (f"{commands[-1]} && {described} > /tmp/described",)))
    staged = Recipe(trees.recipe.image, tuple(stages))
    for _ in range(2):
        async with open_native() as native, native.sandbox(staged) as sandbox:
            before = parsed(await sandbox.read("/tmp/described"))
            assert not before.lost(await trees.described(sandbox), links=False)
            trees.moved += sum([int(await sandbox.read(f"/tmp/moved-{number}")) for number in range(4)])


async def test_stages_upon_a_snapshot_in_memory(trees: Trees) -> None:
    """A builder uses the same overlay attributes as every other sandbox."""
    async with open_native() as native, native.sandbox(trees.recipe) as sandbox:
        for _ in range(3):
            await trees.walk(sandbox)
        await sandbox.exec(FILL)
        kept = await sandbox.snapshot()
        described = f"{shlex.join(trees.describe)} > /tmp/described"
        async with native.sandbox(Recipe(kept.image, (Stage("setup", (described,)),))) as staged:
            before = await trees.described(sandbox)
            assert not before.lost(parsed(await staged.read("/tmp/described")))
            assert not before.lost(await trees.described(staged))


ROOTLESS = """
import anyio, dutyfree, json, sys
steps, describe, fill = json.loads(sys.argv[1])

async def main():
    async with dutyfree.open("native") as native, native.sandbox() as sandbox:
        async def seen(one):
            done = await one.exec(describe)
            assert done.ok, done
            return done.stdout.decode()

        for number, step in enumerate(steps):
            done = await sandbox.exec(step)
            assert done.ok, done
            await sandbox.exec(fill if number % 2 else "rm -f /tmp/fill")
            before = await seen(sandbox)
            kept = await sandbox.snapshot()
            async with native.sandbox(kept) as copy:
                print(json.dumps([before, await seen(sandbox), await seen(copy)]))

anyio.run(main)
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_without_root(seed: int) -> None:
    """Without redirect_dir, directories of the image cannot be moved, but everything else can."""
    trees = Trees("host", "", seed)
    steps = [trees.command() for _ in range(GENERATIONS)]
    said = unprivileged.run("-c", ROOTLESS, json.dumps([steps, trees.describe, FILL]))
    unprivileged.remove()
    lines = said.splitlines()
    assert len(lines) == GENERATIONS
    for line in lines:
        # An overlay that cannot read a file's origin sometimes shows two hard links as two files.
        before, after, copied = (parsed(text.encode())._replace(links=set()) for text in json.loads(line))
        assert not before.lost(after)
        assert not before.lost(copied)
