"""The remote runtime of SWE-ReX, unmodified, against our server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

pytest.importorskip("swerex", reason="to enable it: make test-integrations")

from swerex.exceptions import CommandTimeoutError, NonZeroExitCodeError, SessionDoesNotExistError
from swerex.runtime.abstract import (
    BashAction,
    CloseBashSessionRequest,
    Command,
    CreateBashSessionRequest,
    ReadFileRequest,
    UploadRequest,
    WriteFileRequest,
)
from swerex.runtime.remote import RemoteRuntime

from tests.server.test_events import lately
from tests.server.test_http import Client
from tests.serving import serving

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("state")) as found:
        yield found


@pytest.fixture
async def runtime(url: str) -> AsyncIterator[RemoteRuntime]:
    found = RemoteRuntime(host=f"{url}/swerex/task-1", port=None, auth_token="")
    yield found
    await found.close()


async def test_it_is_alive(runtime: RemoteRuntime) -> None:
    await runtime.wait_until_alive(timeout=60)  # the first request creates the sandbox
    assert await runtime.is_alive(timeout=10)


async def test_its_commands_are_in_the_event_stream(runtime: RemoteRuntime, url: str) -> None:
    await runtime.create_session(CreateBashSessionRequest())
    await runtime.run_in_session(BashAction(command="echo in a session"))
    await runtime.execute(Command(command=["sh", "-c", "exit 6"]))
    found = {data.get("label"): data for _, kind, data in lately(Client(url)) if kind == "action"}
    assert found["echo in a session"]["call"] == "shell_run"
    assert found["sh -c exit 6"]["exit_code"] == 6


async def test_a_session_keeps_its_state(runtime: RemoteRuntime) -> None:
    await runtime.create_session(CreateBashSessionRequest())
    await runtime.run_in_session(BashAction(command="cd /tmp; X=(a b); echo lost >&2"))
    seen = await runtime.run_in_session(BashAction(command="pwd; echo ${X[1]}; echo err >&2"))
    assert (seen.output.splitlines(), seen.exit_code) == (["/tmp", "b", "err"], 0)
    silent = await runtime.run_in_session(BashAction(command="(exit 3)", check="silent"))
    assert silent.exit_code == 3
    with pytest.raises(NonZeroExitCodeError):
        await runtime.run_in_session(BashAction(command="false"))
    with pytest.raises(CommandTimeoutError):
        await runtime.run_in_session(BashAction(command="sleep 100", timeout=0.5))
    assert (await runtime.run_in_session(BashAction(command="pwd"))).output == "/tmp\n"
    await runtime.close_session(CloseBashSessionRequest())
    with pytest.raises(SessionDoesNotExistError):
        await runtime.run_in_session(BashAction(command="pwd"))


async def test_commands(runtime: RemoteRuntime) -> None:
    seen = await runtime.execute(Command(command="echo out; echo err >&2; exit 4", shell=True))
    assert (seen.stdout, seen.stderr, seen.exit_code) == ("out\n", "err\n", 4)
    words = await runtime.execute(Command(command=["echo", "a b"], cwd="/tmp", env={"A": "b"}))
    assert words.stdout == "a b\n"
    merged = Command(command="echo out; echo err >&2", shell=True, merge_output_streams=True)
    assert (await runtime.execute(merged)).stdout == "out\nerr\n"
    with pytest.raises(NonZeroExitCodeError):
        await runtime.execute(Command(command=["false"], check=True))
    with pytest.raises(CommandTimeoutError):
        await runtime.execute(Command(command=["sleep", "100"], timeout=0.5))


async def test_files(runtime: RemoteRuntime, tmp_path: Path) -> None:
    await runtime.write_file(WriteFileRequest(path="/tmp/deep/file", content="text"))
    assert (await runtime.read_file(ReadFileRequest(path="/tmp/deep/file"))).content == "text"
    with pytest.raises(FileNotFoundError):
        await runtime.read_file(ReadFileRequest(path="/tmp/none"))
    source = anyio.Path(tmp_path / "tree")
    await (source / "below").mkdir(parents=True)
    await (source / "below" / "file").write_text("from a tree")
    await runtime.upload(UploadRequest(source_path=str(source), target_path="/tmp/tree"))
    assert (await runtime.read_file(ReadFileRequest(path="/tmp/tree/below/file"))).content == "from a tree"
    await runtime.upload(UploadRequest(source_path=str(source / "below" / "file"), target_path="/tmp/one"))
    assert (await runtime.read_file(ReadFileRequest(path="/tmp/one"))).content == "from a tree"


async def test_names_are_sandboxes_of_their_own(runtime: RemoteRuntime, url: str) -> None:
    other = RemoteRuntime(host=f"{url}/swerex/task-2", port=None, auth_token="")
    await runtime.write_file(WriteFileRequest(path="/tmp/mine", content="x"))
    with pytest.raises(FileNotFoundError):
        await other.read_file(ReadFileRequest(path="/tmp/mine"))
    await other.close()
