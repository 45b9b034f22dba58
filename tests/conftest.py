"""What all tests share: the event loop, the watch for blocking calls, the substrates, and the C program."""

from __future__ import annotations

import functools
import inspect
import os
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import hypothesis
import pytest
from blockbuster import BlockBuster

import dutyfree
from dutyfree import substrates
from dutyfree.contract import Availability, Substrate
from dutyfree.engine.launcher.timeouts import Timeouts
from dutyfree.substrates.docker.engine import Engine, socket_path
from dutyfree.substrates.native import Native, NativeConfig
from tests.modules import load

ROOT = Path(__file__).parents[1]

# Shells start what is to run in the background with Ctrl-C ignored: so would be all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is no finding: neither in what is tested nor in how fast examples are thought of.
hypothesis.settings.register_profile(
    "search", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], max_examples=1000
)
# The same examples each time, so that a test that fails has been broken; new ones are looked for with
# pytest --hypothesis-profile=search.
hypothesis.settings.register_profile(
    "dutyfree", hypothesis.settings.get_profile("search"), max_examples=100, derandomize=True
)
hypothesis.settings.load_profile("dutyfree")

HARMLESS = {
    "os.read": ("subprocess.py", "_execute_child"),  # ends with the child's exec
    # Of /proc, which never waits for a disk:
    "io.BufferedReader.read": ("substrates/local/reaper.py", "last_pid"),
    "io.TextIOWrapper.read": ("substrates/local/reaper.py", "last_pid"),
}
"""Calls that BlockBuster takes for blocking, and where they are not."""

FIXTURES = {
    "native": {"native", "impatient", "patient"},
    "docker": {"docker", "engine"},
    "kubernetes": {"cluster"},
}
"""Markers, and the fixtures that imply them."""


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of its own, for a test that counts what is in it."""
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def blocking_calls_fail(request: pytest.FixtureRequest) -> Iterator[None]:
    """In an async test, a call of ours that blocks the event loop is an error."""
    function = getattr(request.node, "function", None)
    if not inspect.iscoroutinefunction(function):
        yield
        return
    watch = BlockBuster("dutyfree")
    for name, found in watch.functions.items():
        # A substrate is looked up and imported once.
        found.can_block_in("<frozen importlib._bootstrap>", "_find_and_load")
        found.can_block_in("importlib/metadata/__init__.py", "entry_points")
        # In a thread, with an event loop of its own.
        found.can_block_in("substrates/kubernetes/api.py", ("_cluster", "fresh_keys"))
        # Before a server serves.
        found.can_block_in("server/service.py", "open")
        found.can_block_in("server/listen.py", "serving")
        found.can_block_in("server/e2b/template_store.py", "__enter__")
        if name in HARMLESS:
            found.can_block_in(*HARMLESS[name])
    watch.activate()
    try:
        yield
    finally:
        watch.deactivate()


@functools.cache
def probed(name: str) -> Availability:
    """Found in a thread of its own: this one may have an event loop that fixtures of a module share."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(lambda: anyio.run(substrates.probe, name)).result()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker runs all tests that share fixtures: of a module, or of a substrate's conformance."""
    from xdist.scheduler import LoadScopeScheduling

    class BySharedFixtures(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
        def _split_scope(self, nodeid: str) -> str:
            module, _, test = nodeid.partition("::")
            substrate = re.match(r"test_conformance\[(\w+)-", test)
            return f"{module} {substrate[1]}" if substrate else module

    return BySharedFixtures(config, log)


def pytest_itemcollected(item: pytest.Item) -> None:
    """A test with a substrate's fixture needs what the substrate needs."""
    for name, fixtures in FIXTURES.items():
        if fixtures & {*getattr(item, "fixturenames", ())}:
            item.add_marker(name)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("native") and not (found := probed("native")).available:
        pytest.skip(f"native: {found.detail}; to enable it: {found.remedy}")
    if (root := item.get_closest_marker("root")) and os.geteuid() != 0:
        pytest.skip(f"{root.args[0]}; to enable it: run as root")
    if item.get_closest_marker("loop"):
        if not (Path("/dev/loop-control").exists() and shutil.which("mke2fs")):
            pytest.skip(
                "no loop devices or no mke2fs; to enable it: modprobe loop; apt-get install e2fsprogs"
            )
        disk = shutil.disk_usage(tempfile.gettempdir())
        if disk.free < disk.total / 10:  # native leaves 5 % free
            pytest.skip(f"the disk of {tempfile.gettempdir()} is 90 % full; to enable it: free some space")
    if item.get_closest_marker("docker") and not (found := probed("docker")).available:
        pytest.skip(f"docker: {found.detail}; to enable it: scripts/docker-engine start")
    if item.get_closest_marker("vm") and not (found := probed("vm")).available:
        pytest.skip(f"vm: {found.detail}; to enable it: {found.remedy}")
    if item.get_closest_marker("kubernetes") and not (found := probed("kubernetes")).available:
        pytest.skip(f"kubernetes: {found.detail}; to enable it: make k8s-up")


@pytest.fixture
async def scripted() -> AsyncIterator[Substrate]:
    async with dutyfree.open("scripted") as substrate:
        yield substrate


@pytest.fixture
async def bare() -> AsyncIterator[Substrate]:
    async with dutyfree.open("bare") as substrate:
        yield substrate


@pytest.fixture(scope="module")
async def native() -> AsyncIterator[Substrate]:
    async with dutyfree.open("native") as substrate:
        yield substrate


@pytest.fixture
async def impatient() -> AsyncIterator[Substrate]:
    """``native`` that gives up an init which does not answer for 1.5 s."""
    async with Native(NativeConfig(), Timeouts(answer=1.5)) as substrate:
        yield substrate


@pytest.fixture
async def patient() -> AsyncIterator[Substrate]:
    """``native`` that waits a minute for an init: in an overloaded sandbox processes end slowly."""
    async with Native(NativeConfig(), Timeouts(answer=60.0)) as substrate:
        yield substrate


@pytest.fixture(scope="module")
async def docker() -> AsyncIterator[Any]:
    """``docker`` with its image imported."""
    async with dutyfree.open("docker") as substrate:
        await substrate.prepare()
        yield substrate


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    """The Docker engine itself."""
    async with Engine(socket_path(None)) as opened:
        await opened.negotiate((1, 41))
        yield opened


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C program with sanitizers in it."""
    if not shutil.which("gcc"):
        pytest.skip("gcc is missing; to enable it: apt-get install gcc")
    target = tmp_path_factory.mktemp("engine") / "dutyfree-init"
    reason = load(ROOT / "hatch_build.py").build(ROOT / "src/dutyfree/engine", target, sanitized=True)
    if "asan" in reason:
        pytest.skip(f"no sanitizers here: {reason}")
    assert not reason, reason
    return target
