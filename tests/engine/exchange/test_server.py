"""Layers over TCP: tokens, hostile clients, and an attacker between the ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dutyfree import layers
from dutyfree.contract.errors import CreateError, UsageError
from dutyfree.engine.exchange import server as servers
from dutyfree.engine.exchange.chains import stage_layers
from dutyfree.engine.images import rootfs
from dutyfree.engine.store.cancel import Cancelled, CancelToken
from dutyfree.engine.store.provenance import Provenance, write
from dutyfree.engine.store.store import Store
from tests.engine.exchange.nodes import TOKEN, Nodes, Server
from tests.processes import eventually, ran

pytestmark = pytest.mark.root("layers hold files of many owners")

KEY = "stage:" + "a" * 64


@pytest.fixture(autouse=True)
def layer(nodes: Nodes) -> None:
    """A layer of 1 MB at ``here``. ``there`` is in use."""

    def make(tree: Path) -> tuple[int, int, int]:
        for index in range(rootfs.host_trees()):
            (tree / str(index)).mkdir()
        (tree / "0/noise").write_bytes(os.urandom(1 << 20))
        write(tree, Provenance(kind="setup", seconds=1.0, image="host", identity=rootfs.host_identity()))
        return 1 << 20, 1, 0

    store = Store(nodes.here / "layers")
    store.obtain(KEY, make).close()
    nodes.use(nodes.there)


def arrived() -> bool:
    return KEY in stage_layers(Store())


@pytest.mark.parametrize("token", ["", TOKEN])
def test_a_layer_arrives(nodes: Nodes, monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setenv("DUTYFREE_PEER_TOKEN", token)
    with nodes.listening(nodes.here, token=token) as server:
        (done,) = layers.bring(server.source, [KEY])
        assert done.layers == 1
        assert layers.bring(server.source, [KEY])[0].layers == 0
    assert arrived()


def test_a_token_from_a_file(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    (nodes.root / "token").write_text(TOKEN + "\n")
    monkeypatch.setenv("DUTYFREE_PEER_TOKEN_FILE", str(nodes.root / "token"))
    with nodes.listening(nodes.here, token=TOKEN) as server:
        layers.bring(server.source, [KEY])
    assert arrived()
    for content, complaint in (("", "no token in"), ("short", "can be guessed")):
        (nodes.root / "token").write_text(content)
        with pytest.raises(UsageError, match=complaint):
            layers.bring("tcp://127.0.0.1:1", [KEY])
    monkeypatch.setenv("DUTYFREE_PEER_TOKEN_FILE", str(nodes.root / "absent"))
    with pytest.raises(UsageError, match="cannot be read"):
        layers.bring("tcp://127.0.0.1:1", [KEY])


@pytest.mark.parametrize(
    ("theirs", "ours", "complaint"),
    [
        (TOKEN, TOKEN + "?", "the token is wrong"),
        (TOKEN, "", "requires a token"),
        ("", TOKEN, "has no token, so it may be another machine"),
    ],
)
def test_who_does_not_know_the_token_gets_nothing(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, theirs: str, ours: str, complaint: str
) -> None:
    monkeypatch.setenv("DUTYFREE_PEER_TOKEN", ours)
    with nodes.listening(nodes.here, token=theirs) as server, pytest.raises(CreateError, match=complaint):
        layers.bring(server.source, [KEY])
    assert not arrived()


def test_an_impostor_is_not_believed(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that requires a token, but does not know it."""
    monkeypatch.setenv("DUTYFREE_PEER_TOKEN", TOKEN)

    def answer(connection: socket.socket) -> None:
        connection.sendall(b'{"dutyfree":1,"nonce":"' + b"a" * 64 + b'"}\n')
        proof = connection.recv(10_000)
        connection.sendall(proof)  # reflects the client's own proof

    with answering(answer) as source, pytest.raises(CreateError, match="does not know the token"):
        layers.bring(source, [KEY])


@contextlib.contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                answer(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        yield "tcp://{}:{}".format(*server.getsockname())
        thread.join()


@pytest.mark.parametrize("old", [b'"seconds":1.0', b'"size":', b'"bytes":'])
def test_who_sits_between_cannot_change_a_word(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, old: bytes
) -> None:
    monkeypatch.setenv("DUTYFREE_PEER_TOKEN", TOKEN)
    with nodes.listening(nodes.here, token=TOKEN) as server:

        def between(connection: socket.socket) -> None:
            with socket.create_connection(server.address) as behind:
                back = threading.Thread(target=copy, args=(connection, behind, lambda data: data))
                back.start()
                copy(behind, connection, lambda data: data.replace(old, old[:-1] + b" " + old[-1:]))
                connection.shutdown(socket.SHUT_RDWR)
                back.join()

        with answering(between) as source, pytest.raises(CreateError, match="wrong signature"):
            layers.bring(source, [KEY])
    assert not arrived()


def copy(source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(change(data))
    with contextlib.suppress(OSError):  # the other end may be closed
        target.shutdown(socket.SHUT_WR)


# --- What a client can do to it ------------------------------------------------------------------------


class Client:
    """A client that sends arbitrary messages."""

    def __init__(self, server: Server) -> None:
        self.connection = socket.create_connection(server.address, 30)
        self.file = self.connection.makefile("rb")
        assert b"dutyfree" in self.file.readline()

    def ask(self, question: Any) -> dict[str, Any]:
        self.connection.sendall(msgspec.json.encode(question) + b"\n")
        return msgspec.json.decode(self.file.readline(), type=dict[str, Any])

    def close(self) -> None:
        self.file.close()
        self.connection.close()


def test_questions_that_make_no_sense_are_answered_so(nodes: Nodes) -> None:
    packed = nodes.here / f"layers/kept/stage/{'a' * 64}/packed"
    with nodes.listening(nodes.here) as server, contextlib.closing(Client(server)) as client:
        for question in (
            "hello",
            {"pack": [KEY]},  # not offered before
            {"pack": ["../../etc"]},
            {"offer": ["x"] * 5000},
            {"send": [["sha256:" + "a" * 64, 0]]},
            {"send": [["sha256:" + "a" * 64, -1]]},
            {"send": 5},
        ):
            assert client.ask(question)["error"], question
        assert client.ask({"offer": []}) == {}
        assert client.ask({"offer": ["../../etc", "snapshot:../x", "recipe:x", "stage:" + "b" * 64]}) == {}
        assert not packed.exists()
        assert client.ask({"offer": [KEY]})["chains"]
        blobs = client.ask({"pack": [KEY]})["blobs"][KEY]
        assert packed.exists()
        assert client.ask({"send": [[blobs[0]["digest"], -5]]})["error"]
        assert client.ask({"send": [[blobs[0]["digest"], 1 << 60]]}) == {}
        assert server.process.poll() is None


def test_noise_and_silence_disturb_nobody_else(nodes: Nodes) -> None:
    with nodes.listening(nodes.here) as server, contextlib.ExitStack() as stack:
        for noise in (b"", os.urandom(100_000), b"\n" * 1000, b"{" * 5_000_000):
            connection = stack.enter_context(socket.create_connection(server.address, 30))
            with contextlib.suppress(OSError):
                connection.sendall(noise)
        layers.bring(server.source, [KEY])
        assert arrived()


def test_more_than_it_talks_to_are_told_so(nodes: Nodes) -> None:
    with nodes.listening(nodes.here) as server, contextlib.ExitStack() as stack:
        for _ in range(servers.CLIENTS_MAX):
            stack.enter_context(contextlib.closing(Client(server)))
        with pytest.raises(CreateError, match="64 other clients"):
            layers.bring(server.source, [KEY])
        stack.close()

        def brought() -> bool:
            with contextlib.suppress(CreateError):
                layers.bring(server.source, [KEY])
            return arrived()

        assert eventually(brought)


def test_one_without_the_token_is_hung_up_on(nodes: Nodes) -> None:
    with nodes.listening(nodes.here, token=TOKEN) as server:
        with contextlib.closing(Client(server)) as client:
            client.connection.sendall(b"x" * 10_000)  # more than a client may send before the handshake
            with contextlib.suppress(ConnectionError):
                assert client.file.readline() == b""
        with contextlib.closing(Client(server)) as client:
            answer = client.ask({"nonce": "a" * 64, "proof": "b" * 64})
            assert answer == {"proof": "", "nonce": "", "error": "the token is wrong"}
            assert client.file.readline() == b""


def test_one_that_says_nothing_is_hung_up_on() -> None:
    cancel, listener = CancelToken(), servers.listen("127.0.0.1:0", TOKEN.encode())

    def serve() -> None:
        with contextlib.suppress(Cancelled):
            server = servers.LayerServer(
                Store(), listener, TOKEN.encode(), lambda _: None, handshake_seconds=0.5
            )
            server.serve(cancel)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        connection = socket.create_connection(listener.getsockname(), timeout=30)
        with connection, connection.makefile("rb") as heard:
            assert b"dutyfree" in heard.readline()
            assert heard.readline() == b""
    finally:
        cancel.set()
        thread.join()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_by_a_signal_while_it_talks(nodes: Nodes, signum: int) -> None:
    with nodes.listening(nodes.here) as server, contextlib.closing(Client(server)) as client:
        assert client.ask({"offer": [KEY]})["chains"]
        server.process.send_signal(signum)
        assert server.process.wait(60) == 130
        assert server.process.stderr is not None
        assert "Traceback" not in server.process.stderr.read()
    with socket.create_server(server.address):  # the port is free again
        pass


@pytest.mark.parametrize(
    ("where", "complaint"),
    [
        ("0.0.0.0:0", "needs a token"),
        ("[::]:0", "needs a token"),
        ("127.0.0.1", "not an address"),
        ("127.0.0.1:99999", "not an address"),
        ("192.0.2.1:0", "needs a token"),
        ("no-such-host.invalid:0", "cannot listen"),
    ],
)
def test_where_it_does_not_listen(nodes: Nodes, where: str, complaint: str) -> None:
    done = ran(
        [sys.executable, "-m", "dutyfree", "layer", "serve", "--bind", where],
        env={**os.environ, "DUTYFREE_CACHE": str(nodes.here)},
        timeout=60,
    )
    assert done.returncode == 2
    assert complaint in done.stderr


def test_with_a_token_it_listens_anywhere() -> None:
    with servers.listen("0.0.0.0:0", TOKEN.encode()) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
