"""The substrate ``daytona`` with the SDK's own classes. Nothing here is Daytona.

Models, parameters and errors are those of the SDK. Where a command runs, the SDK's AsyncProcess has an API
client that answers with the SDK's models from a local shell. This shows what we do with an answer, not what
Daytona answers.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import pytest

pytest.importorskip("daytona", reason="to enable it: make test-integrations")

from daytona import (
    CreateSandboxFromImageParams,
    CreateSandboxFromSnapshotParams,
    DaytonaError,
    SandboxState,
)
from daytona._async.filesystem import AsyncFileSystem
from daytona._async.process import AsyncProcess
from daytona.common.errors import (
    SOURCE_API,
    SOURCE_DAEMON,
    DaytonaConnectionError,
    DaytonaQueueTimeoutError,
    create_daytona_error,
)
from daytona_toolbox_api_client_async import (
    ExecuteResponse,
    ProcessApi,
    SessionCommandLogsResponse,
    SessionExecuteResponse,
)

import dutyfree
from dutyfree import gc, substrates
from dutyfree.contract import Limits
from dutyfree.contract.errors import (
    CleanupError,
    CollectError,
    CreateError,
    DispatchError,
    ExecError,
    Exhausted,
    SandboxClosed,
    SubstrateError,
    Unavailable,
)
from dutyfree.substrates.daytona.errors import mapped, restated
from dutyfree.substrates.daytona.execution import ExecRequest, Execution
from dutyfree.substrates.daytona.request import create_params
from dutyfree.substrates.daytona.sandbox import DaytonaSandbox, delete
from dutyfree.substrates.daytona.substrate import listed
from dutyfree.substrates.daytona.wrapper import FRAME_MAX, INLINE_MAX, TEXT_MAX

UNREACHABLE = "http://127.0.0.1:9/api"  # the port "discard", where no server is


# --- Parameters -----------------------------------------------------------------------------------------


def params(image: str | None = None, limits: Limits | None = None, **more: Any) -> Any:
    given: dict[str, Any] = {"snapshot": "", "user": "", "lease": 300} | more
    return create_params(image, limits or Limits(), {"a": "b"}, **given)


def test_a_sandbox_is_deleted_without_its_program() -> None:
    made = params(lease=301)
    assert isinstance(made, CreateSandboxFromSnapshotParams)
    assert (made.auto_stop_interval, made.auto_delete_interval) == (6, 0)
    assert made.labels == {"a": "b"}
    assert (made.snapshot, made.os_user, made.network_block_all) == (None, None, True)


def test_images_and_snapshots() -> None:
    made = params("python:3.12", Limits(cpus=2, memory="4G", disk="10G"), user="me")
    assert isinstance(made, CreateSandboxFromImageParams)
    assert (made.image, made.os_user) == ("python:3.12", "me")
    assert made.resources is not None
    assert (made.resources.cpu, made.resources.memory, made.resources.disk) == (2, 4, 10)
    assert params("daytona-snapshot:mine").snapshot == "mine"
    assert params(snapshot="usual").snapshot == "usual"


@pytest.mark.parametrize(
    ("image", "limits", "reason"),
    [
        ("python", Limits(pids=5), "pids"),
        ("python", Limits(cpus=1.5), "cpus to a fraction"),
        ("python", Limits(memory="512M"), "memory to a part of a GiB"),
        (None, Limits(memory="1G"), "from a snapshot"),
        ("python", Limits(network=("example.org:443",)), "without ports"),
        ("python", Limits(network=("host",)), "'host'"),
        ("python", Limits(network=("2001:db8::/32",)), "IPv4"),
        ("python", Limits(network=("10.0.0.300",)), "10.0.0.300"),
        ("python", Limits(network=("example.org", "10.0.0.0/8")), "at once"),
    ],
)
def test_what_daytona_cannot_limit_is_refused(image: str | None, limits: Limits, reason: str) -> None:
    with pytest.raises(CreateError, match=reason):
        params(image, limits)


def test_the_network() -> None:
    assert params(limits=Limits(network="on")).network_block_all is False
    assert params(limits=Limits(network="off")).network_block_all is True
    assert (
        params(limits=Limits(network=("10.0.0.0/8", "1.2.3.4"))).network_allow_list == "10.0.0.0/8,1.2.3.4/32"
    )
    made = params(limits=Limits(network=("example.org", "*.example.com")))
    assert (made.domain_allow_list, made.network_block_all) == ("example.org,*.example.com", None)


# --- Errors ---------------------------------------------------------------------------------------------


def answer(status: int, source: str | None = SOURCE_API, code: str | None = None) -> DaytonaError:
    return create_daytona_error("it says no", status_code=status, source=source, code=code)


@pytest.mark.parametrize(
    ("error", "phase", "expected"),
    [
        (answer(404), ExecError, SandboxClosed),
        (answer(404), CreateError, CreateError),
        (answer(404, SOURCE_DAEMON, "PROCESS_NOT_FOUND"), ExecError, ExecError),
        (answer(404, SOURCE_DAEMON), DispatchError, DispatchError),
        (answer(410, SOURCE_DAEMON, "SESSION_ENDED"), ExecError, ExecError),
        (answer(429), CreateError, Exhausted),
        (answer(503), DispatchError, Exhausted),
        (DaytonaQueueTimeoutError("late"), CreateError, Exhausted),
        (answer(401), CreateError, CreateError),
        (answer(500), CollectError, CollectError),
        (DaytonaConnectionError("broken"), DispatchError, DispatchError),
        (TimeoutError(), CleanupError, CleanupError),
    ],
)
def test_errors_have_their_phase(
    error: Exception, phase: type[SubstrateError], expected: type[SubstrateError]
) -> None:
    with pytest.raises(expected, match="what happened") as found, mapped(phase, "what happened"):
        raise error
    assert type(found.value) is expected
    assert found.value.__cause__ is error


def test_a_wrong_key_has_a_remedy() -> None:
    assert "DAYTONA_API_KEY" in str(restated(answer(401), CreateError, "no"))


# --- Commands -------------------------------------------------------------------------------------------


class LocalApi(ProcessApi):  # type: ignore[misc]
    """Answers as the SDK's API client does, with its models, from a shell of this machine."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.sessions: set[str] = set()
        self.late = 0
        """How often the log of a session is not complete."""
        self.failure: Exception | None = None
        self._logs = ("", "")

    async def _run(self, text: str) -> tuple[bytes, bytes]:
        self.texts.append(text)
        if self.failure is not None:
            raise self.failure
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec("/bin/sh", "-c", text, stdout=pipe, stderr=pipe)
        return await process.communicate()

    async def execute_command(self, request: Any, _request_timeout: float, **_: Any) -> ExecuteResponse:
        out, err = await self._run(request.command)
        return ExecuteResponse(exit_code=0, result=(out + err).decode())

    async def create_session(self, request: Any, **_: Any) -> None:
        self.sessions.add(request.session_id)

    async def delete_session(self, session_id: str, **_: Any) -> None:
        self.sessions.remove(session_id)

    async def session_execute_command(
        self, session_id: str, request: Any, _request_timeout: float, **_: Any
    ) -> SessionExecuteResponse:
        assert session_id in self.sessions
        out, err = await self._run(request.command)
        self._logs = (out.decode(), err.decode())
        first = ("", "") if self.late else self._logs
        return SessionExecuteResponse(cmd_id="1", exit_code=0, stdout=first[0], stderr=first[1])

    async def get_session_command_logs(
        self, session_id: str, command_id: str, **_: Any
    ) -> SessionCommandLogsResponse:
        self.late -= 1
        cut = 20 if self.late else None
        return SessionCommandLogsResponse(output="", stdout=self._logs[0][:cut], stderr=self._logs[1])


class LocalFiles(AsyncFileSystem):  # type: ignore[misc]
    """The SDK's calls for files, on this machine."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def upload_file(self, src: bytes, dst: str, timeout: int = 0) -> None:
        self.calls.append("upload")
        await anyio.Path(dst).write_bytes(src)

    async def download_file(self, *args: str) -> bytes:
        self.calls.append("download")
        return await anyio.Path(args[0]).read_bytes()

    async def delete_file(
        self, path: str, recursive: bool = False, request_timeout: float | None = None
    ) -> None:
        assert recursive
        assert Path(path).name.startswith("dutyfree-")
        self.calls.append("delete")
        await anyio.to_thread.run_sync(shutil.rmtree, path)


@pytest.fixture
def api() -> LocalApi:
    return LocalApi()


@pytest.fixture
def box(api: LocalApi) -> Any:
    return SimpleNamespace(id="box", process=AsyncProcess("python", api), fs=LocalFiles())


@pytest.fixture(params=["session", "exec"])
def sandbox(request: pytest.FixtureRequest, box: Any, tmp_path: Path) -> DaytonaSandbox:
    owner: Any = SimpleNamespace(user="", lease=300, plain=request.param == "exec", client=None)
    made = DaytonaSandbox(owner, box, Limits(output=1 << 20))
    made._workdir = str(tmp_path)
    return made


async def test_a_command(sandbox: DaytonaSandbox, api: LocalApi, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    seen = await sandbox.exec(
        "pwd; printf '\\377' >&2; cat; exit 7", cwd="sub", env={"A": "1"}, stdin=b"\0in"
    )
    assert (seen.exit_code, seen.signal, seen.timed_out) == (7, None, False)
    assert seen.stdout == bytes(tmp_path / "sub") + b"\n\0in"
    assert seen.stderr == b"\xff"
    assert len(api.texts) == 1
    assert [span.name for span in seen.spans] == ["dispatch"]


async def test_a_timeout_kills_the_tree_and_keeps_the_output(sandbox: DaytonaSandbox) -> None:
    seen = await sandbox.exec("echo before; sleep 600 & sleep 600", timeout=0.5)
    assert seen.timed_out
    assert (seen.exit_code, seen.signal, seen.stdout) == (137, 9, b"before\n")


async def test_long_input_code_and_output(sandbox: DaytonaSandbox, box: Any) -> None:
    data = bytes(range(256)) * 1024
    assert len(data) > max(INLINE_MAX, FRAME_MAX)
    seen = await sandbox.exec(["cat"], stdin=data)
    assert (seen.ok, seen.stdout == data) == (True, True)
    assert box.fs.calls == ["upload", "download", "delete"]
    seen = await sandbox.exec(f"echo here; : {'x' * TEXT_MAX}")
    assert seen.stdout == b"here\n"
    assert box.fs.calls[3:] == ["upload"]
    seen = await sandbox.exec("head -c 2000000 /dev/zero")
    assert (len(seen.stdout), seen.cut.stdout) == (1 << 20, 2_000_000 - (1 << 20))


async def test_files(sandbox: DaytonaSandbox, tmp_path: Path) -> None:
    await sandbox.write("dir/file", b"one \xff two", mode=0o600)
    assert await sandbox.read("dir/file") == b"one \xff two"
    await sandbox.edit("dir/file", b"two", b"three")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "leaf").write_bytes(b"leaf")
    await sandbox.upload(tmp_path / "tree", "copy")
    assert [(entry.name, entry.kind) for entry in await sandbox.list("dir")] == [("file", "file")]
    await sandbox.download("copy", tmp_path / "back")
    assert (tmp_path / "back" / "leaf").read_bytes() == b"leaf"
    await sandbox.remove("dir")
    with pytest.raises(FileNotFoundError):
        await sandbox.read("dir/file")


async def test_a_log_that_comes_late_is_read_again(box: Any, api: LocalApi) -> None:
    api.late = 3
    request = ExecRequest(command="echo whole; echo both >&2", cwd="/", output=1000)
    seen = await Execution(box, request).run()
    assert (seen.stdout, seen.stderr, api.late) == (b"whole\n", b"both\n", 0)


async def test_output_that_never_comes_is_a_collect_error(
    box: Any, api: LocalApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dutyfree.substrates.daytona.execution.LOG_PAUSE", 0)
    api.late = 1000
    with pytest.raises(CollectError, match="whole output"):
        await Execution(box, ExecRequest(command="echo lost", cwd="/", output=1000)).run()


async def test_failures_of_a_command(sandbox: DaytonaSandbox, api: LocalApi) -> None:
    api.failure = answer(500)
    with pytest.raises(ExecError, match="it says no"):
        await sandbox.exec("true")
    api.failure = answer(404)
    with pytest.raises(SandboxClosed):
        await sandbox.exec("true")
    with pytest.raises(DispatchError, match="one user"):
        await sandbox.exec("true", user="other")


async def test_sessions_are_removed(sandbox: DaytonaSandbox, api: LocalApi) -> None:
    await sandbox.exec("true")
    await asyncio.gather(*sandbox._removals)
    assert api.sessions == set()


# --- The end, and lists ---------------------------------------------------------------------------------


class Ending:
    """The calls of a client and of a sandbox that a deletion uses."""

    id = "box"

    def __init__(self, found: SandboxState | Exception) -> None:
        self.found = found
        self.state: object = None
        self.waited = False

    async def delete(self, timeout: float, wait: bool) -> None:
        self.waited = wait

    async def get(self, name: str) -> Ending:
        if isinstance(self.found, Exception):
            raise self.found
        self.state = self.found
        return self


async def test_the_end_is_waited_for_and_verified() -> None:
    for gone in (SandboxState.DESTROYED, answer(404)):
        ending = Ending(gone)
        await delete(ending, ending)
        assert ending.waited
    for there in (SandboxState.STARTED, SandboxState.DESTROYING, answer(500)):
        ending = Ending(there)
        with pytest.raises(CleanupError, match="box"):
            await delete(ending, ending)


async def test_only_our_own_are_listed() -> None:
    def one(state: SandboxState, **labels: str) -> Any:
        return SimpleNamespace(state=state, labels=labels)

    ours = one(SandboxState.STOPPED, dutyfree="1", more="x")
    theirs = [one(SandboxState.STARTED), one(SandboxState.DESTROYED, dutyfree="1")]

    async def found(query: Any) -> Any:
        assert query.labels == {"dutyfree": "1"}
        for sandbox in (*theirs, ours):
            yield sandbox

    assert await listed(SimpleNamespace(list=found), {"dutyfree": "1"}) == [ours]


async def test_why_it_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAYTONA_API_KEY", raising=False)
    seen = await substrates.probe("daytona")
    assert (seen.available, seen.detail, seen.remedy) == (False, "there is no API key", "set DAYTONA_API_KEY")
    with pytest.raises(Unavailable, match="DAYTONA_API_KEY"):
        async with dutyfree.open("daytona"):
            pass


async def test_no_server_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the SDK's real HTTP client."""
    monkeypatch.setenv("DAYTONA_API_KEY", "none")
    monkeypatch.setenv("DAYTONA_API_URL", UNREACHABLE)
    seen = await substrates.probe("daytona")
    assert not seen.available
    assert "Daytona does not answer" in seen.detail
    found = await gc._daytona(dry_run=True)
    assert [(one.kind, bool(one.failure)) for one in found] == [("Daytona sandbox", True)]
