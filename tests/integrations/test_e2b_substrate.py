"""The substrate ``e2b``, through the SDK of E2B, on our own server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

pytest.importorskip("e2b", reason="to enable it: make test-integrations")

import dutyfree
from dutyfree import gc
from dutyfree.conformance import CHECKS, Check
from dutyfree.contract import Limits, NetworkPolicy, Recipe, Stage, Substrate
from dutyfree.contract.abilities import Forkable, NetworkControl, Snapshottable
from dutyfree.contract.errors import CreateError, SandboxClosed, Unavailable
from dutyfree.substrates.e2b.sandbox import E2BSandbox, egress
from dutyfree.substrates.e2b.substrate import E2B
from tests import networking
from tests.serving import serving

pytestmark = pytest.mark.native

UNKNOWN = ("out_of_memory", "out_of_memory_in_the_background")
"""E2B does not say that memory ran out: a command ends by signal 9."""
WITHOUT_HOST = ("network_changes",)
"""For E2B's clients, ``on`` does not include this machine's loopback."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("state")) as found:
        yield found


@pytest.fixture
def options(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_URL", url)
    monkeypatch.setenv("E2B_SANDBOX_URL", url)
    monkeypatch.setenv("E2B_API_KEY", "e2b_anything")


@pytest.fixture
async def substrate(options: None) -> AsyncIterator[E2B]:
    async with dutyfree.open("e2b") as found:
        yield found


@pytest.mark.parametrize(
    "check", [check for check in CHECKS if check.name not in (*UNKNOWN, *WITHOUT_HOST)], ids=str
)
async def test_conformance(substrate: Substrate, check: Check) -> None:
    await check(substrate)


@pytest.mark.root("only root gives sandboxes networks of their own")
async def test_the_network_changes_and_has_this_machine_only_if_it_is_named(substrate: E2B) -> None:
    assert substrate.host_address is not None
    with networking.greeter() as greeter:
        policies: list[tuple[NetworkPolicy, bool]] = [
            ("on", False),
            ((f"host:{greeter.port}",), True),
            ("off", False),
            ("on", False),
        ]
        async with substrate.sandbox() as sandbox:
            assert isinstance(sandbox, NetworkControl)
            for policy, reached in policies:
                await sandbox.set_network(policy)
                seen = await sandbox.exec(networking.reach(substrate.host_address, greeter.port))
                assert (b"greetings" in seen.stdout) == reached, policy


async def test_the_end_of_a_sandbox_is_verified(substrate: E2B) -> None:
    async with substrate.sandbox() as sandbox:
        assert await substrate.sandboxes() == [sandbox.id]
        assert [span.name for span in sandbox.spans] == ["create", "ready"]
    assert await substrate.sandboxes() == []
    with pytest.raises(SandboxClosed):
        await sandbox.exec("true")


async def test_a_sandbox_that_e2b_ended_is_closed(substrate: E2B) -> None:
    async with substrate.sandbox() as sandbox:
        await sandbox.box.kill()
        with pytest.raises(SandboxClosed):
            await sandbox.exec("true")


async def test_limits_become_a_template_and_others_are_refused(substrate: E2B) -> None:
    eat = ["python3", "-c", "x = bytearray(512 << 20)"]
    async with substrate.sandbox(limits=Limits(memory="128M", cpus=1)) as sandbox:
        assert not (await sandbox.exec(eat)).ok
    with pytest.raises(CreateError, match="cannot limit pids"):
        async with substrate.sandbox(limits=Limits(pids=10)):
            pass


async def test_stages_run_and_snapshots_and_forks_keep_files(substrate: E2B) -> None:
    recipe = Recipe(stages=(Stage("setup", ("echo staged > staged",)),), env={"NAME": "value"})
    async with substrate.sandbox(recipe) as sandbox:
        assert isinstance(sandbox, Snapshottable)
        assert isinstance(sandbox, Forkable)
        assert (await sandbox.exec("cat staged; echo $NAME")).stdout == b"staged\nvalue\n"
        kept = await sandbox.snapshot()
        async with substrate.sandbox(kept) as copy:
            assert (await copy.exec("cat staged; echo $NAME")).stdout == b"staged\nvalue\n"
        async with sandbox.fork(2) as children:
            assert len({child.id for child in children}) == 2
            for child in children:
                assert isinstance(child, E2BSandbox)
                assert (await child.exec("cat staged; echo $NAME")).stdout == b"staged\nvalue\n"
    assert await substrate.sandboxes() == []


async def test_gc_ends_the_sandboxes_of_a_killed_program(substrate: E2B) -> None:
    program = (
        "import asyncio, dutyfree\n"
        "async def main():\n"
        "    async with dutyfree.open('e2b') as substrate, substrate.sandbox() as sandbox:\n"
        "        print(sandbox.id, flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    name = (await owner.stdout.readline()).decode().strip()
    owner.kill()
    await owner.wait()
    async with substrate.sandbox() as living:
        found = await gc._e2b(dry_run=True)
        assert [one.what for one in found] == [name]
        await gc._e2b(dry_run=False)
        assert await gc._e2b(dry_run=False) == []
        assert (await living.exec("true")).ok


async def test_without_a_key_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(Unavailable, match="E2B_API_KEY"):
        async with dutyfree.open("e2b"):
            pass


def test_network_policies() -> None:
    assert egress(None) == egress("off") == {"allow_internet_access": False}
    assert egress("on") == {"allow_internet_access": True}
    assert egress(("example.org",)) == {"allow_out": ["example.org"], "deny_out": ["0.0.0.0/0"]}


def test_a_study_with_a_server_of_its_own(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(
        'name = "small"\nsubstrates = ["bare", "e2b"]\nwarmups = 0\n'
        "[options]\ne2b = { serve = true }\n[workloads]\nT0 = 2\n"
    )
    command = [sys.executable, "-m", "dutyfree", "study", "--plan", str(plan), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_dutyfree_run_passes_input_and_output() -> None:
    words = ["run", "--substrate", "e2b", "--option", "serve=true", "--", "sh", "-c", "cat; echo err >&2"]
    done = subprocess.run([sys.executable, "-m", "dutyfree", *words], capture_output=True, input=b"in\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"in\n", b"err\n")
