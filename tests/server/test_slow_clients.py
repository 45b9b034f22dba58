"""Clients that are slow, silent or greedy: what they cost ends, and others go on."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from time import perf_counter
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Subprotocol

from dutyfree.server import listen
from dutyfree.server.bodies import LARGEST_REQUEST, ByteBudget
from dutyfree.server.channel import MOST_WAITING, Channel
from dutyfree.server.connections import ConnectionLimits
from dutyfree.server.e2b.templates import LARGEST_UPLOAD
from dutyfree.server.files import MOST_ARRIVING
from dutyfree.server.quotas import QuotaLimits, Quotas
from dutyfree.server.service import Service
from dutyfree.server.tokens import Tokens
from dutyfree.wire import codec, frames
from dutyfree.wire.frames import Call, Kind
from tests.awaiting import until, until_not
from tests.server.in_process import served

pytestmark = pytest.mark.native

LIMITS = ConnectionLimits(
    connections=40,
    per_address=20,
    head_bytes=4096,
    head_seconds=1.0,
    stall_seconds=1.5,
    slowest=1 << 20,
    ping_seconds=0.5,
    pong_seconds=1.0,
)


@pytest.fixture(scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Service, str]]:
    async with served(tmp_path_factory.mktemp("state"), connections=LIMITS) as found:
        yield found


class Raw:
    """A connection on which a test sends what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, address: str) -> Raw:
        host, _, port = address.partition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def drip(self, data: bytes) -> None:
        """Send a byte every tenth of a second, until the server has enough."""
        for byte in data:
            if self.reader.at_eof():
                return
            try:
                await self.send(bytes([byte]))
            except OSError:
                return
            await asyncio.sleep(0.1)

    async def rest(self) -> bytes:
        """All that comes until the server closes the connection."""
        parts = []
        with contextlib.suppress(ConnectionResetError), anyio.fail_after(20):
            while part := await self.reader.read(65536):
                parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        self.writer.transport.abort()


@pytest.fixture
async def raw(server: tuple[Service, str]) -> AsyncIterator[Raw]:
    opened = await Raw.open(server[1])
    yield opened
    opened.close()


def is_reset(descriptor: socket.socket) -> bool:
    """Whether the other side has ended a connection, although this side has not read all."""
    state = descriptor.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state in (7, 8)  # CLOSE, CLOSE_WAIT


async def alive(address: str) -> bool:
    client = await Raw.open(address)
    await client.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    answer = await client.rest()
    client.close()
    return answer.startswith(b"HTTP/1.1 200")


async def sandbox_of(address: str) -> str:
    client = await Raw.open(address)
    await client.send(
        b"POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
    )
    answer = await client.rest()
    client.close()
    return str(json.loads(answer.partition(b"\r\n\r\n")[2])["id"])


# --- Requests ---------------------------------------------------------------------------------------


async def test_a_silent_connection_ends(raw: Raw) -> None:
    assert b" 408 " in await raw.rest()


async def test_a_head_that_comes_byte_by_byte(raw: Raw, server: tuple[Service, str]) -> None:
    sending = asyncio.create_task(raw.drip(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 1000))
    assert b" 408 " in await raw.rest()
    await sending
    assert await alive(server[1])


async def test_a_websocket_handshake_that_never_ends(raw: Raw) -> None:
    head = f"GET {frames.PATH} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    await raw.send(head.encode())
    assert b" 408 " in await raw.rest()


@pytest.mark.parametrize("part", [b"X-Header: " + b"x" * 100_000, b"X: y\r\n" * 10_000], ids=["one", "many"])
async def test_a_head_without_end(raw: Raw, part: bytes) -> None:
    await raw.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + part)
    assert b" 431 " in await raw.rest()


async def test_a_body_that_comes_byte_by_byte(raw: Raw) -> None:
    await raw.send(b"POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n")
    sending = asyncio.create_task(raw.drip(b"{" + b" " * 998 + b"}"))
    assert b" 408 " in await raw.rest()
    await sending


async def test_a_body_that_stands_still_after_a_fast_beginning(server: tuple[Service, str], raw: Raw) -> None:
    size = 32 << 20  # at the slowest rate, this would last for half a minute
    head = f"POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size + 1}\r\n\r\n"
    await raw.send(head.encode() + b" " * size)
    with anyio.fail_after(10):
        assert b" 408 " in await raw.reader.readline()


async def test_the_next_request_on_a_connection_has_the_same_bounds(raw: Raw) -> None:
    await raw.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await raw.reader.readuntil(b"ok\n")
    await raw.send(b"GET /healthz HTTP/1.1\r\nHost:")
    assert b" 408 " in await raw.rest()


@pytest.mark.parametrize(
    "path", ["/v1/sandboxes", "/run_code", "/sandboxes", "/swerex/x/execute", "/files?path=x"]
)
async def test_too_large_a_request_is_refused_before_it_is_read(raw: Raw, path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {LARGEST_REQUEST + 1}\r\n\r\n"
    await raw.send(head.encode())
    with anyio.fail_after(10):
        assert b" 413 " in await raw.reader.readline()


async def test_a_body_without_a_size_is_counted(server: tuple[Service, str], raw: Raw) -> None:
    await raw.send(b"POST /run_code HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunk = b"1000000\r\n" + b" " * (16 << 20) + b"\r\n"

    async def flood() -> None:
        with contextlib.suppress(OSError):  # the server has enough
            while True:
                await raw.send(chunk)

    sending = asyncio.create_task(flood())
    with anyio.fail_after(60):
        assert b" 413 " in await raw.reader.readline()
    await sending
    assert await alive(server[1])


@pytest.fixture(scope="module")
async def small(server: tuple[Service, str]) -> AsyncIterator[tuple[str, ByteBudget]]:
    """The address of the same server, where it has little memory for requests."""
    budget = ByteBudget(1 << 20)
    async with listen.serving(server[0], listen.Address("127.0.0.1:0"), budget=budget) as url:
        yield url.removeprefix("http://"), budget


@pytest.mark.parametrize("path", ["/files?path=x", "/sandboxes", "/swerex/x/execute"])
async def test_whatever_route_reads_it_the_answer_is_the_same(
    server: tuple[Service, str], small: tuple[str, ByteBudget], path: str
) -> None:
    service, address = server
    name = await sandbox_of(address)
    held = service.sandboxes.get("local", name)
    access = f"e2b-sandbox-id: {name}\r\nx-access-token: {held.access_token}\r\n"
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{access}Transfer-Encoding: chunked\r\n\r\n"
    client = await Raw.open(small[0])
    await client.send(head.encode() + b"100000\r\n" + b" " * (1 << 20) + b"\r\n")
    with anyio.fail_after(10):
        assert b" 503 " in await client.reader.readline()
    client.close()
    await until(lambda: not small[1]._used)
    await service.sandboxes.release(held)


async def test_an_answer_that_is_not_read(server: tuple[Service, str]) -> None:
    service, address = server
    name = await sandbox_of(address)
    held = service.sandboxes.get("local", name)
    await held.sandbox.exec("head -c 64000000 /dev/zero > /workspace/large")
    client = await Raw.open(address)
    client.reader._transport.pause_reading()  # type: ignore[attr-defined]
    request = f"GET /v1/sandboxes/{name}/files?path=large HTTP/1.1\r\nHost: localhost\r\n\r\n"
    await client.send(request.encode())
    descriptor = client.writer.get_extra_info("socket")
    used = service.quotas.bytes._used
    await until(lambda: used[":127.0.0.1"] >= 64_000_000)
    await until(lambda: is_reset(descriptor))
    await until(lambda: not used)
    client.close()
    await service.sandboxes.release(held)


async def test_an_answer_for_which_there_is_no_room(
    server: tuple[Service, str], small: tuple[str, ByteBudget]
) -> None:
    """It can be asked for again, unless the request has changed something."""
    service, address = server
    name = await sandbox_of(address)
    held = service.sandboxes.get("local", name)
    await held.sandbox.write("large", bytes(600_000))
    path = f"/v1/sandboxes/{name}"
    answer = await _answer_of(small[0], f"GET {path}/files?path=large HTTP/1.1\r\n\r\n")
    assert b" 503 " in answer
    assert b"retry-after" in answer
    body = '{"command": "echo ran >> log; head -c 600000 /dev/zero"}'
    answer = await _answer_of(
        small[0], f"POST {path}/exec HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    )
    assert b" 500 " in answer
    assert b"retry-after" not in answer
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert (error["code"], error["retryable"]) == ("collect", False)
    assert await held.sandbox.read("log") == b"ran\n"
    await service.sandboxes.release(held)


async def _answer_of(address: str, request: str) -> bytes:
    client = await Raw.open(address)
    head, rest = request.split("\r\n", 1)
    await client.send(f"{head}\r\nHost: localhost\r\nConnection: close\r\n{rest}".encode())
    answer = await client.rest()
    client.close()
    return answer


async def test_calls_over_http_count_too(server: tuple[Service, str], raw: Raw) -> None:
    service, _ = server
    usual, service.quotas = service.quotas, Quotas(QuotaLimits(calls=0))
    try:
        await raw.send(b"GET /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with anyio.fail_after(10):
            assert b" 429 " in await raw.reader.readline()
    finally:
        service.quotas = usual


async def test_an_upgrade_behind_a_running_request(server: tuple[Service, str], raw: Raw) -> None:
    """The connection would be that of the upgrade, and nothing would stop the request when it is lost."""
    service, address = server
    name = await sandbox_of(address)
    held = service.sandboxes.get("local", name)
    body = b'{"command": "sleep 1000"}'
    head = f"POST /v1/sandboxes/{name}/exec HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    upgrade = f"GET /v1/sandboxes/{name}/ports/80 HTTP/1.1\r\nHost: localhost\r\n"
    await raw.send(
        head.encode() + b"\r\n" + body + upgrade.encode() + b"Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
    )
    assert b" 400 " in await raw.rest()

    async def sleeps() -> bool:
        return (await held.sandbox.exec(["pgrep", "sleep"])).ok

    await until_not(sleeps)
    await service.sandboxes.release(held)


@pytest.mark.parametrize("upgrade", [b"tcp", b"websocket"])
async def test_an_upgrade_behind_an_unread_answer(server: tuple[Service, str], upgrade: bytes) -> None:
    """The connection would be that of the upgrade, and nothing would count the answer as read or lost."""
    service, address = server
    name = await sandbox_of(address)
    held = service.sandboxes.get("local", name)
    await held.sandbox.exec("head -c 64000000 /dev/zero > /workspace/large")
    client = await Raw.open(address)
    client.reader._transport.pause_reading()  # type: ignore[attr-defined]
    path = f"/v1/sandboxes/{name}"
    await client.send(f"GET {path}/files?path=large HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    used = service.quotas.bytes._used
    await until(lambda: used[":127.0.0.1"] >= 64_000_000)
    await client.send(
        f"GET {path}/ports/80 HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: ".encode()
        + upgrade
        + b"\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    await until(lambda: not used)
    client.close()
    await service.sandboxes.release(held)


async def test_the_connections_of_an_address_are_bounded(server: tuple[Service, str]) -> None:
    _, address = server
    clients = [await Raw.open(address) for _ in range(LIMITS.per_address)]
    one_more = await Raw.open(address)
    answer = await one_more.rest()
    assert b" 503 " in answer
    assert b"retry-after" in answer
    for client in (*clients, one_more):
        client.close()
    await until(lambda: alive(address))


# --- Channels ---------------------------------------------------------------------------------------


def channel(address: str) -> connect:
    return connect(
        f"ws://{address}{frames.PATH}",
        subprotocols=[Subprotocol(frames.PROTOCOL)],
        compression=None,
        proxy=None,
        ping_interval=None,
    )


async def test_a_client_that_answers_no_ping_loses_its_channel(server: tuple[Service, str], raw: Raw) -> None:
    head = (
        f"GET {frames.PATH} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
        f"Sec-WebSocket-Protocol: {frames.PROTOCOL}\r\n\r\n"
    )
    await raw.send(head.encode())
    answer = await raw.rest()
    assert answer.startswith(b"HTTP/1.1 101")
    assert b"\x89\x04" in answer, "it was pinged"


async def test_answers_that_are_not_read_end_the_channel(server: tuple[Service, str]) -> None:
    service, address = server
    name = await sandbox_of(address)
    held = service.sandboxes.get("local", name)
    await held.sandbox.exec("head -c 16000000 /dev/zero > /workspace/large")
    before = service.quotas.bytes._used.total()
    async with channel(address) as client:
        client.transport.pause_reading()
        call = codec.encode(Call("read", name, msgspec.Raw(codec.encode({"type": "read", "path": "large"}))))
        for number in range(8):
            await client.send(frames.HEAD.pack(Kind.CALL, number) + call)
        await until(lambda: service.quotas.bytes._used.total() > before)
        await until(lambda: service.quotas.bytes._used.total() == before)  # the answers are dropped
        client.transport.abort()
    await service.sandboxes.release(held)


class Deaf:
    """The connection of a client that takes no answers, until ``listening`` is set."""

    def __init__(self) -> None:
        self.listening = asyncio.Event()
        self.is_read = True
        self.taken: list[bytes] = []

    async def write(self, frame: bytes) -> None:
        await self.listening.wait()
        self.taken.append(frame)

    def write_now(self, frame: bytes) -> bool:
        return False

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True


async def test_answers_that_wait_are_counted_and_stop_further_calls(server: tuple[Service, str]) -> None:
    service, _ = server
    client, used = Deaf(), service.quotas.bytes._used
    opened = Channel(service, "unread", client, LARGEST_REQUEST)
    call = codec.encode(Call("no_such_call", "", msgspec.Raw(codec.encode({}))))
    for number in range(MOST_WAITING):
        opened.receive(frames.HEAD.pack(Kind.CALL, number) + call, perf_counter())
    await until(lambda: not client.is_read)
    assert used["unread"] > MOST_WAITING * len(call)
    client.listening.set()
    await until(lambda: len(client.taken) == MOST_WAITING and client.is_read and not used["unread"])
    await opened.close()


async def test_an_answer_for_which_there_is_no_room_does_not_ask_for_the_call_again(
    server: tuple[Service, str],
) -> None:
    """The command has run: a client that makes the call again runs it twice."""
    service, address = server
    name = await sandbox_of(address)
    client, budget = Deaf(), service.quotas.bytes
    opened = Channel(service, "local", client, LARGEST_REQUEST)
    with budget.held("local", budget._total // 2):
        for number, size in enumerate((50, 100_000)):
            wanted = {"type": "exec", "command": f"echo ran >> log; head -c {size} /dev/zero"}
            call = codec.encode(Call("exec", name, msgspec.Raw(codec.encode(wanted))))
            opened.receive(frames.HEAD.pack(Kind.CALL, number) + call, perf_counter())
        await until(lambda: len(opened._sending) == 2 and not client.is_read)
        client.listening.set()
        await until(lambda: len(client.taken) == 2 and client.is_read)
    answers = {frame[:5]: codec.decode(frame[5:], dict) for frame in client.taken}
    assert answers[frames.HEAD.pack(Kind.RESULT, 0)]["stdout"] == bytes(50)
    lost = answers[frames.HEAD.pack(Kind.ERROR, 1)]
    assert (lost["code"], lost["retryable"]) == ("collect", False)
    held = service.sandboxes.get("local", name)
    assert await held.sandbox.read("log") == b"ran\n" * 2
    await opened.close()
    assert not budget._used["local"]
    await service.sandboxes.release(held)


async def test_pieces_without_content_are_not_free(server: tuple[Service, str]) -> None:
    """Each would take memory for a message that never ends."""
    _, address = server

    async def send_pieces() -> None:
        for number in range(LARGEST_REQUEST // frames.PIECE_COST + 2):
            await client.send(frames.HEAD.pack(Kind.CALL | frames.MORE, number))
        async with asyncio.timeout(10):
            await client.recv()

    async with channel(address) as client:
        with pytest.raises(ConnectionClosed):
            await send_pieces()


async def test_channels_and_calls_of_a_tenant_are_bounded(server: tuple[Service, str]) -> None:
    service, address = server
    usual, service.quotas = service.quotas, Quotas(QuotaLimits(channels=2, calls=1))
    try:
        async with channel(address) as one, channel(address):
            with pytest.raises(InvalidStatus) as refused:
                await channel(address)
            assert refused.value.response.status_code == 429
            assert "Retry-After" in refused.value.response.headers
            name = await sandbox_of(address)
            sleep = {"type": "exec", "command": "sleep 100"}
            call = codec.encode(Call("exec", name, msgspec.Raw(codec.encode(sleep))))
            for number in (1, 2):
                await one.send(frames.HEAD.pack(Kind.CALL, number) + call)
            answer = await one.recv()
            assert isinstance(answer, bytes)
            assert answer[:5] == frames.HEAD.pack(Kind.ERROR, 2)
            assert codec.decode(answer[5:], dict)["code"] == "exhausted"
    finally:
        service.quotas = usual


async def test_what_tenants_hold_in_memory_is_bounded(server: tuple[Service, str]) -> None:
    service, address = server
    with service.quotas.bytes.held("local", service.quotas.bytes._total // 2 - (1 << 20)):
        async with channel(address) as client:
            for _ in range(8):
                await client.send(frames.HEAD.pack(Kind.CALL | frames.MORE, 1) + bytes(frames.PART))
            with pytest.raises(ConnectionClosed) as closed, anyio.fail_after(30):
                await client.recv()
    assert "too many bytes" in str(closed.value)
    assert not service.quotas.bytes._used


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The state of a server, and a token of the tenant ``greedy``."""
    state = tmp_path_factory.mktemp("guarded")
    with Tokens(state / "server.sqlite") as tokens:
        return state, tokens.create("greedy")


@pytest.fixture(scope="module")
async def with_token(guarded: tuple[Path, str]) -> AsyncIterator[tuple[str, str, ByteBudget, Service]]:
    """A server that needs a token, and has little memory for requests: its address, and the token."""
    budget = ByteBudget(1 << 20)
    async with served(guarded[0], budget=budget, connections=LIMITS) as (service, address):
        yield address, guarded[1], budget, service


async def test_a_tenant_is_one_however_it_writes_its_token(
    with_token: tuple[str, str, ByteBudget, Service],
) -> None:
    address, token, budget, _ = with_token
    basic = base64.b64encode(f"any:{token}".encode()).decode()
    ways = (f"Authorization: Bearer {token}", f"Authorization: Basic {basic}", f"X-API-Key: {token}")
    clients = [await Raw.open(address) for _ in ways]
    for way, client in zip(ways, clients, strict=True):
        head = f"POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\n{way}\r\nContent-Length: 500000\r\n"
        await client.send(head.encode() + b"\r\n" + b" " * 400_000)
        if client is clients[0]:
            await until(lambda: budget._used["greedy"] == 400_000)
            continue
        with anyio.fail_after(10):
            assert b" 503 " in await client.reader.readline()
    for client in clients:
        client.close()


async def test_an_upload_goes_to_the_disk_and_counts_for_the_tenant_of_its_link(
    with_token: tuple[str, str, ByteBudget, Service],
) -> None:
    """The link needs no token, so a tenant could send it from many addresses."""
    address, token, budget, service = with_token
    arriving = service.files._arriving
    part = bytes(2 << 20)  # more than the memory for requests
    client = await _uploading(address, token, LARGEST_REQUEST + 1)
    await client.send(part)
    await until(lambda: arriving["greedy"] == len(part))
    assert not budget._used
    with anyio.fail_after(10):
        assert b" 408 " in await client.reader.readline(), "the client does not send the rest"
    client.close()
    await until(lambda: not arriving["greedy"])
    tree = anyio.Path(service.files._root / "greedy")

    async def names() -> list[str]:
        return [path.name async for path in tree.iterdir()]

    await until_not(names)
    arriving["greedy"] = MOST_ARRIVING
    client = await _uploading(address, token, len(part))
    await client.send(b"x")
    with anyio.fail_after(10):
        assert b" 429 " in await client.reader.readline()
    client.close()
    arriving["greedy"] = 0
    client = await _uploading(address, token, len(part))
    await client.send(part)
    with anyio.fail_after(10):
        assert b" 200 " in await client.reader.readline()
    assert [(await path.stat()).st_size async for path in tree.iterdir()] == [len(part)]
    client.close()


async def test_too_large_an_upload_is_refused(with_token: tuple[str, str, ByteBudget, Service]) -> None:
    address, token, _, _ = with_token
    client = await _uploading(address, token, LARGEST_UPLOAD + 1)
    await client.send(b"x")
    with anyio.fail_after(10):
        assert b" 413 " in await client.reader.readline()
    client.close()


async def _uploading(address: str, token: str, size: int) -> Raw:
    """A client that has sent the head of an upload."""
    template = await _asked(address, token, "POST", "/v3/templates", {"name": "t"})
    link = await _asked(address, token, "GET", f"/templates/{template['templateID']}/files/files-hash")
    client = await Raw.open(address)
    path = link["url"].partition(address)[2]
    await client.send(f"PUT {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n".encode())
    return client


async def _asked(address: str, token: str, method: str, path: str, body: Any = None) -> Any:
    def ask() -> Any:
        connection = http.client.HTTPConnection(address, timeout=60)
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"X-API-Key": token})
        with connection.getresponse() as answer:
            found = json.loads(answer.read())
        connection.close()
        return found

    return await anyio.to_thread.run_sync(ask)
