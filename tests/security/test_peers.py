"""Hostile peers."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import tarfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import anyio
import pytest

import dutyfree
from dutyfree import Recipe, Stage, layers
from dutyfree.contract.errors import CreateError
from dutyfree.engine.images import find
from dutyfree.engine.store.store import Store
from dutyfree.server.tokens import Tokens
from tests.engine.exchange.nodes import listener
from tests.engine.images.composing import Image, busybox, layout
from tests.opening import open_native
from tests.serving import serving

pytestmark = [pytest.mark.native, pytest.mark.root("layers hold files of many owners")]

WANTED, OTHER = (Recipe(stages=(Stage("setup", (f"echo {name} > file",)),)) for name in ("wanted", "other"))


async def _take(recipe: Recipe, name: str) -> None:
    async with open_native() as native, native.sandbox(recipe) as sandbox:
        await sandbox.snapshot(name)


Change = Callable[[str, bytes], bytes]
"""What a server sends instead of a body, given the path."""


class Hostile:
    """A server that answers for another one, and changes what it says."""

    def __init__(self, honest: str, token: str) -> None:
        self._honest = honest
        self._token = token
        self._stack = contextlib.ExitStack()

    def giving(self, *names: str, change: Change | None = None) -> str:
        """The URL of a server that offers these chains, whatever it is asked for."""
        wanted = urlencode([("name", name) for name in names])
        told: Change = change or (lambda _path, body: body.replace(b"carried:1", b"trusted:2"))

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler) -> None:  # noqa: N805
                path = f"/v1/layers?{wanted}" if handler.path.startswith("/v1/layers") else handler.path
                asked = Request(self._honest + path, headers={"Authorization": f"Bearer {self._token}"})
                with urlopen(asked) as found:
                    body = told(handler.path, found.read())
                handler.send_response(200)
                handler.send_header("Content-Length", str(len(body)))
                handler.end_headers()
                handler.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        server = self._stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self._stack.callback(server.shutdown)
        return "http://{}:{}".format(*server.server_address[:2])

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hostile]:
    """A source to import from, which delivers other layers than requested."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "there"))
    anyio.run(_take, WANTED, "wanted")
    anyio.run(_take, OTHER, "other")
    with Tokens(tmp_path / "state/server.sqlite") as tokens:
        token = tokens.create("operator")
    with serving(tmp_path / "state") as honest, contextlib.closing(Hostile(honest, token)) as found:
        monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "here"))
        yield found


def test_what_was_not_asked_for_is_not_taken(hostile: Hostile) -> None:
    honest = f"recipe:{WANTED.key(1)}"
    for given in (f"recipe:{OTHER.key(1)}", "snapshot:other", "snapshot:wanted"):
        with pytest.raises(CreateError, match="not asked for"):
            layers.bring(hostile.giving(honest, given), [WANTED])
    with pytest.raises(CreateError, match="not asked for"):
        layers.bring(hostile.giving("snapshot:other"), ["snapshot:wanted"])
    assert layers.ls() == []
    layers.bring(hostile.giving(honest), [WANTED])
    assert [kept.recipe for kept in layers.ls()] == [WANTED.key(1)]
    layers.bring(hostile.giving("snapshot:wanted"), ["snapshot:wanted"])
    assert {kept.name for kept in layers.ls()} >= {"snapshot:wanted"}


def _order(connection: socket.socket) -> None:
    """Refuse with a message that would clear a terminal."""
    body = b'{"errors":[{"message":"\\u001b[2J"}]}'
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 403 no\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


LONG = Recipe(stages=(Stage("setup", ("sleep 0.3; date +%N > file",)),))


def test_nor_by_a_node_that_asks_by_itself(
    hostile: Hostile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The layer is built instead, and the peer's message cannot control a terminal."""
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "there"))
    anyio.run(_take, LONG, "long")
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "here"))

    async def ask(*peers: str) -> tuple[str, list[int], bytes]:
        async with open_native(peers=peers) as native, native.sandbox(LONG) as sandbox:
            brought = [figures.layers for figures in native.peers.values()]
            return sandbox.served.kind, brought, await sandbox.read("file")

    with listener(_order) as orders:
        peers = [hostile.giving(f"recipe:{OTHER.key(1)}"), hostile.giving("snapshot:long"), orders]
        assert anyio.run(ask, *peers)[:2] == ("cold", [0, 0, 0])
    assert [kept.recipe for kept in layers.ls()] == [LONG.key(1)]
    (told,) = [record.getMessage() for record in caplog.records if orders in record.getMessage()]
    assert "[2J" in told
    assert "\x1b" not in told


def test_images_do_not_come_under_names_of_others(
    tmp_path: Path, hostile: Hostile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that delivers layers on an image cannot give the image another name."""
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "there"))
    layout(tmp_path / "layout", Image([busybox()], {}))
    anyio.run(find.import_image, f"oci:{tmp_path / 'layout'}", "carried:1")
    upon = Recipe("carried:1", WANTED.stages)
    anyio.run(_take, upon, "upon")
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "here"))
    with pytest.raises(CreateError, match="not asked for"):
        layers.bring(hostile.giving(f"recipe:{upon.key(1)}"), [upon])
    layers.bring(hostile.giving("snapshot:upon"), ["snapshot:upon"])
    assert Store().images() == []

    async def used() -> bytes:
        async with dutyfree.open("native") as native, native.sandbox(Recipe("snapshot:upon")) as sandbox:
            return await sandbox.read("file")

    assert anyio.run(used) == b"wanted\n"


def _manifest(**lies: object) -> Change:
    """Lie in the manifest of a layer."""

    def change(path: str, body: bytes) -> bytes:
        if "/manifests/" not in path:
            return body
        found = json.loads(body)
        for layer in found["layers"]:
            layer.update({name: lie for name, lie in lies.items() if name in layer})
            layer["annotations"].update({name: lie for name, lie in lies.items() if name not in layer})
        return json.dumps(found).encode()

    return change


def _blob(new: Callable[[bytes], bytes]) -> Change:
    return lambda path, body: new(body) if "/blobs/" in path else body


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_blob(lambda body: body[: len(body) // 2]), "cut after"),
        (_blob(lambda body: bytes(len(body))), "does not match its digest"),
        (_blob(lambda body: body[::-1]), "does not match its digest"),
        (_manifest(digest="sha256:../../../../etc/passwd"), "file systems"),
        (_manifest(size=-1), "file systems"),
        (_manifest(size="1"), "malformed"),
        (_manifest(size=1 << 60), "are allowed"),
        (_manifest(**{"dev.dutyfree.tar-size": "nine"}), "malformed"),
        (_manifest(**{"dev.dutyfree.tar-size": str(1 << 60)}), "are allowed"),
        (_manifest(**{"dev.dutyfree.tar-size": "1"}), "grows beyond"),
        (_manifest(**{"dev.dutyfree.diff-id": "sha256:" + "0" * 64}), "its tar has the digest"),
        (_manifest(annotations={}), "malformed"),
        (lambda path, body: b"[" * 100_000 if "/manifests/" in path else body, "malformed"),
        (lambda path, body: b"{}" if "/manifests/" in path else body, "malformed"),
        (lambda path, body: b"[" * 100_000 if "/v1/" in path else body, "is not a `dutyfree serve`"),
        (lambda path, body: bytes(5 << 20) if "/manifests/" in path else body, "instead of a small document"),
    ],
)
def test_a_peer_that_lies_is_refused(hostile: Hostile, tmp_path: Path, change: Change, says: str) -> None:
    with pytest.raises(CreateError, match=says):
        layers.bring(hostile.giving(f"recipe:{WANTED.key(1)}", change=change), [WANTED])
    assert layers.ls() == []
    assert list((tmp_path / "here/layers/kept").glob("*/*")) == []


def test_what_comes_after_a_blob_is_not_taken(hostile: Hostile) -> None:
    """The connection is not used again, and the disk does not fill."""
    source = hostile.giving(f"recipe:{WANTED.key(1)}", change=_blob(lambda body: body + bytes(9_000_000)))
    (done,) = layers.bring(source, [WANTED])
    assert done.size < 100_000
    assert [kept.recipe for kept in layers.ls()] == [WANTED.key(1)]


@pytest.mark.parametrize("name", ["index.json", "manifest.json"])
def test_documents_that_are_nested_without_end(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "here"))
    document = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with tarfile.open(tmp_path / "hostile.tar", "w") as archive:
        for member, data in ((name, document), ("oci-layout", b'{"imageLayoutVersion":"1.0.0"}')):
            entry = tarfile.TarInfo(member)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    with pytest.raises(CreateError):
        layers.bring(tmp_path / "hostile.tar")
    with pytest.raises(CreateError):
        anyio.run(find.import_image, str(tmp_path / "hostile.tar"))
