"""Servers inside of sandboxes, reached through the server: HTTP by path, WebSockets, and TCP by upgrade."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.to_thread
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

from dutyfree.contract import Recipe
from dutyfree.server.ports import target_of
from dutyfree.server.sandboxes import Held
from dutyfree.server.service import Service
from tests.awaiting import until
from tests.server.in_process import served

pytestmark = pytest.mark.native

SERVER = r"""
import base64, hashlib, http.server, json, socket, threading, time

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def reply(self, status, body, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer(self):
        if "Upgrade" in self.headers:
            return self.websocket()
        if self.path.startswith("/stream"):
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for part in (b"one", b"two", b"three"):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                self.wfile.flush()
                while self.path == "/stream-slowly" and not open_gate.wait(60):
                    pass
            return self.wfile.write(b"0\r\n\r\n")
        if self.path == "/open":
            open_gate.set()
        if self.path == "/cut":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"some")
            self.close_connection = True
            return
        if self.path == "/redirect":
            return self.reply(302, b"", Location="/there")
        if self.path == "/hostile":
            return self.reply(200, b"<script>alert(1)</script>", Set_Cookie="a=b; Path=/",
                Content_Type="text/html", Clear_Site_Data='"*"', Alt_Svc="h2=evil", NEL="{}", Report_To="{}",
                Content_Security_Policy="default-src 'none'", X_Content_Type_Options="none")
        if self.path == "/status":
            return self.reply(700, b"")
        if self.path == "/upgraded":
            return self.reply(200, json.dumps(upgraded).encode())
        size = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(size)
        seen = {"method": self.command, "path": self.path, "size": len(body), "headers": dict(self.headers)}
        self.reply(200, json.dumps(seen).encode(), Content_Type="application/json")

    def websocket(self):
        if self.path == "/websocket-headers":
            global upgraded
            upgraded = {name.lower(): value for name, value in self.headers.items()}
            return self.reply(403, b"no")
        if self.path == "/no-websocket":
            return self.reply(403, b"no", Set_Cookie="a=b")
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", accept)
        self.send_header("Set-Cookie", "a=b")
        self.end_headers()
        self.wfile.write(b"\x81\x05hello")
        self.wfile.flush()
        head = self.rfile.read(2)
        mask, data = self.rfile.read(4), self.rfile.read(head[1] & 127)
        back = bytes(byte ^ mask[at % 4] for at, byte in enumerate(data))[::-1]
        self.wfile.write(b"\x81" + bytes([len(back)]) + back)
        self.close_connection = True

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_OPTIONS = do_PATCH = answer

    def log_message(self, *_):
        pass

def shout(listener):
    while True:
        client, _ = listener.accept()
        def talk(client=client):
            data = b""
            while part := client.recv(65536):
                data += part
            client.sendall(data.upper())
            client.close()
        threading.Thread(target=talk, daemon=True).start()

open_gate = threading.Event()
threading.Thread(target=shout, args=(socket.create_server(("127.0.0.1", 7000)),), daemon=True).start()
server = http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler)
print("listening", flush=True)
server.serve_forever()
"""


class Proxied:
    def __init__(self, service: Service, address: str, held: Held) -> None:
        self.service = service
        self.address = address
        self.held = held
        self.path = f"/v1/sandboxes/{held.id}/ports"

    async def ask(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        def work() -> tuple[int, bytes, http.client.HTTPMessage]:
            connection = http.client.HTTPConnection(self.address, timeout=60)
            try:
                connection.request(method, self.path + path, body, headers)
                answer = connection.getresponse()
                return answer.status, answer.read(), answer.headers
            finally:
                connection.close()

        return await anyio.to_thread.run_sync(work)


async def create(service: Service, key: str) -> list[Held]:
    return await service.sandboxes.create(
        "local", key, b"", lambda: service.native.group(Recipe(), 1), {}, 600
    )


@pytest.fixture(scope="module")
async def proxied(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Proxied]:
    async with served(tmp_path_factory.mktemp("state")) as (service, address):
        (held,) = await create(service, "key")
        await held.sandbox.write("server.py", SERVER.encode())
        process = await held.sandbox.start("exec python3 server.py")
        async for piece in process.output():
            assert piece.data == b"listening\n", piece
            break
        yield Proxied(service, address, held)


# --- HTTP -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
async def test_all_methods_and_paths_as_they_are(proxied: Proxied, method: str) -> None:
    body = b"x" * 1000 if method != "GET" else None
    status, found, _ = await proxied.ask(method, "/8000/a%2Fb/../c?d=%20e&f", body)
    seen = json.loads(found)
    size = 0 if body is None else len(body)
    assert (status, seen["method"], seen["path"], seen["size"]) == (200, method, "/a%2Fb/../c?d=%20e&f", size)


async def test_head_has_no_body(proxied: Proxied) -> None:
    status, found, headers = await proxied.ask("HEAD", "/8000/")
    assert (status, found) == (200, b"")
    assert int(headers["content-length"]) > 0


async def test_the_clients_identity_stays_here(proxied: Proxied) -> None:
    secret = {"Authorization": "Basic abc", "X-API-Key": "key", "Cookie": "a=b", "X-Forwarded-Host": "evil"}
    _, found, _ = await proxied.ask("GET", "/8000/", **secret, **{"X-Own": "kept"})
    headers = {name.lower(): value for name, value in json.loads(found)["headers"].items()}
    assert not {"authorization", "x-api-key", "cookie"} & set(headers)
    assert headers["host"] == "localhost:8000"
    assert headers["x-forwarded-prefix"] == f"{proxied.path}/8000"
    assert headers["x-forwarded-host"] == proxied.address
    assert headers["x-own"] == "kept"


async def test_a_page_cannot_act_on_the_server(proxied: Proxied) -> None:
    _, _, headers = await proxied.ask("GET", "/8000/hostile")
    harmful = {"set-cookie", "clear-site-data", "alt-svc", "nel", "report-to"}
    assert not harmful & {name.lower() for name in headers}
    policies = headers.get_all("content-security-policy")
    assert policies is not None
    assert "default-src 'none'" in policies, "its own holds too"
    (sandboxed,) = [policy for policy in policies if policy.startswith("sandbox ")]
    assert "allow-same-origin" not in sandboxed
    assert headers.get_all("x-content-type-options") == ["nosniff"], "a browser takes the first"
    for origin in ("null", "http://evil.example"):
        assert (await proxied.ask("POST", "/8000/", b"x", Origin=origin))[0] == 403
    embedded = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "image"}
    assert (await proxied.ask("GET", "/8000/picture", **embedded))[0] == 200
    assert (await proxied.ask("GET", "/8000/worker.js", **{"Service-Worker": "script"}))[0] == 403


async def test_a_status_that_does_not_exist(proxied: Proxied) -> None:
    assert (await proxied.ask("GET", "/8000/status"))[0] == 502


async def test_redirections_stay_below_the_port(proxied: Proxied) -> None:
    status, _, headers = await proxied.ask("GET", "/8000/redirect")
    assert (status, headers["location"]) == (302, f"{proxied.path}/8000/there")
    status, _, headers = await proxied.ask("GET", "/8000?a=b")
    assert (status, headers["location"]) == (308, f"{proxied.path}/8000/?a=b")


async def test_answers_come_as_they_are_sent(proxied: Proxied) -> None:
    host, _, port = proxied.address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        f"GET {proxied.path}/8000/stream-slowly HTTP/1.1\r\nHost: {proxied.address}\r\n\r\n".encode()
    )
    with anyio.fail_after(60):
        assert b"one" in await reader.readuntil(b"one\r\n")
        await proxied.ask("GET", "/8000/open")
        assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"5\r\nthree\r\n0\r\n\r\n")
    writer.close()


async def test_bodies_go_in_as_they_come_and_have_no_bound(proxied: Proxied) -> None:
    size = 8 << 20
    status, found, _ = await proxied.ask("POST", "/8000/", b"x" * size)
    assert (status, json.loads(found)["size"]) == (200, size)
    await until(lambda: not proxied.service.quotas.calls["local"])


async def test_an_answer_that_is_cut_off_is_no_whole_one(proxied: Proxied) -> None:
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        await proxied.ask("GET", "/8000/cut")


async def test_ports_that_nobody_serves(proxied: Proxied) -> None:
    status, found, _ = await proxied.ask("GET", "/9/")
    assert (status, json.loads(found)["error"]["verdict"]) == (502, "task")
    for port in ("0", "65536", "x"):
        assert (await proxied.ask("GET", f"/{port}/"))[0] == 404
    other = Proxied(proxied.service, proxied.address, proxied.held)
    other.path = "/v1/sandboxes/sb-0000000000000000/ports"
    assert (await other.ask("GET", "/8000/"))[0] == 404


async def test_a_neighbours_port_is_another(proxied: Proxied) -> None:
    (held,) = await create(proxied.service, "neighbour")
    status, _, _ = await Proxied(proxied.service, proxied.address, held).ask("GET", "/8000/")
    assert status == 502
    await proxied.service.sandboxes.release(held)


def test_what_names_a_port() -> None:
    assert target_of(b"/v1/sandboxes/sb-1/ports/80/x?y=/ports/9") == ("sb-1", 80, "/x?y=/ports/9")
    assert target_of(b"/v1/sandboxes/sb-1/ports/80") == ("sb-1", 80, "/")
    for url in (
        b"/v1/sandboxes/sb-1/ports/0/",
        b"/v1/sandboxes/a/b/ports/80/",
        b"/v1/channel",
        b"/v1/sandboxes//ports/1",
    ):
        assert target_of(url) is None


# --- Upgrades ---------------------------------------------------------------------------------------


async def test_a_websocket(proxied: Proxied) -> None:
    url = f"ws://{proxied.address}{proxied.path}/8000/websocket"
    async with connect(url, proxy=None, compression=None, ping_interval=None) as socket:
        assert socket.response is not None
        assert "set-cookie" not in socket.response.headers
        assert await socket.recv() == "hello"
        await socket.send("straight")
        assert await socket.recv() == "thgiarts"


@pytest.mark.parametrize(("path", "status"), [("/8000/no-websocket", 502), ("/9/", 502)])
async def test_a_websocket_that_nobody_serves(proxied: Proxied, path: str, status: int) -> None:
    with pytest.raises(InvalidStatus) as refused:
        await connect(f"ws://{proxied.address}{proxied.path}{path}", proxy=None)
    assert refused.value.response.status_code == status
    assert "set-cookie" not in refused.value.response.headers


async def test_a_websocket_of_another_site(proxied: Proxied) -> None:
    url = f"ws://{proxied.address}{proxied.path}/8000/websocket"
    with pytest.raises(InvalidStatus) as refused:
        await connect(url, proxy=None, additional_headers={"Origin": "http://evil.example"})
    assert refused.value.response.status_code == 403


@pytest.mark.parametrize("given", [{}, {"Authorization": "Bearer any"}, {"X-API-Key": "any"}])
async def test_a_token_as_a_subprotocol_stays_here(proxied: Proxied, given: dict[str, str]) -> None:
    """A server in a sandbox that reads it could use the server in the client's name."""
    offered = [Subprotocol("chat"), Subprotocol("dutyfree.token.dutyfree_secret"), Subprotocol("dutyfree.v1")]
    url = f"ws://{proxied.address}{proxied.path}/8000/websocket-headers"
    with pytest.raises(InvalidStatus):
        await connect(url, proxy=None, subprotocols=offered, additional_headers=given)
    _, found, _ = await proxied.ask("GET", "/8000/upgraded")
    assert b"dutyfree_secret" not in found
    assert json.loads(found)["sec-websocket-protocol"] == "chat, dutyfree.v1", "its own are passed on"
    header = {"Sec-WebSocket-Protocol": "Dutyfree.Token.dutyfree_secret"}
    _, found, _ = await proxied.ask("GET", "/8000/", **header)
    assert b"dutyfree_secret" not in found


async def test_tcp_by_upgrade(proxied: Proxied) -> None:
    host, _, port = proxied.address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"GET {proxied.path}/7000 HTTP/1.1\r\nHost: {proxied.address}\r\n"
    writer.write(head.encode() + b"Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n")
    with anyio.fail_after(60):
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 101 ")
        data = b"any bytes \x00\xff" * 100_000
        writer.write(data)
        writer.write_eof()  # the server in the sandbox waits for the end, and answers then
        assert await reader.read() == data.upper()
    writer.close()
    await until(lambda: not proxied.service.quotas.calls["local"])
