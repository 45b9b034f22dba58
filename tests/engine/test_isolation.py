"""Native without isolation, and with one wall switched off: what is missing, what stays, what is refused."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import dutyfree
from dutyfree import Limits, Recipe, Stage
from dutyfree.contract.errors import CreateError, OptionError
from dutyfree.engine.host import census
from dutyfree.engine.launcher.isolation import WALLS
from tests.awaiting import enter
from tests.engine import counts, unprivileged
from tests.processes import eventually, speaking_python

pytestmark = [
    pytest.mark.native,
    pytest.mark.usefixtures("cache"),
    pytest.mark.root("isolation cannot be reduced without root"),
]

ISOLATED = Recipe(isolation="full")


async def walls_of(substrate: Any, sandbox: Any) -> set[str]:
    """The walls around a sandbox, as the kernel shows them inside and outside."""
    script = (
        "for kind in user net ipc uts cgroup; do readlink /proc/self/ns/$kind; done;"
        "grep Seccomp: /proc/self/status; stat -f -c %T /usr"
    )
    lines = (await sandbox.exec(script)).stdout.decode().split("\n")
    own = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("user", "net", "ipc", "uts", "cgroup")]
    found = set()
    if lines[0] != own[0]:
        found.add("user-namespace")
    shared = [inside == outside for inside, outside in zip(lines[1:5], own[1:], strict=True)]
    assert len(set(shared)) == 1
    if not shared[0]:
        found.add("namespaces")
    if lines[5].split() == ["Seccomp:", "2"]:
        found.add("seccomp")
    if lines[6] == "overlayfs":
        found.add("overlay")
    found |= {"cgroups"} if "pids" in substrate.features.controllers else set()
    found |= {"memory-cgroup"} if "memory" in substrate.features.controllers else set()
    return found


OBSERVED = [wall for wall in WALLS if wall != "cpu-priority"]


@pytest.mark.parametrize("wall", OBSERVED)
async def test_each_wall_is_switched_off_alone(wall: str) -> None:
    async with dutyfree.open("native") as substrate, substrate.sandbox() as sandbox:
        usual = await walls_of(substrate, sandbox)
    async with dutyfree.open("native", without=(wall,)) as substrate, substrate.sandbox() as sandbox:
        missing = {"cgroups", "memory-cgroup"} if wall == "cgroups" else {wall}
        assert await walls_of(substrate, sandbox) == usual - missing
        await sandbox.write("file", b"kept")
        async with sandbox.fork(1) as (child,):
            assert await child.read("file") == b"kept"
        await sandbox.reset()
        assert (await sandbox.exec("ls -A /workspace /tmp /dev/shm")).stdout.count(b"file") == 0
        facts = await substrate.facts()
        assert facts["isolation"] == f"without {wall}"


def _weight(sandbox: str) -> str:
    """The CPU weight of the sandbox's control group."""
    init = next(one.init for one in census.sandboxes() if one.id == sandbox)
    thread = max(int(name) for name in os.listdir(f"/proc/{init}/task"))
    for line in Path(f"/proc/{init}/task/{thread}/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if "cpu" in names.split(","):
            return Path(f"/sys/fs/cgroup/cpu{path}/cpu.shares").read_text().strip()
    pytest.skip("the cpu controller is not of version 1")


@pytest.mark.parametrize(("without", "changes"), [((), True), (("cpu-priority",), False)])
async def test_cpu_priority(without: tuple[str, ...], changes: bool) -> None:
    async with dutyfree.open("native", without=without) as substrate, substrate.sandbox() as sandbox:
        usual = await anyio.to_thread.run_sync(_weight, sandbox.id)
        await sandbox.start("while :; do :; done")
        computing = usual
        with anyio.move_on_after(60 if changes else 0.5):
            while computing == usual:
                await anyio.sleep(0.02)
                computing = await anyio.to_thread.run_sync(_weight, sandbox.id)
        assert (computing != usual) == changes


async def test_none_has_no_wall_and_says_so() -> None:
    async with dutyfree.open("native", isolation="none") as substrate:
        async with substrate.sandbox(labels={"a": "b"}) as sandbox:
            assert await walls_of(substrate, sandbox) == set()
            found = await anyio.to_thread.run_sync(census.sandboxes)
            assert [one.isolation for one in found if one.id == sandbox.id] == ["reduced"]
        facts = await substrate.facts()
    assert (facts["isolation"], facts["enforces"]) == ("none", "none")
    probed = await dutyfree.substrates.probe("native", isolation="none")
    assert "trusted code only" in probed.detail


async def test_a_command_of_another_user_is_killed_with_its_tree() -> None:
    async with dutyfree.open("native", isolation="none") as substrate, substrate.sandbox() as sandbox:
        seen = await sandbox.exec("sleep 1000 & sleep 1000", user="nobody", timeout=0.2)
        assert seen.timed_out
        assert (await sandbox.exec("ps -e -o comm= | grep -c sleep")).stdout == b"0\n"


async def test_a_recipe_that_asks_for_isolation_is_refused() -> None:
    said = "asks for isolation"
    async with dutyfree.open("native", without=("seccomp",)) as substrate:
        with pytest.raises(CreateError, match=said):
            await substrate.prepare(ISOLATED)
        with pytest.raises(CreateError, match=said):
            substrate.sandbox(ISOLATED)
        with pytest.raises(CreateError, match=said):
            await enter(substrate.group(ISOLATED, 2))
        pool = await substrate.pooled()
        with pytest.raises(CreateError, match=said):
            await pool.acquire(ISOLATED)
        with pytest.raises(CreateError, match=said):
            await substrate.prefetch([ISOLATED])
        async with substrate.sandbox() as sandbox:  # from the pool
            assert (await sandbox.exec("true")).ok
    async with dutyfree.open("bare") as bare:
        with pytest.raises(CreateError, match=said):
            await enter(bare.sandbox(ISOLATED))
    async with dutyfree.open("native") as substrate, substrate.sandbox(ISOLATED) as sandbox:
        assert (await sandbox.exec("true")).ok


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        (Limits(memory="1G"), "memory"),
        (Limits(cpus=1), "cpus"),
        (Limits(pids=100), "pids"),
        (Limits(network="off"), "network"),
        (Limits(network=("example.org",)), "network"),
    ],
)
async def test_limits_that_nothing_enforces_are_refused(limits: Limits, name: str) -> None:
    with pytest.raises(OptionError, match=f"cannot limit {name}"):
        dutyfree.open("native", isolation="none", limits=limits)
    async with dutyfree.open("native", isolation="none") as substrate:
        with pytest.raises(CreateError, match=f"cannot limit {name} with isolation 'none'"):
            substrate.sandbox(limits=limits)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"isolation": "none", "without": ["seccomp"]}, "one of the two"),
        ({"without": ["seccomp", "seccomp"]}, "twice"),
        ({"without": ["sandbox"]}, "without"),
        ({"isolation": "some"}, "isolation"),
        ({"plain": ["workspace"]}, "absolute path"),
        ({"plain": ["/var/tmp"]}, "directory of the root"),
        ({"fixed": ["/usr/../etc"]}, "absolute path"),
        ({"fixed": ["/proc/sys"]}, "of the kernel"),
        ({"fixed": ["/usr"], "plain": ["/usr"]}, "named twice"),
        ({"fixed": [f"/usr/{n}" for n in range(9)]}, "more than 8"),
        ({"fixed": ["/" + 70 * "x"]}, "longer than"),
    ],
)
def test_bad_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        dutyfree.open("native", **options)


async def test_a_layer_built_without_isolation_is_not_kept(tmp_path: Path) -> None:
    recipe = Recipe(stages=(Stage("setup", commands=("echo built > built",)),))
    async with dutyfree.open("native", isolation="none") as substrate, substrate.sandbox(recipe) as sandbox:
        assert await sandbox.read("built") == b"built\n"
    assert not await anyio.to_thread.run_sync(lambda: list((tmp_path / "cache").rglob("built")))


KILLED = """
import asyncio, dutyfree
async def main():
    async with dutyfree.open("native", isolation="none") as substrate:
        async with substrate.sandbox() as sandbox:
            await sandbox.start("sleep 1000")
            print("running", flush=True)
            await asyncio.sleep(1000)
asyncio.run(main())
"""


def test_a_killed_owner_leaves_nothing() -> None:
    with speaking_python(KILLED) as (owner, said):
        assert said == "running"
        family = counts.Family(owner.pid)
        commands = eventually(lambda: [pid for init in family.inits for pid in counts.children(init)])
        begun = {pid: counts.started(pid) for pid in commands}
        owner.kill()
    assert begun
    assert family.remains() == set()
    assert all(counts.ended(pid, since) for pid, since in begun.items())


def test_without_root_it_is_refused() -> None:
    program = """
    import asyncio, dutyfree
    from dutyfree.contract.errors import Unavailable
    async def main():
        try:
            async with dutyfree.open("native", isolation="none"):
                pass
        except Unavailable as error:
            print(error)
    asyncio.run(main())
    """
    try:
        assert "isolation cannot be reduced without root" in unprivileged.run("-c", textwrap.dedent(program))
    finally:
        unprivileged.remove()
