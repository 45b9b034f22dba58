"""The channel: what a client that does not keep to the protocol can do, and what a lost connection means."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import anyio
import msgspec
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

import dutyfree
from dutyfree.contract import Recipe, Stage
from dutyfree.contract.errors import RecipeError, Unavailable
from dutyfree.server.tokens import Tokens
from dutyfree.substrates.hosted import Hosted
from dutyfree.substrates.hosted.sandbox import HostedSandbox
from dutyfree.wire import codec, frames
from dutyfree.wire.frames import Call, Kind
from dutyfree.wire.websocket import pack_masked
from tests.awaiting import until, until_not
from tests.serving import serving

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("state")) as found:
        yield found


@pytest.fixture
async def hosted(url: str) -> AsyncIterator[Hosted]:
    async with dutyfree.open("hosted", url=url) as substrate:
        yield substrate


@pytest.fixture
async def socket(url: str) -> AsyncIterator[ClientConnection]:
    address = url.replace("http", "ws") + frames.PATH
    async with connect(
        address, subprotocols=[Subprotocol(frames.PROTOCOL)], compression=None, proxy=None
    ) as opened:
        yield opened


def call(method: str, arguments: object) -> bytes:
    return codec.encode(Call(method, "", msgspec.Raw(codec.encode(arguments))))


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\0\1",
        b"\x7f\0\0\0\0",
        frames.HEAD.pack(Kind.RESULT, 1),
        frames.HEAD.pack(Kind.CALL, 1) + b"\xc1",
        frames.HEAD.pack(Kind.CALL, 1) + msgspec.msgpack.encode(["exec"]),
        "text",
    ],
    ids=["empty", "short", "kind", "direction", "garbage", "no-call", "text"],
)
async def test_what_is_no_frame_ends_the_channel(socket: ClientConnection, message: bytes | str) -> None:
    await socket.send(message)
    if isinstance(message, bytes) and message[:1] == bytes([Kind.RESULT]):
        await socket.send(b"")  # for a call that does not run, it is only ignored
    with pytest.raises(ConnectionClosed), anyio.fail_after(10):
        await socket.recv()


@pytest.mark.parametrize("method", ["exec", "batch", "create"])
async def test_what_is_nested_too_deeply_ends_the_channel(socket: ClientConnection, method: str) -> None:
    """With a reason, and not as a defect of the server."""
    deep = b"\x91" * 100_000 + b"\xc0"
    head = b"\x93" + msgspec.msgpack.encode(method) + msgspec.msgpack.encode("sb-none")
    arguments = b"\x82\xa3key\xa1k\xa1x" + deep
    await socket.send(frames.HEAD.pack(Kind.CALL, 1) + head + arguments)
    with pytest.raises(ConnectionClosed) as closed, anyio.fail_after(10):
        await socket.recv()
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4400, "the values are nested too deeply")


async def test_too_many_items_end_the_channel(socket: ClientConnection, hosted: Hosted) -> None:
    async with hosted.sandbox() as sandbox:
        stream = {"action": {"type": "exec", "command": "sleep 100"}, "fed": True}
        payload = codec.encode(Call("stream", sandbox.id, msgspec.Raw(codec.encode(stream))))
        await socket.send(frames.HEAD.pack(Kind.CALL, 1) + payload)
        with pytest.raises(ConnectionClosed), anyio.fail_after(20):
            await flood(socket)


async def flood(socket: ClientConnection) -> None:
    for _ in range(64):
        await socket.send(frames.HEAD.pack(Kind.ITEM, 1) + bytes(frames.PART))
    while True:
        await socket.recv()


async def test_the_input_ends_once(socket: ClientConnection, hosted: Hosted) -> None:
    """However often the client says so: each time would take memory."""
    async with hosted.sandbox() as sandbox:
        stream = {"action": {"type": "exec", "command": "cat; echo end"}, "fed": True}
        payload = codec.encode(Call("stream", sandbox.id, msgspec.Raw(codec.encode(stream))))
        await socket.send(frames.HEAD.pack(Kind.CALL, 1) + payload)
        await socket.send(frames.HEAD.pack(Kind.ITEM, 1) + b"item ")
        for _ in range(100):
            await socket.send(frames.HEAD.pack(Kind.END, 1))
        seen = b""
        with anyio.fail_after(20):
            while not (frame := await socket.recv()).startswith(bytes([Kind.RESULT])):  # type: ignore[arg-type]
                assert isinstance(frame, bytes)
                seen += frame if frame[0] == Kind.ITEM else b""
        assert b"item end" in seen or (b"item" in seen and b"end" in seen)


async def test_unknown_calls_are_answered(socket: ClientConnection) -> None:
    await socket.send(frames.HEAD.pack(Kind.CALL, 7) + call("no_such_call", {}))
    answer = await socket.recv()
    assert isinstance(answer, bytes)
    kind, number = frames.HEAD.unpack_from(answer)
    assert (kind, number) == (Kind.ERROR, 7)
    assert codec.decode(answer[frames.HEAD.size :], dict)["code"] == "usage"


async def test_a_lost_connection_is_made_again(hosted: Hosted) -> None:
    async with hosted.sandbox() as sandbox:
        await sandbox.write("file", b"kept")
        lost = hosted._connection._socket
        assert lost is not None
        running = asyncio.create_task(sandbox.exec("sleep 100"))
        await anyio.sleep(0.2)
        lost.transport.abort()
        with pytest.raises(dutyfree.errors.ExecError, match="connection was lost"):
            await running
        assert await sandbox.read("file") == b"kept"


async def test_sandboxes_of_a_client_that_is_gone_end_with_their_lease(url: str, hosted: Hosted) -> None:
    async with dutyfree.open("hosted", url=url, lease=3) as other, other.sandbox() as sandbox:
        other._keeping.cancel()
        await other._connection.close()

        async def alive() -> bool:
            return sandbox.id in await hosted.sandboxes()

        await until_not(alive)
        other._live.clear()
        sandbox._closed = True


async def test_a_lease_is_kept_alive_while_the_client_lives(url: str) -> None:
    async with dutyfree.open("hosted", url=url, lease=3) as other, other.sandbox() as sandbox:
        await anyio.sleep(4.5)
        assert (await sandbox.exec("echo alive")).stdout == b"alive\n"


async def test_files_of_a_recipe_are_sent_once(hosted: Hosted, tmp_path: Path) -> None:
    source = anyio.Path(tmp_path / "source")
    await source.mkdir()
    await (source / "hello").write_text("from the client")
    recipe = Recipe(stages=(Stage("files", files={"there": Path(source)}),))
    for _ in range(2):
        async with hosted.sandbox(recipe) as sandbox:
            assert await sandbox.read("there/hello") == b"from the client"


async def test_a_stage_that_is_a_link_is_refused(hosted: Hosted, tmp_path: Path) -> None:
    """It would be followed on the server, and copy a file of its host into the sandbox."""
    from dutyfree.contract.stage import tree_digest
    from dutyfree.substrates.hosted.sandbox import send_tree
    from dutyfree.wire import calls

    link = tmp_path / "link"
    link.symlink_to("/etc/shadow")
    digest = await anyio.to_thread.run_sync(tree_digest, link)
    sending = await hosted._connection.begin("put_files", "", calls.Files((digest.hex(),)))
    with pytest.raises(RecipeError, match="link"):
        await send_tree(sending, link)


async def test_no_server_is_said_with_a_remedy() -> None:
    with pytest.raises(Unavailable, match="dutyfree serve"):
        async with dutyfree.open("hosted", url="http://127.0.0.1:9"):
            pass


async def test_a_revoked_token_loses_its_channel(tmp_path: Path) -> None:
    def tokens(change: Callable[[Tokens], str]) -> str:
        with Tokens(tmp_path / "server.sqlite") as opened:
            return change(opened)

    token = await anyio.to_thread.run_sync(tokens, lambda opened: opened.create("trainer"))
    with serving(tmp_path) as url:
        async with dutyfree.open("hosted", url=url, token=token) as hosted:
            assert await hosted.sandboxes() == ()
            await anyio.to_thread.run_sync(tokens, lambda opened: str(opened.revoke(opened.all()[0].id)))
            await until(lambda: hosted._connection._socket is None)
            with pytest.raises(Unavailable, match="401"):
                await hosted.sandboxes()


async def message(socket: ClientConnection) -> tuple[int, int, object]:
    """The next message of the server: its kind, its number, and what it says."""
    with anyio.fail_after(20):
        data = await socket.recv()
    assert isinstance(data, bytes)
    return (*frames.HEAD.unpack_from(data), msgspec.msgpack.decode(data[frames.HEAD.size :]))


def packed(number: int, method: str, sandbox: str, arguments: object) -> bytes:
    call = Call(method, sandbox, msgspec.Raw(codec.encode(arguments)))
    return frames.HEAD.pack(Kind.CALL, number) + codec.encode(call)


@pytest.mark.parametrize("method", ["exec", "batch"])  # with a task, and without one
async def test_a_call_that_is_cancelled_at_once_is_answered(
    socket: ClientConnection, hosted: Hosted, method: str
) -> None:
    action = {"type": "exec", "command": "sleep 100"}
    arguments = action if method == "exec" else {"actions": [action]}
    async with hosted.sandbox() as sandbox:
        for number in range(1, 9):  # both frames come together: the call may not have begun yet
            both = packed(number, method, sandbox.id, arguments), frames.HEAD.pack(Kind.CANCEL, number)
            socket.transport.write(b"".join(pack_masked(one) for one in both))
            kind, answered, error = await message(socket)
            assert (kind, answered) == (Kind.ERROR, number)
            assert isinstance(error, dict)
            assert "cancelled" in error["message"]
        assert (await sandbox.exec("pgrep -c sleep")).stdout == b"0\n"


async def test_a_client_that_is_gone_leaves_no_command(socket: ClientConnection, hosted: Hosted) -> None:
    async with hosted.sandbox() as sandbox:
        await socket.send(packed(1, "exec", sandbox.id, {"type": "exec", "command": "sleep 100"}))

        async def running() -> bool:
            return (await sandbox.exec(["pgrep", "sleep"])).exit_code == 0

        await until(running)
        socket.transport.abort()
        await until_not(running)


async def test_a_cancelled_call_of_a_paused_sandbox_is_answered(hosted: Hosted) -> None:
    async with hosted.sandbox() as sandbox:
        running = asyncio.create_task(sandbox.exec("sleep 100"))
        await until(lambda: _sleeps(sandbox))
        await sandbox.pause()
        running.cancel()
        with anyio.fail_after(20), pytest.raises(asyncio.CancelledError):
            await running
        await sandbox.resume()
        await until_not(lambda: _sleeps(sandbox))


async def _sleeps(sandbox: HostedSandbox) -> bool:
    return (await sandbox.exec(["pgrep", "sleep"])).exit_code == 0


async def test_large_files_and_outputs_arrive_whole(hosted: Hosted) -> None:
    async with hosted.sandbox() as sandbox:
        for size in (0, 1, 1 << 16, 300 << 10, 5 << 20):
            content = bytes(range(256)) * (size // 256) + bytes(size % 256)
            await sandbox.write("file", content)
            assert await sandbox.read("file") == content
        seen = await sandbox.exec("head -c 300000 file")
        assert len(seen.stdout) == 300_000


async def test_a_command_takes_no_items(socket: ClientConnection, hosted: Hosted) -> None:
    async with hosted.sandbox() as sandbox:
        await socket.send(packed(1, "exec", sandbox.id, {"type": "exec", "command": "sleep 100"}))
        await socket.send(frames.HEAD.pack(Kind.ITEM, 1) + b"input")
        with pytest.raises(ConnectionClosed), anyio.fail_after(10):
            await socket.recv()
        await until_not(lambda: _sleeps(sandbox))


async def test_a_sandbox_that_dies_fails_its_calls(socket: ClientConnection, hosted: Hosted) -> None:
    """Also those that no task waits for, with the outcome in the counts."""
    async with hosted.sandbox() as sandbox:
        await socket.send(packed(1, "exec", sandbox.id, {"type": "exec", "command": "sleep 100"}))
        await until(lambda: _sleeps(sandbox))
        await sandbox.close()
        kind, number, error = await message(socket)
        assert (kind, number) == (Kind.ERROR, 1)
        assert isinstance(error, dict)
        assert "closed" in error["message"], error
        await socket.send(packed(2, "read", sandbox.id, {"type": "read", "path": "file"}))
        kind, number, error = await message(socket)
        assert isinstance(error, dict)
        assert (kind, error["code"]) == (Kind.ERROR, "sandbox_closed")
