"""The E2B runtime of verifiers, unmodified, with our server in the place of E2B."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

pytest.importorskip("verifiers", reason="to enable it: make test-integrations")

from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes.e2b import E2BConfig, E2BRuntime

from dutyfree.engine.launcher.network_policy import HOST
from tests import networking
from tests.serving import serving

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("state")) as found:
        yield found


@pytest.fixture
async def runtime(url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    monkeypatch.setenv("E2B_API_URL", url)
    monkeypatch.setenv("E2B_SANDBOX_URL", url)
    monkeypatch.setenv("E2B_API_KEY", "e2b_anything")
    # The image of E2B stands for the server's own: no registry is needed.
    runtime = E2BRuntime(E2BConfig(image="e2bdev/base", memory=0.5, creates_per_sec=None, allow=["*"]))
    await runtime.start()
    try:
        yield runtime
    finally:
        await runtime.stop()


async def test_a_template_is_built_once_and_programs_run(runtime: Any, url: str) -> None:
    done = await runtime.run(["sh", "-c", "echo out; echo err >&2; pwd; exit 3"], {"A": "b"})
    assert (done.exit_code, done.stdout, done.stderr) == (3, "out\n/app\n", "err\n")
    program = await runtime.run_program(["sh", "-c", "echo $A; exit 4"], {"A": "b"})
    assert (program.exit_code, program.stdout) == (4, "b\n")
    again = E2BRuntime(runtime.config)
    await again.start()
    assert again.info.template == runtime.info.template
    await again.stop()


async def test_files(runtime: Any) -> None:
    data = bytes(range(256))
    await runtime.write("deep/file", data)
    assert await runtime.read("deep/file") == data
    with pytest.raises(SandboxError):
        await runtime.read("missing")


async def test_a_process_with_exact_bytes_and_signals(runtime: Any) -> None:
    process = await runtime.open_process(["cat"], {})
    await process.write(b"\xff\x00bytes")
    got = b""
    async for piece in process.stdout:
        got += piece
        if len(got) == 7:
            break
    assert got == b"\xff\x00bytes"
    await process.terminate()  # with kill, by the pid
    assert await process.wait() != 0
    assert await process.poll() is not None


async def test_a_background_program_goes_on(runtime: Any) -> None:
    await runtime.run_background(["sh", "-c", "echo $$; exec sleep 1000"], {}, "/tmp/log")
    check = "while [ ! -s /tmp/log ]; do sleep 0.01; done; kill -0 $(cat /tmp/log) && echo alive"
    assert (await runtime.run(["sh", "-c", check], {})).stdout == "alive\n"


@pytest.mark.root("only root gives sandboxes networks of their own")
async def test_egress_is_closed_before_the_agent_runs(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before that, it reaches other machines, but not the server, which has no token."""
    monkeypatch.setenv("E2B_API_URL", url)
    monkeypatch.setenv("E2B_SANDBOX_URL", url)
    monkeypatch.setenv("E2B_API_KEY", "e2b_anything")
    runtime = E2BRuntime(E2BConfig(image="e2bdev/base", memory=0.5, creates_per_sec=None, allow=[]))
    await runtime.start()
    with networking.neighbour() as other, networking.greeter() as greeter:
        other.greet(8000)
        reach = networking.reach(other.address, 8000)
        try:
            assert (await runtime.run(reach, {})).stdout == "neighbour\n"
            assert (await runtime.run(networking.reach(HOST, greeter.port), {})).exit_code == 1
            await runtime.prepare_execution([])
            assert (await runtime.run(reach, {})).exit_code == 1
        finally:
            await runtime.stop()
