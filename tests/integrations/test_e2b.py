"""The unmodified SDK of E2B against our server: async and sync."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("e2b", reason="to enable it: make test-integrations")

from e2b import AsyncSandbox, AsyncSecret, AsyncVolume, FileType, Sandbox, SandboxQuery
from e2b.exceptions import (
    AuthenticationException,
    FileNotFoundException,
    InvalidArgumentException,
    NotFoundException,
    SandboxException,
    SecretException,
    TimeoutException,
    VolumeException,
)
from e2b.sandbox.commands.command_handle import CommandExitException, PtySize

from dutyfree.server.tokens import Tokens
from tests.awaiting import until
from tests.processes import eventually
from tests.server.test_events import lately
from tests.server.test_http import Client
from tests.serving import serving

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("state")) as found:
        yield found


@pytest.fixture(autouse=True)
def pointed_here(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_URL", url)
    monkeypatch.setenv("E2B_SANDBOX_URL", url)
    monkeypatch.setenv("E2B_API_KEY", "e2b_anything")


@pytest.fixture
async def sandbox(pointed_here: None) -> AsyncIterator[AsyncSandbox]:
    made = await AsyncSandbox.create(timeout=120, metadata={"run": "7"}, envs={"GIVEN": "yes"})
    yield made
    await made.kill()


# --- The life of a sandbox --------------------------------------------------------------------------


async def test_create_connect_list_and_kill(sandbox: AsyncSandbox) -> None:
    assert await sandbox.is_running()
    info = await sandbox.get_info()
    assert (info.sandbox_id, info.metadata) == (sandbox.sandbox_id, {"run": "7"})
    again = await AsyncSandbox.connect(sandbox.sandbox_id)
    assert (await again.commands.run("echo $GIVEN")).stdout == "yes\n"
    paginator = AsyncSandbox.list(SandboxQuery(metadata={"run": "7"}))
    assert sandbox.sandbox_id in [one.sandbox_id for one in await paginator.next_items()]
    assert await AsyncSandbox.kill(sandbox.sandbox_id)
    assert not await AsyncSandbox.kill(sandbox.sandbox_id)
    assert not await sandbox.is_running()


async def test_its_commands_are_in_the_event_stream(sandbox: AsyncSandbox, url: str) -> None:
    with pytest.raises(CommandExitException):
        await sandbox.commands.run("echo seen; exit 4")
    client = Client(url)

    def found() -> list[Any]:
        told = [data for _, _, data in lately(client) if data.get("sandbox") == sandbox.sandbox_id]
        return [(one["call"], one["exit_code"]) for one in told if one.get("label") == "echo seen; exit 4"]

    await until(lambda: found() == [("start", 4)])


async def test_the_timeout_ends_a_sandbox(pointed_here: None) -> None:
    made = await AsyncSandbox.create(timeout=120)
    await made.set_timeout(1)

    async def ended() -> bool:
        return not await made.is_running()

    assert await until(ended)


async def test_what_does_not_exist_here_is_refused() -> None:
    """A sandbox that ends where its owner wanted a pause would take the work with it."""
    with pytest.raises(SandboxException, match="a pause at the end of the timeout"):
        await AsyncSandbox.create(timeout=60, lifecycle={"on_timeout": "pause"})


async def test_memory_is_kept_by_a_pause_and_not_by_a_snapshot(sandbox: AsyncSandbox) -> None:
    """What asks for the opposite is refused, and changes nothing."""
    with pytest.raises(SandboxException, match="keeps its processes"):
        await sandbox.pause(keep_memory=False)
    assert await sandbox.is_running()
    with pytest.raises(SandboxException, match="files alone"):
        await sandbox.create_snapshot(mode="full")
    await sandbox.pause()
    with pytest.raises(SandboxException, match="goes on with its processes"):
        await sandbox.connect(on_resume="reboot")
    assert not await sandbox.is_running()


async def test_network_options_that_do_not_exist_here_are_refused(sandbox: AsyncSandbox) -> None:
    rules: Any = {"rules": {"example.com": [{"transform": {"headers": {"a": "b"}}}]}}
    with pytest.raises(SandboxException, match="network options rules"):
        await AsyncSandbox.create(network=rules)
    with pytest.raises(SandboxException, match="network options rules"):
        await sandbox.update_network(rules)


async def test_volumes_and_secrets_are_refused_in_words() -> None:
    with pytest.raises(VolumeException, match="does not have volumes"):
        await AsyncVolume.create("data")
    with pytest.raises(SecretException, match="does not have secrets"):
        await AsyncSecret.create("key", "value")


async def test_a_command_ends_with_its_sandbox(pointed_here: None) -> None:
    made = await AsyncSandbox.create(timeout=60)
    handle = await made.commands.run("sleep 1000", background=True)
    await made.kill()
    with pytest.raises(SandboxException, match="killed or reached its end of life while"):
        await handle.wait()


async def test_a_terminal_is_connected_again(sandbox: AsyncSandbox) -> None:
    seen = bytearray()
    terminal = await sandbox.pty.create(PtySize(24, 80), on_data=lambda _: None)
    again = await sandbox.pty.connect(terminal.pid, on_data=seen.extend)
    await sandbox.pty.send_stdin(terminal.pid, b"echo he''llo; exit\n")
    await again.wait()
    assert b"hello" in seen


async def test_pause_and_resume(sandbox: AsyncSandbox) -> None:
    await sandbox.files.write("kept", "yes")
    await sandbox.pause()
    assert (await sandbox.get_info()).state.value == "paused"
    assert not await sandbox.is_running()
    again = await sandbox.connect(timeout=60)
    assert await again.files.read("kept") == "yes"
    assert (await sandbox.get_info()).state.value == "running"


async def test_fork_and_snapshot(sandbox: AsyncSandbox) -> None:
    await sandbox.files.write("kept", "yes")
    children = await sandbox.fork(count=2)
    for child in children:
        assert isinstance(child, AsyncSandbox)
        assert await child.files.read("kept") == "yes"
        await child.kill()
    kept = await sandbox.create_snapshot(name="with-name")
    copy = await AsyncSandbox.create(kept.snapshot_id)
    assert await copy.files.read("kept") == "yes"
    await copy.kill()
    found = await AsyncSandbox.list_snapshots(sandbox_id=sandbox.sandbox_id).next_items()
    assert [one.snapshot_id for one in found] == [kept.snapshot_id]
    assert await AsyncSandbox.delete_snapshot(kept.snapshot_id)
    assert not await AsyncSandbox.delete_snapshot(kept.snapshot_id)
    with pytest.raises(SandboxException, match="not found"):
        await AsyncSandbox.create(kept.snapshot_id)


async def test_an_unknown_template_is_an_error(pointed_here: None) -> None:
    with pytest.raises(SandboxException, match="not found"):
        await AsyncSandbox.create("no-such-template")


async def test_a_wrong_access_token_is_refused(sandbox: AsyncSandbox, url: str) -> None:
    import httpx

    async with httpx.AsyncClient(base_url=url) as client:
        headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "X-Access-Token": "wrong"}
        answer = await client.get("/files", params={"path": "/etc/passwd"}, headers=headers)
    assert answer.status_code == 401


# --- Commands ---------------------------------------------------------------------------------------


async def test_a_command_streams_its_output(sandbox: AsyncSandbox) -> None:
    out: list[str] = []
    err: list[str] = []
    command = "echo one; sleep 0.1; echo two; echo oops >&2"
    done = await sandbox.commands.run(command, on_stdout=out.append, on_stderr=err.append)
    assert (done.stdout, done.stderr, done.exit_code) == ("one\ntwo\n", "oops\n", 0)
    assert ("".join(out), "".join(err)) == ("one\ntwo\n", "oops\n")


async def test_a_failure_is_an_exception_with_its_output(sandbox: AsyncSandbox) -> None:
    with pytest.raises(CommandExitException) as failed:
        await sandbox.commands.run("echo out; exit 3", cwd="/tmp", envs={"A": "b"})
    assert (failed.value.exit_code, failed.value.stdout) == (3, "out\n")


async def test_a_timeout_kills_the_command(sandbox: AsyncSandbox) -> None:
    with pytest.raises(TimeoutException):
        await sandbox.commands.run("echo $$ > pid; sleep 1000", timeout=1)
    pid = (await sandbox.files.read("pid")).strip()

    async def dead() -> bool:
        said = await sandbox.commands.run(f"kill -0 {pid} 2>/dev/null && echo alive || echo dead")
        return str(said.stdout) == "dead\n"

    assert await until(dead)


async def test_a_background_command_with_input(sandbox: AsyncSandbox) -> None:
    handle = await sandbox.commands.run("cat; exit 4", background=True, stdin=True)
    assert handle.pid in [one.pid for one in await sandbox.commands.list()]
    real = await sandbox.commands.run(f"tr '\\0' ' ' < /proc/{handle.pid}/cmdline")
    assert "cat; exit 4" in real.stdout
    await sandbox.commands.send_stdin(handle.pid, "typed\n")
    await handle.disconnect()
    again = await sandbox.commands.connect(handle.pid)
    await sandbox.commands.close_stdin(handle.pid)
    with pytest.raises(CommandExitException) as ended:
        await again.wait()
    assert (ended.value.exit_code, ended.value.stdout) == (4, "typed\n")


async def test_input_is_streamed(sandbox: AsyncSandbox) -> None:
    handle = await sandbox.commands.run("cat", background=True, stdin=True)
    typed = sandbox.commands.stream_input(handle.pid)
    for part in ("one\n", "two\n"):
        await typed.send(part)
    await typed.close()
    await sandbox.commands.close_stdin(handle.pid)
    assert (await handle.wait()).stdout == "one\ntwo\n"


async def test_a_background_command_is_killed(sandbox: AsyncSandbox) -> None:
    handle = await sandbox.commands.run("sleep 1000", background=True)
    assert await sandbox.commands.kill(handle.pid)
    assert not await sandbox.commands.kill(handle.pid)
    with pytest.raises(CommandExitException):
        await handle.wait()


async def test_a_terminal(sandbox: AsyncSandbox) -> None:
    seen = bytearray()
    terminal = await sandbox.pty.create(PtySize(rows=24, cols=80), on_data=seen.extend)
    await sandbox.pty.resize(terminal.pid, PtySize(rows=10, cols=40))
    await sandbox.pty.send_stdin(terminal.pid, b"stty size; exit\n")
    await terminal.wait()
    assert b"10 40" in seen


# --- Files ------------------------------------------------------------------------------------------


async def test_files(sandbox: AsyncSandbox) -> None:
    written = await sandbox.files.write("/tmp/a/b.txt", "text")
    assert (written.path, written.name) == ("/tmp/a/b.txt", "b.txt")
    assert await sandbox.files.read("/tmp/a/b.txt") == "text"
    assert bytes(await sandbox.files.read("/tmp/a/b.txt", format="bytes")) == b"text"
    several: Any = [{"path": "/tmp/a/c", "data": b"\xff"}, {"path": "/tmp/a/d", "data": "d"}]
    await sandbox.files.write_files(several)
    entries = await sandbox.files.list("/tmp/a")
    assert [entry.name for entry in entries] == ["b.txt", "c", "d"]
    assert await sandbox.files.exists("/tmp/a/c")
    assert not await sandbox.files.exists("/tmp/a/none")
    assert (await sandbox.files.get_info("/tmp/a/b.txt")).size == 4
    moved = await sandbox.files.rename("/tmp/a/c", "/tmp/e/f")
    assert moved.path == "/tmp/e/f"
    assert await sandbox.files.make_dir("/tmp/new/dir")
    assert not await sandbox.files.make_dir("/tmp/new/dir")
    await sandbox.files.remove("/tmp/a")
    assert not await sandbox.files.exists("/tmp/a")
    with pytest.raises((FileNotFoundException, NotFoundException)):
        await sandbox.files.read("/tmp/none")


async def test_signed_urls_need_nothing_else(sandbox: AsyncSandbox) -> None:
    import httpx

    await sandbox.files.write("one", "text")
    other = await AsyncSandbox.create(timeout=60)
    await other.files.write("one", "of another sandbox")
    async with httpx.AsyncClient() as client:
        assert (await client.get(sandbox.download_url("one"))).text == "text"
        assert (await client.get(other.download_url("one", use_signature_expiration=60))).status_code == 200
        expired = await client.get(sandbox.download_url("one", use_signature_expiration=-60))
        assert (expired.status_code, "already expired" in expired.text) == (401, True)
        longer = sandbox.download_url("one", use_signature_expiration=-60).replace(
            "expiration=1", "expiration=9"
        )
        for url in (sandbox.download_url("one").replace("path=one", "path=%2Fetc%2Fpasswd"), longer):
            assert (await client.get(url)).status_code == 401
        assert (await client.post(sandbox.download_url("one"), content=b"x")).status_code == 401
        sent = await client.post(sandbox.upload_url("two"), files={"file": ("two", b"sent")})
        assert sent.status_code == 200
        ended = other.download_url("one")
        await other.kill()
        assert (await client.get(ended)).status_code == 401
    assert await sandbox.files.read("two") == "sent"


async def test_paths_mean_what_they_mean_at_e2b(sandbox: AsyncSandbox) -> None:
    written = await sandbox.files.write("dir/file", "x")
    assert written.path == "/home/user/dir/file"
    assert (await sandbox.commands.run("pwd; echo $HOME; cat dir/file")).stdout == "/home/user\n/home/user\nx"
    await sandbox.commands.run("ln -s file link; ln -s nowhere broken", cwd="dir")
    link = await sandbox.files.get_info("dir/link")
    assert (link.type, link.symlink_target) == (FileType.FILE, "/home/user/dir/file")
    assert len(await sandbox.files.list("dir")) == 3
    await sandbox.files.remove("never-there")
    with pytest.raises(SandboxException, match="not a directory"):
        await sandbox.files.watch_dir("dir/file", on_event=lambda _event: None)
    with pytest.raises(InvalidArgumentException, match="No such file"):
        await sandbox.commands.run("true", cwd="/never/there")


async def test_the_newest_sandbox_is_listed_first(sandbox: AsyncSandbox) -> None:
    newer = await AsyncSandbox.create(timeout=60, metadata={"run": "7"})
    pages = AsyncSandbox.list(SandboxQuery(metadata={"run": "7"}), limit=1)
    found = [one.sandbox_id for _ in range(2) for one in await pages.next_items()]
    assert found == [newer.sandbox_id, sandbox.sandbox_id]
    assert not pages.has_next
    pages = AsyncSandbox.list(SandboxQuery(metadata={"run": "7"}), limit=1, order="asc")
    assert [one.sandbox_id for _ in range(2) for one in await pages.next_items()] == found[::-1]
    assert not pages.has_next
    await newer.kill()


async def test_large_files_are_streamed(sandbox: AsyncSandbox) -> None:
    data = bytes(range(256)) * 40_000
    await sandbox.files.write("large", data)
    got = bytearray()
    async for part in await sandbox.files.read("large", format="stream"):
        got += part
    assert bytes(got) == data


async def test_a_directory_is_watched(sandbox: AsyncSandbox) -> None:
    await sandbox.files.make_dir("/tmp/watched")
    seen: list[tuple[str, str]] = []
    handle = await sandbox.files.watch_dir(
        "/tmp/watched", on_event=lambda event: seen.append((event.name, event.type.value))
    )
    await sandbox.files.write("/tmp/watched/file", "x")
    assert await until(lambda: ("file", "create") in seen and ("file", "write") in seen)
    await handle.stop()


# --- The sync face ----------------------------------------------------------------------------------


def test_the_sync_sdk(pointed_here: None) -> None:
    with Sandbox.create(timeout=60) as made:
        assert made.commands.run("echo hi").stdout == "hi\n"
        made.files.write("/tmp/f", "data")
        assert made.files.read("/tmp/f") == "data"
        watch = made.files.watch_dir("/tmp")
        made.files.write("/tmp/g", "x")
        assert eventually(lambda: any(event.name == "g" for event in watch.get_new_events()))
        watch.stop()
        handle = made.commands.run("sleep 1000", background=True)
        assert handle.kill()
        handle = made.commands.run("cat", background=True, stdin=True)
        made.commands.stream_input(handle.pid, iter(["a", "b"]))
        handle.close_stdin()
        assert handle.wait().stdout == "ab"
        (child,) = made.fork()
        assert isinstance(child, Sandbox)
        child.kill()


# --- Tokens -----------------------------------------------------------------------------------------


def test_tokens_are_api_keys(tmp_path: Path) -> None:
    with Tokens(tmp_path / "server.sqlite") as tokens:
        token = tokens.create("trainer")
    with serving(tmp_path) as url:
        options: Any = {"api_url": url, "sandbox_url": url}
        with pytest.raises(AuthenticationException):
            Sandbox.create(api_key="e2b_wrong", **options)
        made = Sandbox.create(api_key=token, **options)
        assert made.commands.run("echo in").stdout == "in\n"
        made.kill()
