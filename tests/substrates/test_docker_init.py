"""Docker with our init as PID 1 (``actions="init"``), with containers ready, with baked images, in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

import dutyfree
from dutyfree import Limits, Recipe, Stage
from dutyfree.conformance import CHECKS, Check
from dutyfree.contract.abilities import Warmed
from dutyfree.contract.errors import CleanupError, DutyfreeError, ExecError, SandboxClosed
from dutyfree.substrates.docker import guest, images
from dutyfree.substrates.docker.engine import Engine, EngineError
from dutyfree.substrates.docker.gc import baked_leftovers
from dutyfree.substrates.docker.guest import Demultiplexer
from dutyfree.substrates.docker.substrate import DockerSubstrate
from tests.awaiting import enter, together
from tests.docker_engine import containers, proxied, until_gone
from tests.processes import speaking_python

NAMES = """
    signals_are_default user stdin_of_ten_megabytes unread_stdin output_limit timeout_kills_the_tree
    timeout_kills_the_disguised many_cancellations leaving_ends_what_runs tree_round_trip
    download_stays_inside round_trips listing_of_many special_files recipe_path streaming batch watch
    batch_of_large_contents managed_processes out_of_memory
"""
CORE = {*NAMES.split()}
"""What depends on the stream or on the runtime. The other checks are slow tests in ``test_conformance``."""


@pytest.fixture(scope="module")
async def docker() -> AsyncIterator[DockerSubstrate]:
    async with dutyfree.open("docker", actions="init") as opened:
        await opened.prepare()
        yield opened


@pytest.mark.parametrize("check", [check for check in CHECKS if check.name in CORE], ids=str)
async def test_conformance(docker: DockerSubstrate, check: Check) -> None:
    await check(docker)


# --- The stream -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 8, 11, 1000])
def test_frames_of_the_engine_in_any_pieces(size: int) -> None:
    parts = [(1, b"one"), (2, b"complaint"), (1, b""), (1, b"two" * 100), (2, b"!")]
    stream = b"".join(bytes((kind, 0, 0, 0)) + len(data).to_bytes(4) + data for kind, data in parts)
    streams = Demultiplexer()
    found = b"".join(streams.decode(stream[at : at + size]) for at in range(0, len(stream), size))
    assert found == b"one" + b"two" * 100
    assert streams.said == "complaint!"


async def test_large_contents_beside_commands(docker: DockerSubstrate, tmp_path: Path) -> None:
    """Files, trees and input above every buffer go through the stream, and hold up no one else."""
    data = bytes(range(256)) * (20 << 12)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "large").write_bytes(data)
    async with docker.sandbox() as sandbox:

        async def copy() -> None:
            await sandbox.upload(tmp_path / "tree", "tree")
            await sandbox.download("tree", tmp_path / "back")

        async def write() -> None:
            await sandbox.write("file", data, mode=0o600)
            assert await sandbox.read("file") == data

        async def feed() -> None:
            seen = await sandbox.exec(["cksum"], stdin=data)
            assert seen.stdout.split()[1] == str(len(data)).encode()

        async def never_read() -> None:
            seen = await sandbox.exec("sleep 1; echo done", stdin=data)
            assert seen.stdout == b"done\n"

        await together(copy, write, feed, never_read)
    assert (tmp_path / "back" / "large").read_bytes() == data


async def test_commands_cannot_reach_init(docker: DockerSubstrate) -> None:
    """Root in the container neither traces init, nor opens its streams, nor limits, changes or ends it."""
    attempts = """
        try() { ( eval "$1" ) 2>/dev/null && echo "succeeded: $1"; }
        for fd in 0 1 2 3 4 5 6 7 8 9; do
            try ": <  /proc/1/fd/$fd"
            try ": >> /proc/1/fd/$fd"
        done
        try "head -c 1 /proc/1/mem >/dev/null"
        try "cat /proc/1/maps | grep -q ."
        try ": >> /proc/1/exe"
        try "echo x >> /.dutyfree-init"
        try "rm -f /.dutyfree-init"
        # With less memory or fewer descriptors, init would fail, and the machine would seem to be the cause.
        for limit in AS DATA NOFILE FSIZE CPU; do
            try "python3 -c 'from resource import *; prlimit(1, RLIMIT_$limit, (1, 1))'"
        done
        kill -KILL 1; kill -STOP 1; kill -TERM 1
        ls -l /proc/self/fd | grep -c pipe
        echo end
    """
    async with docker.sandbox() as sandbox:
        seen = await sandbox.exec(attempts)
        # Of a command only stdout and stderr are pipes, here of grep.
        assert seen.stdout.split() == [b"2", b"end"], seen
        assert (await sandbox.exec("echo still here")).stdout == b"still here\n"


async def test_the_program_is_copied_where_the_engine_does_not_see_it(docker: DockerSubstrate) -> None:
    containers_of = docker._containers
    containers_of._is_mounted = False
    try:
        async with docker.sandbox() as sandbox:
            assert (await sandbox.exec("tr '\\0' ' ' < /proc/1/cmdline")).stdout == b"/.dutyfree-init guest "
    finally:
        containers_of._is_mounted = True


def test_a_file_that_the_engine_does_not_see() -> None:
    said = 'invalid mount config for type "bind": bind source path does not exist: /x'
    assert guest.is_unseen(EngineError(400, said))
    assert not guest.is_unseen(EngineError(400, "no such image"))


# --- Failures ---------------------------------------------------------------------------------------------


async def test_the_cause_of_a_broken_stream(docker: DockerSubstrate, engine: Engine) -> None:
    failures: list[DutyfreeError] = []

    async def run(sandbox: dutyfree.Sandbox) -> None:
        try:
            await sandbox.exec("sleep 1000")
        except DutyfreeError as error:
            failures.append(error)

    async with docker.sandbox() as sandbox:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, sandbox)
            await sandbox.exec("true")
            await engine.request("POST", f"/containers/{sandbox.id}/kill")
        assert isinstance(failures[0], SandboxClosed)
        assert failures[0].phase == "dispatch"
        assert "killed or stopped from outside" in str(failures[0])
        with pytest.raises(SandboxClosed):
            await sandbox.read("file")


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
async def test_an_engine_that_breaks_off(engine: Engine, tmp_path: Path) -> None:
    label = ""
    async with proxied(tmp_path) as proxy:
        with pytest.raises(CleanupError):  # noqa: PT012
            async with dutyfree.open("docker", host=proxy.path, actions="init") as opened:
                label = opened.owner
                async with opened.sandbox() as sandbox:
                    await proxy.break_off()
                    with pytest.raises(ExecError, match=r"the stream to the container \w+ ended"):
                        await sandbox.exec("sleep 1000")
    await stopped(engine, label)
    for container in await containers(engine, label):
        await engine.request("DELETE", f"/containers/{container}", query={"force": "1"})


async def stopped(engine: Engine, label: str) -> None:
    """Init ends when its stdin does, and the container with it."""
    for container in await containers(engine, label):
        with anyio.fail_after(60):
            await engine.request("POST", f"/containers/{container}/wait")


OWNER = """
    import anyio, dutyfree

    async def main():
        async with dutyfree.open("docker", actions="init", ready=2) as substrate:
            await substrate.prepare()
            async with substrate.sandbox() as sandbox:
                await sandbox.start("sleep 1000")
                print(substrate.owner, flush=True)
                await anyio.sleep_forever()

    anyio.run(main)
"""


async def test_a_killed_owner_leaves_nothing(engine: Engine) -> None:
    with speaking_python(OWNER) as (process, label):  # with a sandbox and with containers ready
        assert len(await containers(engine, label)) >= 2
        process.kill()
    await until_gone(engine, label)


# --- Ready, baked, in memory ------------------------------------------------------------------------------


@pytest.mark.parametrize("actions", ["exec", "init"])
async def test_ready_containers_are_used_once(engine: Engine, actions: str) -> None:
    async with dutyfree.open("docker", actions=actions, ready=1) as opened:
        await opened.prepare()
        seen = set()
        for _ in range(3):
            assert await opened.sandboxes() == []
            async with opened.sandbox() as sandbox:
                assert [span.name for span in sandbox.spans] == ["ready"]
                assert await opened.sandboxes() == [sandbox.id]
                seen.add(sandbox.id)
                assert (await sandbox.exec("ls -A; touch trace")).stdout == b""
        assert len(seen) == 3
        # One that died meanwhile is not handed out.
        await opened.prepare()
        ready = (await containers(engine, f"{opened.owner}"))[0]
        await engine.request("POST", f"/containers/{ready}/kill")
        async with opened.sandbox() as sandbox:
            assert sandbox.id != ready[:12]
            assert (await sandbox.exec("true")).ok
        # Labels and limits make another kind of container.
        async with opened.sandbox(limits=Limits(pids=50), labels={"mine": "1"}) as sandbox:
            assert [span.name for span in sandbox.spans][:2] == ["create", "start"]
            assert [one[:12] for one in await containers(engine, "mine=1")] == [sandbox.id]
        # Those that were prepared with limits that nobody asks for are given up.
        recipe = Recipe(env={"A": "b"}, stages=(Stage("setup", commands=("touch made",)),))
        await opened.prepare(recipe)
        before = set(await containers(engine, opened.owner))
        await enter(opened.sandbox(recipe, limits=Limits(pids=60)))
        with anyio.fail_after(60):
            while len(before & set(await containers(engine, opened.owner))) == len(before):  # noqa: ASYNC110 (the engine removes it)
                await anyio.sleep(0.05)
        label = opened.owner
    assert await containers(engine, label) == []


async def test_a_baked_image_stays_for_the_next_run(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "unique").write_text(str(tmp_path))
    stages = (
        Stage("files", files={"unique": tmp_path / "unique"}),
        Stage("setup", commands=("date +%s%N >made",)),
    )
    recipe = Recipe(stages=stages)
    found: list[bytes] = []
    made: list[str] = []
    for _ in range(2):
        async with dutyfree.open("docker", actions="init", baked=True) as opened:
            assert isinstance(opened, Warmed)
            await opened.prepare(recipe)
            made.append(await opened._images.of(recipe))
            async with opened.sandbox(recipe) as sandbox:
                found.append(await sandbox.read("made"))
                assert made[0] not in await baked_leftovers(engine, 0), "an image in use"
    assert found[0] == found[1]
    assert made[0] == made[1]
    assert made[0] in await baked_leftovers(engine, 0)
    assert made[0] not in await baked_leftovers(engine)
    parent = (await images.inspect(engine, made[0]) or {})["Parent"]
    await images.remove(engine, [made[0], parent])
    assert await images.identify(engine, made[0]) is None


@pytest.mark.parametrize("actions", ["exec", "init"])
@pytest.mark.docker
async def test_storage_in_memory_has_the_files_of_the_recipe(actions: str) -> None:
    recipe = Recipe(
        stages=(Stage("setup", commands=("mkdir -p a && echo made >a/made && ln -s a/made link",)),)
    )
    async with dutyfree.open("docker", actions=actions, storage="memory") as opened:
        async with opened.sandbox(recipe) as sandbox:
            seen = await sandbox.exec(
                "cat link; stat -f -c %T . /tmp; printf '#!/bin/sh\necho ran' >x; chmod +x x; ./x"
            )
            assert seen.stdout == b"made\ntmpfs\ntmpfs\nran\n"
        facts = await opened.facts()
    assert facts["storage"].split()[0] == "memory"
    assert facts["actions"] == actions
    assert facts["enforces"] == "cpu, memory, pids"
