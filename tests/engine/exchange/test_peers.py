"""A node asks its peers before it builds: the deepest offer wins, and no peer makes a request fail."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest

import dutyfree
from dutyfree import layers
from dutyfree.contract import Recipe, Stage
from dutyfree.contract.errors import CreateError, OptionError
from dutyfree.engine.exchange.chains import ChainLayer, LayerChain
from dutyfree.engine.exchange.peers import MissingLayers, PeerSet, PeerTiming, best_offer
from dutyfree.engine.store.cancel import Cancelled, CancelToken
from dutyfree.engine.store.provenance import Provenance
from dutyfree.engine.store.store import Store
from tests.awaiting import enter, together
from tests.engine.counts import arrives
from tests.engine.exchange.nodes import (
    CLONE,
    INSTALL,
    RECIPE,
    Change,
    Nodes,
    Server,
    cut,
    flipped,
    held,
    listener,
    proxied,
    reserved,
    slowly,
)
from tests.engine.exchange.test_exchange import IMAGE, said, with_image
from tests.opening import open_native

pytestmark = [pytest.mark.native, pytest.mark.root("layers hold files of many owners")]

SETUP = Stage("setup", commands=("sleep 0.3; cat stamp > third",))
SEE = "cat stamp copy; md5sum one two"


TIMING = PeerTiming(answer=100.0, absent=1000.0)
"""A peer may be slow because the machine is busy."""


async def built(nodes: Nodes, recipe: Recipe = RECIPE) -> bytes:
    """Build a recipe at the other node, or copy it from an earlier test. Returns the output of ``SEE``."""
    original = anyio.Path(nodes.session, recipe.key())
    if not await (original / "seen").exists():
        nodes.use(Path(original))
        if recipe.image:
            await with_image(nodes)
        await (original / "seen").write_bytes(await said(recipe, SEE))
    await anyio.run_process(["cp", "-a", str(original), str(nodes.here)])
    nodes.use(nodes.there)
    return await (original / "seen").read_bytes()


async def built_too(nodes: Nodes, recipe: Recipe, see: str) -> bytes:
    """Build one more recipe at the other node."""
    nodes.use(nodes.here)
    seen = await said(recipe, see)
    nodes.use(nodes.there)
    return seen


@asynccontextmanager
async def opened(*peers: str, timing: PeerTiming = TIMING, **options: Any) -> AsyncIterator[Any]:
    """A node with peers."""
    async with open_native(peers=peers, **options) as native:
        native.node.builder.peers.timing = timing
        yield native


@asynccontextmanager
async def fetching(*peers: str, recipe: Recipe = RECIPE, **options: Any) -> AsyncIterator[tuple[Any, Any]]:
    """A sandbox of a node with peers, and its substrate."""
    async with opened(*peers, **options) as native, native.sandbox(recipe) as sandbox:
        yield native, sandbox


async def seen(sandbox: Any, command: str = SEE) -> bytes:
    found = await sandbox.exec(command)
    assert found.ok, found
    return bytes(found.stdout)


async def carried(nodes: Nodes, way: str, recipe: Recipe) -> str:
    """A peer with the layers of the other node. This node is in use."""
    source = await anyio.to_thread.run_sync(nodes.carried, way, recipe)
    nodes.use(nodes.there)
    return source


async def served(nodes: Nodes, change: Change | None = None) -> str:
    """The URL of a server of the other node, or of a proxy in front of it."""
    if change is None:
        return await anyio.to_thread.run_sync(nodes.served)
    return await anyio.to_thread.run_sync(nodes.through, change)


# --- What is there is taken ----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["archive", "directory", "cache", "server"])
@pytest.mark.parametrize("upon", ["host", "image"])
async def test_what_a_peer_has_is_not_built(nodes: Nodes, way: str, upon: str) -> None:
    recipe = RECIPE if upon == "host" else Recipe(IMAGE, RECIPE.stages)
    before = await built(nodes, recipe)
    if upon == "image":
        await with_image(nodes)
    source = await carried(nodes, way, recipe)
    async with fetching(source, recipe=recipe) as (native, sandbox):
        assert await seen(sandbox) == before
        assert (sandbox.served.kind, sandbox.served.stage) == ("fetched", "dependencies")
        # The costs are the durations of the builds, not of the fetch.
        assert {kept.seconds for kept in await anyio.to_thread.run_sync(layers.ls)} == set(
            native.stage_seconds.values()
        )
        assert all(native.stage_seconds[recipe.key(length)] >= 0.3 for length in (1, 2))
        assert sandbox.served.cold_seconds >= 0.6
        figures = native.peers[source]
        assert (figures.asked, figures.chains, figures.layers, figures.failures) == (1, 1, 2, 0)
        assert figures.size > 8_000_000
        async with native.sandbox(recipe) as another:
            assert another.served.kind == "layer"
    async with fetching(source, recipe=recipe) as (native, sandbox):
        assert await seen(sandbox) == before
        assert sandbox.served.kind != "fetched"
        assert native.peers[source].asked == 0
    assert set(nodes.kept(nodes.there)) <= set(nodes.kept(nodes.here))


@pytest.mark.parametrize("way", ["directory", "server"])
async def test_the_deepest_prefix_is_taken_and_the_rest_built(nodes: Nodes, way: str) -> None:
    """The peer has a shorter recipe with the same first stages."""
    before = await built(nodes)
    longer = Recipe(stages=(CLONE, INSTALL, SETUP, Stage("setup", commands=("sleep 0.1; cat third",))))
    source = await carried(nodes, way, RECIPE)
    async with fetching(source, recipe=longer) as (native, sandbox):
        assert await seen(sandbox) == before
        assert await seen(sandbox, "cat third") == before.splitlines()[0] + b"\n"
        assert (sandbox.served.kind, sandbox.served.stage) == ("fetched", "dependencies")
        assert native.peers[source].asked == 1  # and not once for each missing stage
    nodes.use(nodes.here)
    async with fetching(str(nodes.there), recipe=longer) as (native, sandbox):
        assert (sandbox.served.kind, sandbox.served.stage) == ("fetched", "setup")
        assert native.peers[str(nodes.there)].layers == 2


async def test_the_part_of_an_export_that_fits_is_taken(nodes: Nodes) -> None:
    before = await built(nodes)
    source = await anyio.to_thread.run_sync(nodes.carried, "directory", RECIPE)
    nodes.use(nodes.there)
    async with fetching(source, recipe=Recipe(stages=(CLONE, SETUP))) as (native, sandbox):
        assert (sandbox.served.kind, sandbox.served.stage) == ("fetched", "repository")
        assert await seen(sandbox, "cat stamp third") == before.splitlines()[0].join([b"", b"\n"]) * 2
        assert native.peers[source].layers == 1


async def test_of_several_the_one_with_most_is_taken(nodes: Nodes) -> None:
    before = await built(nodes)
    third = nodes.root / "third"
    nodes.use(third)
    await enter(fetching(str(nodes.here), recipe=Recipe(stages=(CLONE,))))
    nodes.use(nodes.there)
    gone = "http://127.0.0.1:1"
    async with fetching(gone, str(third), str(nodes.here)) as (native, sandbox):
        assert await seen(sandbox) == before
        assert sandbox.served.kind == "fetched"
        assert native.peers[str(nodes.here)].layers == 2
        assert native.peers[str(third)].layers == 0


async def test_what_is_built_in_no_time_is_built(nodes: Nodes) -> None:
    timing = msgspec.structs.replace(TIMING, build_min=60.0)  # on a machine that is busy with other things
    quick = Recipe(stages=(Stage("setup", commands=("date +%N > stamp",)),))
    before = await built_too(nodes, quick, "cat stamp")
    async with fetching(str(nodes.here), recipe=quick, timing=timing) as (native, sandbox):
        assert await seen(sandbox, "cat stamp") != before
        assert sandbox.served.kind == "cold"
        assert native.peers[str(nodes.here)].layers == 0


async def test_upon_what_was_built_here_nothing_is_put_that_was_made_upon_another(nodes: Nodes) -> None:
    """A stage may write other files when it runs again: all layers of a chain come from the same builds."""
    before = await built(nodes)
    mine = await said(Recipe(stages=(CLONE,)), "cat stamp")
    async with fetching(str(nodes.here)) as (native, sandbox):
        assert (await seen(sandbox, "cat copy")) == mine
        assert (sandbox.served.kind, sandbox.served.stage) == ("layer", "repository")
        assert native.peers[str(nodes.here)].failures == 0
    assert mine not in before
    nodes.use(nodes.root / "third")
    await said(Recipe(stages=(CLONE,)), "true")
    with pytest.raises(CreateError, match="another build of a layer"):
        await anyio.to_thread.run_sync(layers.bring, str(nodes.here), [RECIPE])


async def test_secrets_stay_where_they_are(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that fetches needs no secrets, and gets none."""
    stage = Stage(
        "setup", commands=('sleep 0.3; test "$SECRET" && echo ${#SECRET} > length',), secrets=("SECRET",)
    )
    recipe = Recipe(stages=(stage,))
    monkeypatch.setenv("SECRET", "hunter2-hunter2")
    assert await built_too(nodes, recipe, "cat length") == b"15\n"
    monkeypatch.delenv("SECRET")
    exported = await anyio.to_thread.run_sync(nodes.carried, "directory", recipe)
    nodes.use(nodes.there)
    async with fetching(exported, recipe=recipe) as (_, sandbox):
        assert await seen(sandbox, "cat length; printenv SECRET || true") == b"15\n"
        assert sandbox.served.kind == "fetched"
    for place in (nodes.there, Path(exported)):
        found = await anyio.run_process(["grep", "-r", "hunter2", str(place)], check=False)
        assert found.returncode == 1
    nodes.use(nodes.root / "third")
    with pytest.raises(CreateError, match="needs the secret SECRET"):
        await said(recipe, "true")


async def test_the_pool_counts_what_was_fetched(nodes: Nodes) -> None:
    before = await built(nodes)
    source = str(nodes.here)
    async with opened(source) as native:
        async with native.group(RECIPE, 4) as group:
            assert [await seen(sandbox) for sandbox in group] == [before] * 4
            kinds = sorted(sandbox.served.kind for sandbox in group)
            assert kinds == ["fetched", "forked", "forked", "forked"]
        assert native.pool.ledger.served["fetched", "dependencies"] == 1
        costs = native.pool._state.costs
        for length, stage in enumerate(RECIPE.stages, 1):
            told = native.stage_seconds[RECIPE.key(length)]
            assert costs.seconds(RECIPE.key(length), stage.kind) == pytest.approx(told)
        assert native.peers[source].chains == 1


# --- Many at once --------------------------------------------------------------------------------------


async def test_many_want_it_and_it_comes_once(nodes: Nodes) -> None:
    before = await built(nodes)
    kinds: list[str] = []

    async def ask(native: Any) -> None:
        async with native.sandbox(RECIPE) as sandbox:
            assert await seen(sandbox) == before
            kinds.append(sandbox.served.kind)

    async with opened(str(nodes.here)) as native:
        await together(*(partial(ask, native) for _ in range(8)))
        assert native.peers[str(nodes.here)].asked == 1
        assert native.peers[str(nodes.here)].size < 9_000_000
    assert sorted(kinds) == ["fetched", *["joined"] * 7]


async def test_different_ones_come_beside_each_other(nodes: Nodes) -> None:
    """Both have the same empty blob, of a file system that the stage did not write to."""
    recipes = [Recipe(stages=(Stage("setup", commands=(f"sleep 0.3; echo {i} > n",)),)) for i in range(6)]
    for recipe in recipes:
        await built_too(nodes, recipe, "cat n")
    kinds: list[str] = []

    async def ask(native: Any, number: int) -> None:
        async with native.sandbox(recipes[number]) as sandbox:
            assert await seen(sandbox, "cat n") == b"%d\n" % number
            kinds.append(sandbox.served.kind)

    async with opened(str(nodes.here)) as native, anyio.create_task_group() as group:
        for number in range(len(recipes)):
            group.start_soon(ask, native, number)
    assert kinds == ["fetched"] * len(recipes)
    assert list(nodes.there.glob("layers/parts/*")) == []


async def test_an_import_and_a_fetch_of_the_same_do_not_wait_for_each_other_for_ever(nodes: Nodes) -> None:
    before = await built(nodes)
    imported: list[Any] = []

    source = await served(nodes, slowly)

    async def bring() -> None:
        imported.extend(await anyio.to_thread.run_sync(lambda: layers.bring(source, [RECIPE])))

    async with anyio.create_task_group() as group:
        group.start_soon(bring)
        await anyio.sleep(1)
        async with fetching(source) as (_, sandbox):
            assert await seen(sandbox) == before
    assert imported


ASK = """
import sys, anyio, dutyfree
from tests.engine.exchange.nodes import RECIPE
async def main():
    async with dutyfree.open("native", peers=sys.argv[1:]) as native, native.sandbox(RECIPE) as sandbox:
        stamp = (await sandbox.read("copy")).decode().strip()
        print(stamp, sandbox.served.kind, *[found.size for found in native.peers.values()])
anyio.run(main)
"""


def asking(node: Path, *peers: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ASK, *peers],
        env={**os.environ, "DUTYFREE_CACHE": str(node), "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )


def answers(processes: list[subprocess.Popen[str]]) -> list[list[str]]:
    return [process.communicate(timeout=300)[0].split() for process in processes]


async def test_several_processes_fetch_it_once(nodes: Nodes) -> None:
    before = await built(nodes)

    def run() -> list[list[str]]:
        return answers([asking(nodes.there, str(nodes.here)) for _ in range(4)])

    told = await anyio.to_thread.run_sync(run)
    assert {stamp for stamp, *_ in told} == {before.split()[0].decode()}
    assert "fetched" in {kind for _, kind, _ in told}
    sizes = sorted(int(size) for *_, size in told)
    assert sum(sizes) < 9_000_000 < sum(sizes) + 1_000_000


async def test_what_another_process_builds_is_waited_for(nodes: Nodes) -> None:
    """Another process has started the build: this one waits for it, and does not fetch."""
    await built(nodes)

    def run(node: Path) -> tuple[bool, list[list[str]]]:
        """Whether the build was still running when it was observed; and the output of both."""
        builder = asking(node)
        until = threading.Event()
        while not (seen := list((node / "layers/making").glob("*/tree"))) and builder.poll() is None:
            until.wait(0.01)
        return bool(seen), answers([builder, asking(node, str(nodes.here))])

    for number in range(20):
        was_seen, told = await anyio.to_thread.run_sync(run, nodes.root / f"building-{number}")
        (first, _), (second, *_) = told
        assert first == second
        if was_seen:
            break
    assert was_seen


# --- Peers that are of no use --------------------------------------------------------------------------


def silent(_: socket.socket) -> None:
    pass


def babbling(connection: socket.socket) -> None:
    connection.sendall(os.urandom(100_000) + b"\n")


def endless(connection: socket.socket) -> None:
    connection.sendall(b'HTTP/1.1 200 OK\r\n\r\n{"chains":[')
    while True:
        connection.sendall(b"[" * 65536)


def endless_headers(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        connection.sendall(b"X: y\r\n" * 10_000)


def around(connection: socket.socket) -> None:
    """Redirect to itself."""
    connection.recv(65536)
    where = "{}:{}".format(*connection.getsockname()).encode()
    connection.sendall(b"HTTP/1.1 307 go\r\nContent-Length: 0\r\nLocation: http://" + where + b"/x\r\n\r\n")
    connection.close()


def nested(connection: socket.socket) -> None:
    body = b'{"chains":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


def hung_up(connection: socket.socket) -> None:
    connection.close()


async def test_a_peer_that_is_gone_is_told_of_once(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    timing = msgspec.structs.replace(TIMING, backoff=TIMING.backoff_max)  # longer than all of this takes
    gone = ["http://127.0.0.1:1", "https://no-such-host.invalid", str(nodes.root / "absent")]
    nodes.use(nodes.there)
    with caplog.at_level(logging.WARNING):
        async with opened(*gone, timing=timing) as native:
            for stages in ((CLONE,), (CLONE, SETUP), (CLONE, INSTALL)):
                async with native.sandbox(Recipe(stages=stages)) as sandbox:
                    assert sandbox.served.kind in ("cold", "layer")
            for figures in native.peers.values():
                assert (figures.asked, figures.failures) == (1, 1)
                assert figures.failure
    for source in gone:
        assert sum(source in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    "answer",
    [silent, babbling, endless, endless_headers, around, nested, hung_up],
    ids=lambda one: one.__name__,
)
async def test_one_that_makes_no_sense_costs_its_time_alone(nodes: Nodes, answer: Any) -> None:
    before = await built(nodes)
    with listener(answer) as source:
        async with fetching(source, peer_seconds=2.0) as (native, sandbox):
            assert sandbox.served.kind == "cold"
            assert await seen(sandbox) != before
            assert (native.peers[source].asked, native.peers[source].failures) == (1, 1)
        nodes.use(nodes.root / "third")
        async with fetching(source, str(nodes.here), peer_seconds=60) as (_, sandbox):
            assert sandbox.served.kind == "fetched"  # peers are asked in parallel
            assert await seen(sandbox) == before


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (cut(4_000_000), "closed before the end"),
        (flipped(4_000_000), "does not match its digest"),
        (held(4_000_000), "did not answer"),
    ],
    ids=["cut", "flipped", "hanging"],
)
async def test_one_that_breaks_midway_leaves_what_was_whole(nodes: Nodes, change: Change, why: str) -> None:
    """The first layer is complete; the second is built on it."""
    before = await built(nodes)
    source = await served(nodes, change)
    timing = msgspec.structs.replace(TIMING, answer=10.0) if why == "did not answer" else TIMING
    async with fetching(source, peer_seconds=300, timing=timing) as (native, sandbox):
        assert (sandbox.served.kind, sandbox.served.stage) == ("fetched", "repository")
        now = await seen(sandbox)
        assert now.split()[:2] == before.split()[:2]
        assert now.split()[-2:] != before.split()[-2:]
        assert why in native.peers[source].failure, native.peers
    nodes.use(nodes.there)
    assert len(await anyio.to_thread.run_sync(layers.ls)) == 2


def dripping(data: bytes, passed: int, _client: socket.socket) -> bytes:
    if passed > 4_000_000:
        time.sleep(0.5)
        return data[:1000]
    return data


async def test_one_that_drips_is_left_after_the_time_for_a_fetch(nodes: Nodes) -> None:
    """Each piece comes in time."""
    await built(nodes)
    source = await served(nodes, dripping)
    async with fetching(source, peer_seconds=5) as (native, sandbox):
        assert (sandbox.served.kind, sandbox.served.stage) == ("fetched", "repository")
        assert "took longer than 5 s" in native.peers[source].failure


async def test_a_directory_that_hangs_is_left_behind(nodes: Nodes) -> None:
    """A directory of a dead file server: reading it cannot be interrupted."""
    blob = nodes.root / "shared/blobs/sha256" / ("a" * 64)

    def make() -> None:
        blob.parent.mkdir(parents=True)
        os.mkfifo(blob)
        index = {"manifests": [{"digest": f"sha256:{blob.name}"}]}
        (nodes.root / "shared/index.json").write_text(json.dumps(index))

    await anyio.to_thread.run_sync(make)
    nodes.use(nodes.there)
    try:
        async with fetching(str(nodes.root / "shared"), peer_seconds=1.0) as (native, sandbox):
            assert sandbox.served.kind == "cold"
            assert "did not answer" in native.peers[str(nodes.root / "shared")].failure
    finally:
        os.close(os.open(blob, os.O_RDWR))  # lets the abandoned thread end


async def test_one_that_is_killed_midway(nodes: Nodes) -> None:
    before = await built(nodes)
    fetched = threading.Event()  # it may have ended before anything arrived

    def kill(server: Server) -> None:
        while not arrives(nodes.there / "layers") and not fetched.wait(0.001):
            pass
        server.process.kill()

    with contextlib.ExitStack() as stack:
        server = await anyio.to_thread.run_sync(stack.enter_context, nodes.listening(nodes.here))
        midway = stack.enter_context(proxied(server.source, slowly))
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.to_thread.run_sync, kill, server)
            try:
                async with fetching(midway) as (native, sandbox):
                    assert native.peers[midway].failures == 1
                    assert (await seen(sandbox, "cat stamp copy")).split()[0] == (
                        await seen(sandbox, "cat copy")
                    ).strip()
            finally:
                fetched.set()
    # A third node can still fetch all of it from the store.
    nodes.use(nodes.root / "third")
    async with fetching(str(nodes.here)) as (_, sandbox):
        assert await seen(sandbox) == before


async def test_a_server_that_is_killed_is_asked_again_when_it_is_back(nodes: Nodes) -> None:
    before = await built(nodes)
    with reserved() as port:
        source = f"http://127.0.0.1:{port}"
        at_once = msgspec.structs.replace(TIMING, backoff=0.0)
        async with opened(source, timing=at_once) as native, contextlib.AsyncExitStack() as stack:
            await native.prepare(Recipe(stages=(Stage("setup", commands=("true",)),)))
            assert native.peers[source].failures == 1
            server = nodes.listening(nodes.here, port=port)
            await anyio.to_thread.run_sync(stack.enter_context, server)
            async with native.sandbox(RECIPE) as sandbox:
                assert await seen(sandbox) == before
                assert sandbox.served.kind == "fetched"


async def test_peers_that_die_all_the_time_lose_no_request(nodes: Nodes) -> None:
    recipes = [
        Recipe(
            stages=(CLONE, Stage("setup", commands=(f"sleep 0.2; head -c {number}00000 /dev/urandom > n",)))
        )
        for number in range(1, 13)
    ]
    for recipe in recipes:
        await built_too(nodes, recipe, "cat stamp")
    enough = threading.Event()
    risen: queue.SimpleQueue[str] = queue.SimpleQueue()

    def die_and_rise(seed: int) -> None:
        moments = random.Random(seed)
        with reserved() as port:
            while not enough.is_set():
                with nodes.listening(nodes.here, port=port) as server:
                    risen.put(server.source)
                    enough.wait(moments.uniform(0.3, 2))

    threads = [threading.Thread(target=die_and_rise, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        peers: set[str] = set()
        while len(peers) < len(threads):
            peers.add(await anyio.to_thread.run_sync(risen.get))
        sizes: list[bytes] = []

        async def ask(native: Any, recipe: Recipe) -> None:
            async with native.sandbox(recipe) as sandbox:
                sizes.append(await seen(sandbox, "stat -c %s n"))

        native: Any
        async with opened(*sorted(peers)) as native, anyio.create_task_group() as group:
            for recipe in recipes:
                group.start_soon(ask, native, recipe)
        assert sorted(map(int, sizes)) == [number * 100_000 for number in range(1, 13)]
    finally:
        enough.set()
        for thread in threads:
            await anyio.to_thread.run_sync(thread.join)
    await anyio.to_thread.run_sync(Store().collect, 1 << 40)
    assert await anyio.to_thread.run_sync(os.listdir, nodes.there / "layers/making") == [".lock"]


async def test_a_killed_node_leaves_nothing_but_what_can_be_taken_up(nodes: Nodes) -> None:
    before = await built(nodes)

    midway = await served(nodes, held(4_000_000))

    def kill() -> None:
        process = asking(nodes.there, midway)
        wait = threading.Event()
        while not arrives(nodes.there / "layers"):
            assert process.poll() is None
            wait.wait(0.001)
        process.kill()
        process.communicate()

    await anyio.to_thread.run_sync(kill)
    nodes.use(nodes.there)
    left = sum(path.stat().st_size for path in nodes.there.glob("layers/parts/*"))
    async with fetching(str(nodes.here)) as (native, sandbox):
        assert await seen(sandbox) == before
        assert native.peers[str(nodes.here)].size + left < 9_000_000
    await anyio.to_thread.run_sync(Store().collect, 1 << 40)
    for where in ("parts", "making", "locks"):
        assert await anyio.to_thread.run_sync(os.listdir, nodes.there / "layers" / where) in ([], [".lock"])


async def test_nobody_waits_for_a_fetch_that_is_no_longer_wanted(nodes: Nodes) -> None:
    await built(nodes)
    gone = threading.Event()

    def say_nothing(connection: socket.socket) -> None:
        while connection.recv(65536):
            pass
        gone.set()

    with listener(say_nothing) as source:
        async with opened(source) as native:
            with anyio.move_on_after(0.5):
                await native.prepare(RECIPE)
            assert native.peers[source].failures == 0
        assert await anyio.to_thread.run_sync(gone.wait, 60)  # the connection is not left open


# --- Deciding ------------------------------------------------------------------------------------------


KEYS = tuple(f"stage:{digit * 64}" for digit in "abc")


def chain(*keys: str, seconds: float = 1.0, build_id: str = "", **lies: Any) -> LayerChain:
    told = {"name": keys[-1], "image": "host", "identity": "sha256:1"}
    upper = tuple(
        ChainLayer(
            key,
            Provenance(
                kind="setup",
                seconds=seconds,
                image="host",
                identity="sha256:1",
                below=keys[:at],
                build_id=build_id,
            ),
        )
        for at, key in enumerate(keys)
    )
    return LayerChain(**{**told, "layers": upper, **lies})


@pytest.mark.parametrize(
    ("offered", "length"),
    [
        ([chain(*KEYS[:1]), chain(*KEYS), chain(*KEYS[:2])], 3),
        ([chain(*KEYS[:2]), chain(*KEYS, identity="sha256:2")], 2),
        ([chain(*KEYS, seconds=0.01)], 0),
        ([chain(KEYS[0], KEYS[2])], 0),
        ([chain(f"stage:{'d' * 64}")], 0),
        ([chain(*KEYS, f"stage:{'d' * 64}")], 0),
        ([chain("../../etc")], 0),
        ([], 0),
    ],
)
def test_the_longest_that_fits_is_best(tmp_path: Path, offered: list[LayerChain], length: int) -> None:
    found = best_offer(Store(tmp_path), MissingLayers("sha256:1", (), KEYS), offered)
    assert (len(found.upper) if found else 0) == length
    if found:
        assert found.stored_image is None
        assert (
            best_offer(Store(tmp_path), MissingLayers("sha256:1", KEYS[:length], KEYS[length:]), offered)
            is None
        )


@pytest.mark.parametrize(("build_id", "fits"), [("ours", True), ("theirs", False)])
def test_what_lies_in_memory_alone_is_gone_on_from_too(tmp_path: Path, build_id: str, fits: bool) -> None:
    """The build is not in the store: only a chain on that very build fits."""
    missing = MissingLayers("sha256:1", KEYS[:1], KEYS[1:], "ours")
    assert bool(best_offer(Store(tmp_path), missing, [chain(*KEYS, build_id=build_id)])) == fits


async def test_it_stops_when_it_is_halted(tmp_path: Path) -> None:
    cancel = CancelToken()
    threading.Timer(0.3, cancel.set).start()
    with listener(silent) as source:
        fetch = partial(PeerSet([source], 300).fetch, Store(tmp_path), MissingLayers("sha256:1", (), KEYS))
        with pytest.raises(Cancelled):
            await anyio.to_thread.run_sync(fetch, cancel)


@pytest.mark.parametrize(
    "option",
    [
        {"peers": ["http://"]},
        {"peers": ["http://:7800"]},
        {"peers": ["http://node:port"]},
        {"peers": ["https://user:secret@node:7800"]},
        {"peers": ["https://node:7800/path"]},
        {"peers": ["tcp://node:7400"]},
        {"peers": ["exec:ssh node"]},
        {"peers": ["-"]},
        {"peers": [""]},
        {"peers": "https://node:7800"},
        {"peers": [], "peer_seconds": 0},
    ],
    ids=str,
)
def test_what_can_be_no_peer_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="peer"):
        dutyfree.open("native", **option)
