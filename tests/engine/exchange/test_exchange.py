"""Copy layers between two stores over all transports, with kills and interruptions."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import dutyfree
from dutyfree import layers
from dutyfree.contract import Recipe, Stage
from dutyfree.contract.errors import CreateError, UsageError
from dutyfree.engine.images import find
from dutyfree.engine.store.store import Store
from dutyfree.engine.store.sweep import PART_SECONDS
from tests.engine import unprivileged
from tests.engine.exchange.nodes import Nodes, cut, slowly, unchanged
from tests.engine.images.composing import Image, busybox, layout, member, tar
from tests.engine.layers.test_snapshots import CHANGES, DESCRIBE
from tests.opening import open_native

pytestmark = [pytest.mark.native, pytest.mark.root("layers hold files of many owners")]

IMAGE = "carried:1"
WAYS = ["archive", "directory", "cache", "server"]

UPON_HOST = (
    CHANGES.replace("1G", "100M") + "dd if=/dev/urandom of=noise bs=1M count=3; date +%N > stamp",
    "rm tree/link; cd /usr/share; rm -r perl5; mkdir perl5; echo 1 > perl5/only; rm /usr/bin/env",
)
UPON_IMAGE = (
    "mkdir -p d/e; echo 1 > d/e/f; ln d/e/f hard; ln -s e/f d/link; chown -R 7:8 d; chmod 4711 hard",
    "rm -r d; mkdir d; echo only > d/new; rm /etc/gone; dd if=/dev/urandom of=noise bs=1M count=3",
)
SEE = (
    """find /workspace | sort | xargs stat -c '%n %f %u %g %Y'; find / -xdev -type f | sort | xargs md5sum"""
)


def staged(commands: tuple[str, ...], image: str | None = None) -> Recipe:
    return Recipe(image, tuple(Stage("setup", commands=(command,)) for command in commands))


async def with_image(nodes: Nodes) -> str:
    """An image that only this store has, under a name."""
    root = nodes.root / "layout"
    if not await anyio.Path(root).exists():
        files = (member("etc/gone", b"1"), member("etc/passwd", b"root:x:0:0::/:/bin/sh\n"))
        image = Image([busybox(), tar(*files)], {"Env": ["A=b"], "WorkingDir": "/workspace"})
        await anyio.to_thread.run_sync(layout, root, image)
    held = await find.import_image(f"oci:{root}", IMAGE)
    held.close()
    return IMAGE


async def said(recipe: Recipe, command: str) -> bytes:
    async with dutyfree.open("native") as native, native.sandbox(recipe) as sandbox:
        seen = await sandbox.exec(command)
        assert seen.ok, seen
        return bytes(seen.stdout)


async def brought(source: str, *what: layers.What, **options: Any) -> list[Any]:
    return await anyio.to_thread.run_sync(lambda: layers.bring(source, what, **options))


@pytest.mark.parametrize("way", WAYS)
async def test_a_recipe_upon_this_machine_arrives_as_it_was(nodes: Nodes, way: str) -> None:
    recipe = staged(UPON_HOST)
    see = DESCRIBE + "cat stamp; ls -l /usr/share/perl5; ls /usr/bin/env 2>&1"
    before = await said(recipe, see + "; true")
    source = await anyio.to_thread.run_sync(nodes.carried, way, recipe)
    nodes.use(nodes.there)
    (done,) = await brought(source, recipe)
    assert done.layers == 2
    assert done.size > 3 << 20
    assert await said(recipe, see + "; true") == before
    assert nodes.kept(nodes.there) == nodes.kept(nodes.here)
    (again,) = await brought(source, recipe)
    assert (again.layers, again.size) == (0, 0)


@pytest.mark.parametrize("way", WAYS)
async def test_an_image_and_what_stands_on_it_arrive(nodes: Nodes, way: str) -> None:
    recipe = staged(UPON_IMAGE, await with_image(nodes))
    before = await said(recipe, SEE)
    source = await anyio.to_thread.run_sync(nodes.carried, way, recipe)
    nodes.use(nodes.there)
    (done,) = await brought(source, recipe)
    assert done.layers == 4
    assert await said(recipe, SEE) == before
    assert b"gone" not in before
    # From there, copy it back to the first node, which has it already, and to a third one.
    source = await anyio.to_thread.run_sync(nodes.served, nodes.there)
    for node, missing in ((nodes.here, 0), (nodes.root / "third", 4)):
        nodes.use(node)
        (done,) = await brought(source, recipe)
        assert done.layers == missing
        assert await said(recipe, SEE) == before


async def test_who_has_the_image_gets_only_what_stands_on_it(nodes: Nodes) -> None:
    recipe = staged(UPON_IMAGE, await with_image(nodes))
    before = await said(recipe, SEE)
    nodes.use(nodes.there)
    await with_image(nodes)
    (done,) = await brought(str(nodes.here), Recipe(recipe.image, recipe.stages[:1]))
    assert done.layers == 1
    (done,) = await brought(str(nodes.here), recipe)
    assert done.layers == 1
    assert await said(recipe, SEE) == before


async def test_a_snapshot_travels(nodes: Nodes) -> None:
    image = await with_image(nodes)
    async with open_native() as native, native.sandbox(staged(UPON_IMAGE, image)) as sandbox:
        await sandbox.exec("rm noise; echo mine > mine; mv d moved")
        before = (await sandbox.exec(SEE)).stdout
        await sandbox.snapshot("goes-out")
    nodes.use(nodes.here)
    exported = await anyio.to_thread.run_sync(
        layers.export, ["snapshot:goes-out"], nodes.root / "snapshot.tar"
    )
    assert exported.names == ("snapshot:goes-out",)
    nodes.use(nodes.there)
    with pytest.raises(CreateError, match="is not the export"):
        await brought(str(nodes.root / "snapshot.tar"), digest="sha256:" + "0" * 64)
    await brought(str(nodes.root / "snapshot.tar"), digest=exported.digests[0])
    assert await said(Recipe("snapshot:goes-out"), SEE) == before
    assert await said(Recipe("snapshot:goes-out"), "echo $A; pwd") == b"b\n/workspace\n"
    await anyio.to_thread.run_sync(Store().collect)  # the name protects it
    assert await said(Recipe("snapshot:goes-out"), SEE) == before
    assert await anyio.to_thread.run_sync(layers.remove, ["snapshot:goes-out"]) == ["snapshot:goes-out"]
    async with open_native() as native, native.sandbox() as sandbox:
        await sandbox.snapshot("goes-out")
    with pytest.raises(UsageError, match="another snapshot"):
        await brought(str(nodes.root / "snapshot.tar"))


async def test_an_export_is_an_image_to_others(nodes: Nodes) -> None:
    recipe = staged(UPON_IMAGE, await with_image(nodes))
    before = await said(recipe, SEE)
    source = await anyio.to_thread.run_sync(nodes.carried, "archive", recipe)
    nodes.use(nodes.there)
    held = await find.import_image(source, "imported:1")
    held.close()
    assert await said(Recipe("imported:1"), SEE) == before
    # An export without an image cannot be imported as an image.
    nodes.use(nodes.here)
    await said(staged(("echo 1 > a",)), "true")
    host = staged(("echo 1 > a",))
    await anyio.to_thread.run_sync(layers.export, [host], nodes.root / "host.tar")
    with pytest.raises(CreateError, match="no image of a root file system"):
        await find.import_image(str(nodes.root / "host.tar"), "host:1")


async def test_a_directory_takes_what_it_lacks(nodes: Nodes) -> None:
    recipe = staged(("head -c 900000 /dev/urandom > one", "head -c 900000 /dev/urandom > two"))
    await said(recipe, "true")
    shared = nodes.root / "shared"

    def export(length: int) -> int:
        return layers.export([Recipe(None, recipe.stages[:length])], f"{shared}/").size

    first, second, again = [await anyio.to_thread.run_sync(export, length) for length in (1, 2, 2)]
    assert first > 900_000
    assert 900_000 < second < 1_000_000
    assert again == 0
    nodes.use(nodes.there)
    assert [done.layers for done in await brought(str(shared))] == [1, 1]
    assert len(await said(recipe, "cat one two")) == 1_800_000


async def test_equal_layers_travel_once(nodes: Nodes) -> None:
    """Two different stages write the same files."""
    noise = nodes.root / "noise"
    await anyio.Path(noise).write_bytes(os.urandom(1_000_000))
    fixed = "touch -d @0 noise . /; true"
    recipes = [
        Recipe(None, (Stage("setup", commands=(f"{fixed} {number}",), files={"noise": noise}),))
        for number in range(2)
    ]
    for recipe in recipes:
        await said(recipe, "true")
    exported = await anyio.to_thread.run_sync(layers.export, recipes, nodes.root / "both.tar")
    assert exported.size < 1_100_000
    nodes.use(nodes.there)
    await brought(str(nodes.root / "both.tar"))
    for recipe in recipes:
        assert len(await said(recipe, "cat noise")) == 1_000_000


# --- Cuts and kills ------------------------------------------------------------------------------------


async def noisy(nodes: Nodes) -> Recipe:
    recipe = staged(("head -c 3000000 /dev/urandom > one", "head -c 5000000 /dev/urandom > two"))
    await said(recipe, "true")
    return recipe


async def test_what_was_cut_is_taken_up_again(nodes: Nodes) -> None:
    recipe = await noisy(nodes)
    nodes.use(nodes.there)
    sizes = []
    for count in (1_000_000, 2_500_000, 3_000_000):
        source = await anyio.to_thread.run_sync(nodes.through, cut(count))
        with pytest.raises(CreateError, match="cannot be fetched"):
            await brought(source, recipe)
        sizes.append(sum(path.stat().st_size for path in nodes.there.glob("layers/parts/*")))
    assert sizes[0] > 900_000
    assert sizes[2] > sizes[1] + 2_900_000
    assert len(nodes.kept(nodes.there)) == 1  # the first layer was complete after the second attempt
    (done,) = await brought(await anyio.to_thread.run_sync(nodes.served), recipe)
    assert done.layers == 1
    assert done.size < 3_000_000  # of 5 MB
    assert await said(recipe, "cat one two | wc -c") == b"8000000\n"
    assert list(nodes.there.glob("layers/parts/*")) == []


@contextlib.contextmanager
def importing(node: Path, source: str, recipe: Recipe) -> Iterator[subprocess.Popen[bytes]]:
    keys = [f"recipe:{recipe.key(length)}" for length in range(len(recipe.stages), 0, -1)]
    process = subprocess.Popen(
        [sys.executable, "-m", "dutyfree", "layer", "import", source, keys[0]],
        env={**os.environ, "DUTYFREE_CACHE": str(node)},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("moment", ["parts", "making"])
async def test_a_killed_import_leaves_nothing_but_what_can_be_taken_up(nodes: Nodes, moment: str) -> None:
    recipe = await noisy(nodes)

    def come() -> bool:
        pattern = "layers/parts/*" if moment == "parts" else "layers/making/*/tree/0/*"
        with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
            return any(path.is_dir() or path.stat().st_size for path in nodes.there.glob(pattern))
        return False

    def kill() -> bool:
        """Whether the process was still running at that moment."""
        with importing(nodes.there, source, recipe) as process:
            while not come():
                if process.poll() is not None:
                    shutil.rmtree(nodes.there)
                    return False
                time.sleep(0.0005)
            process.send_signal(signal.SIGKILL)
        return True

    source = await anyio.to_thread.run_sync(nodes.through, slowly)
    for _ in range(20):
        if await anyio.to_thread.run_sync(kill):
            break
    nodes.use(nodes.there)
    for entry in await anyio.to_thread.run_sync(layers.ls):  # a layer with a name is complete
        assert await said(Recipe(None, recipe.stages[: entry.below + 1]), "cat one | wc -c") == b"3000000\n"
    await brought(str(nodes.here), recipe)
    assert await said(recipe, "cat one two | wc -c") == b"8000000\n"
    assert nodes.kept(nodes.there) == nodes.kept(nodes.here)
    await anyio.to_thread.run_sync(Store().collect, 1 << 40)
    for where in ("parts", "making", "locks"):
        left = await anyio.to_thread.run_sync(os.listdir, nodes.there / "layers" / where)
        assert left in ([], [".lock"])


KILLED = """
import os, signal, sys
from dutyfree import layers
os.fchmod = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # after all is written, before the rename
layers.export([sys.argv[1]], sys.argv[2])
"""


@pytest.mark.parametrize("target", ["exported/one.tar", "exported/"])
async def test_a_killed_export_leaves_nothing(nodes: Nodes, target: str) -> None:
    await noisy(nodes)
    (kept, _) = await anyio.to_thread.run_sync(layers.ls)
    await anyio.Path(nodes.root / "exported").mkdir()
    command = [sys.executable, "-c", KILLED, kept.key, f"{nodes.root}/{target}"]
    killed = await anyio.run_process(command, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = await anyio.to_thread.run_sync(lambda: list(os.walk(nodes.root / "exported")))
    assert {name for _, _, names in left for name in names} <= {".lock"}


async def test_many_import_the_same_at_once(nodes: Nodes) -> None:
    recipe = await noisy(nodes)

    def run() -> list[int]:
        with contextlib.ExitStack() as stack:
            source = nodes.through(unchanged)
            processes = [stack.enter_context(importing(nodes.there, source, recipe)) for _ in range(4)]
            return [process.wait(300) for process in processes]

    assert await anyio.to_thread.run_sync(run) == [0] * 4
    nodes.use(nodes.there)
    assert nodes.kept(nodes.there) == nodes.kept(nodes.here)
    assert list(nodes.there.glob("layers/parts/*")) == []
    assert await said(recipe, "cat one two | wc -c") == b"8000000\n"


async def test_a_packed_layer_waits_a_week_for_the_next(nodes: Nodes) -> None:
    await noisy(nodes)
    (kept, _) = await anyio.to_thread.run_sync(layers.ls)
    await anyio.to_thread.run_sync(layers.export, [kept.key], nodes.root / "one.tar")

    def collected(age: float) -> bool:
        (packed,) = nodes.here.glob("layers/kept/*/*/packed")
        os.utime(packed, (time.time() - age,) * 2)
        Store().collect(1 << 40)
        return not packed.exists()

    assert not await anyio.to_thread.run_sync(collected, PART_SECONDS / 2)
    assert await anyio.to_thread.run_sync(collected, PART_SECONDS * 2)
    exported = await anyio.to_thread.run_sync(layers.export, [kept.key], nodes.root / "two.tar")
    assert exported.size
    same = [await anyio.Path(nodes.root / name).read_bytes() for name in ("one.tar", "two.tar")]
    assert same[0] == same[1]


async def test_without_root_nothing_is_begun(nodes: Nodes) -> None:
    """A user without root gets an error before anything is transferred."""
    recipe = await noisy(nodes)
    source = await anyio.to_thread.run_sync(nodes.carried, "archive", recipe)

    def run() -> str:
        theirs = Path(tempfile.mkdtemp())
        try:
            os.chown(theirs, unprivileged.USER, unprivileged.USER)
            shutil.copy(source, theirs / "exported.tar")
            (theirs / "exported.tar").chmod(0o644)
            code = (
                f"import os; os.environ['DUTYFREE_CACHE'] = {str(theirs / 'cache')!r}\n"
                "from dutyfree import errors, layers\n"
                f"try: layers.bring({str(theirs / 'exported.tar')!r})\n"
                "except errors.CreateError as error: print(error.message)\n"
            )
            said = unprivileged.run("-c", code)
            assert nodes.kept(theirs / "cache") == []
            return said
        finally:
            shutil.rmtree(theirs)

    assert "only root" in await anyio.to_thread.run_sync(run)
