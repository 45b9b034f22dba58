"""Pull from Debian's registry on the loopback: logins, mirrors, interruptions, kills, wrong data."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from dutyfree.contract.errors import CreateError
from dutyfree.engine.images import registry as registries
from dutyfree.engine.images.install import LayerProgress
from dutyfree.engine.images.manifest import this_platform
from dutyfree.engine.images.pull import Puller, PullOptions
from dutyfree.engine.images.reference import parse
from dutyfree.engine.store.cancel import Cancelled, CancelToken
from dutyfree.engine.store.records import StoredImage
from dutyfree.engine.store.store import Store
from tests.engine.images import composing
from tests.engine.images.composing import INDEX, Image, digest, member, push, push_manifest, tar

pytestmark = pytest.mark.root("layers hold files of many owners")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a registry, and the directory of its data."""
    root = tmp_path_factory.mktemp("registry")
    with composing.registry(root) as host:
        yield host, root


@pytest.fixture(scope="module")
def host(hub: tuple[str, Path]) -> str:
    return hub[0]


@pytest.fixture(autouse=True)
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Do not use this machine's logins."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    (tmp_path / "docker").mkdir()
    return tmp_path / "docker"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def pull(store: Store, name: str, **options: Any) -> StoredImage:
    held = Puller(store, PullOptions(first_wait=0.01, **options)).pull(parse(name))
    held.close()
    return held.image


def files(store: Store, image: StoredImage) -> dict[str, bytes]:
    """All files of an image without whiteouts."""
    found: dict[str, bytes] = {}
    for key in image.mounted:
        lease = store.lease(key)
        assert lease is not None
        with lease:
            for path in lease.tree.rglob("*"):
                if path.is_file():
                    found.setdefault(str(path.relative_to(lease.tree)), path.read_bytes())
    return found


def nothing_is_left(store: Store) -> bool:
    making = [path for path in (store.root / "making").iterdir() if path.name != ".lock"]
    return not making and not list((store.root / "parts").iterdir())


@pytest.mark.parametrize(
    "kind", [{"compression": "gzip"}, {"compression": "zstd"}, {"compression": ""}, {"docker": True}], ids=str
)
def test_pull_and_pull_again(host: str, store: Store, kind: dict[str, Any]) -> None:
    seed = str(kind).encode()
    image = Image([tar(member("a", b"1" + seed)), tar(member("b", b"2" + seed))], {"User": "7"}, **kind)
    manifest_digest = push(host, "team/app", "v1", image)
    seen: list[LayerProgress] = []
    held = Puller(store, progress=seen.append).pull(parse(f"{host}/team/app:v1"))
    held.close()
    kept = held.image
    assert kept.name == f"{host}/team/app:v1"
    assert kept.digest == manifest_digest
    assert kept.settings.user == "7"
    assert files(store, kept) == {"a": b"1" + seed, "b": b"2" + seed}
    assert {event.phase for event in seen} == {"waiting", "downloading", "unpacking", "done"}
    assert nothing_is_left(store)
    seen.clear()
    again = Puller(store, progress=seen.append).pull(parse(f"{host}/team/app@{manifest_digest}"))
    again.close()
    assert again.image.mounted == kept.mounted
    assert {event.phase for event in seen} == {"waiting", "done"}


def test_layers_are_shared_and_collected(host: str, store: Store) -> None:
    base = tar(member("base", os.urandom(100_000)))
    for name in ("one", "two"):
        push(host, "team/shared", name, Image([base, tar(member(name, b"1"))]))
        pull(store, f"{host}/team/shared:{name}")
    assert len(store.layers()) == 3
    assert store.collect().layers == 0
    store.remove_image(f"{host}/team/shared:one")
    assert store.collect().layers == 1
    lease = store.lease(digest(base))
    assert lease is not None
    store.remove_image(f"{host}/team/shared:two")
    with lease:
        done = store.collect()
        assert (done.layers, done.in_use) == (1, 1)
        assert (lease.tree / "base").stat().st_size == 100_000
    assert store.collect().layers == 1
    assert store.layers() == []


def test_an_index_gives_this_platform(host: str, store: Store) -> None:
    images = {cpu: Image([tar(member("for", cpu.encode()))], architecture=cpu) for cpu in ("amd64", "arm64")}
    for name, image in images.items():
        push(host, "team/multi", name, image)
    # The registry requires everything that an index names, also what we never request.
    composing.push_blob(host, "team/multi", digest(b"attestation"), b"attestation", {})
    data = composing.index(*images.items())
    entries = [e for e in json.loads(data)["manifests"] if e["platform"]["os"] == "linux"]
    both = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}).encode()
    push_manifest(host, "team/multi", "latest", both, INDEX)
    kept = pull(store, f"{host}/team/multi")
    assert files(store, kept) == {"for": this_platform().architecture.encode()}
    other = [e for e in entries if e["platform"]["architecture"] != this_platform().architecture]
    one = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": other}).encode()
    push_manifest(host, "team/multi", "other", one, INDEX)
    with pytest.raises(CreateError, match="not made for linux"):
        pull(store, f"{host}/team/multi:other")


def test_what_is_not_there_is_told(host: str, store: Store) -> None:
    with pytest.raises(CreateError, match="has no"):
        pull(store, f"{host}/team/none:latest")
    with composing.nobody() as dead, pytest.raises(CreateError, match="cannot be reached"):
        pull(store, f"{dead}/team/none")
    assert store.images() == []


@pytest.mark.parametrize(
    "kind",
    [
        "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
        "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
        "application/vnd.example.unknown",
    ],
)
def test_layers_of_unknown_kinds_are_refused(host: str, store: Store, kind: str) -> None:
    image = Image([tar(member("a", b"1"))])
    image.layers[0]["mediaType"] = kind
    push(host, "team/foreign", "latest", image)
    with pytest.raises(CreateError, match="layer of the kind"):
        pull(store, f"{host}/team/foreign")


# --- Lies ------------------------------------------------------------------------------------------


def test_a_wrong_blob_is_refused(hub: tuple[str, Path], store: Store) -> None:
    host, root = hub
    image = Image([tar(member("a", os.urandom(50_000)))])
    push(host, "team/wrong", "latest", image)
    stored = composing.unpacked_file(root, image)
    data = bytearray(stored.read_bytes())
    data[len(data) // 2] ^= 1
    stored.write_bytes(data)
    # It is unpacked during the download: either may find the error first.
    with pytest.raises(CreateError, match=r"something else|cannot be decompressed"):
        pull(store, f"{host}/team/wrong")
    stored.write_bytes(data[:-100])
    with pytest.raises(CreateError):
        pull(store, f"{host}/team/wrong")
    assert store.layers() == []


def test_a_wrong_diff_id_is_refused(host: str, store: Store) -> None:
    image = Image([tar(member("a", b"1"))])
    image.config["rootfs"]["diff_ids"] = [digest(b"something else")]
    push(host, "team/lie", "latest", image)
    with pytest.raises(CreateError, match="configuration tells"):
        pull(store, f"{host}/team/lie")
    assert store.layers() == []
    assert not [path for path in (store.root / "making").iterdir() if path.name != ".lock"]


def test_a_bomb_is_refused(host: str, store: Store) -> None:
    push(host, "team/bomb", "latest", Image([tar(member("zero", bytes(32 << 20)))]))
    with pytest.raises(CreateError, match="grows beyond"):
        pull(store, f"{host}/team/bomb", largest=1 << 20)
    assert store.layers() == []


# --- Logins ----------------------------------------------------------------------------------------


class Relay(BaseHTTPRequestHandler):
    """A server that passes requests on to a registry."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def relay(self, host: str, path: str) -> None:
        headers = {"Accept": self.headers.get("Accept", "")}
        status, found, body = composing.request(host, "GET", path, b"", headers)
        self.answer(status, {"Content-Type": found.get("content-type", "")}, body)

    def answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.send_body(body)

    def send_body(self, body: bytes) -> None:
        self.wfile.write(body)


@contextlib.contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[str]:
    """A registry that only ann may use."""
    htpasswd = tmp_path / "htpasswd"
    htpasswd.write_text("ann:$2b$05$abcdefghijklmnopqrstuuLK7U1u6pVRmL7L1BBM2aS35PSZnDXlK\n")  # of "s3cret"
    auth = f"auth: {{htpasswd: {{realm: test, path: {htpasswd}}}}}"
    with composing.registry(tmp_path / "closed", auth) as host:
        headers = {"Authorization": "Basic " + base64.b64encode(b"ann:s3cret").decode()}
        push(host, "team/secret", "latest", Image([tar(member("a", b"1"))]), headers)
        yield host


def test_basic_logins(closed: str, store: Store, nobody: Path) -> None:
    with pytest.raises(CreateError, match="without a login") as refused:
        pull(store, f"{closed}/team/secret")
    assert "docker login" in refused.value.remedy
    auth = base64.b64encode(b"ann:wrong").decode()
    (nobody / "config.json").write_text(json.dumps({"auths": {closed: {"auth": auth}}}))
    with pytest.raises(CreateError, match="as ann"):
        pull(store, f"{closed}/team/secret")
    auth = base64.b64encode(b"ann:s3cret").decode()
    (nobody / "config.json").write_text(json.dumps({"auths": {closed: {"auth": auth}}}))
    assert files(store, pull(store, f"{closed}/team/secret")) == {"a": b"1"}


def test_logins_from_a_helper(
    closed: str, store: Store, nobody: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = tmp_path / "bin/docker-credential-test"
    helper.parent.mkdir()
    helper.write_text(
        "#!/bin/sh\nread host\n"
        f'[ "$1 $host" = "get {closed}" ] || {{ echo "credentials not found"; exit 1; }}\n'
        'echo \'{"ServerURL": "x", "Username": "ann", "Secret": "s3cret"}\'\n'
    )
    helper.chmod(0o755)
    (nobody / "config.json").write_text(json.dumps({"credHelpers": {closed: "test"}}))
    with pytest.raises(CreateError, match="not installed"):
        pull(store, f"{closed}/team/secret")
    monkeypatch.setenv("PATH", f"{helper.parent}:{os.environ['PATH']}")
    pull(store, f"{closed}/team/secret")


def test_tokens(host: str, store: Store, nobody: Path) -> None:
    """A registry with a token server, like Docker Hub. Each token is good for a few requests."""
    push(host, "team/token", "latest", Image([tar(member(str(n), os.urandom(1000))) for n in range(6)]))
    given: list[dict[str, list[str]]] = []
    uses: dict[str, int] = {}

    class Gate(Relay):
        def do_GET(self) -> None:
            own = self.headers["Host"]
            authorization = self.headers.get("Authorization", "")
            if self.path.startswith("/token?"):
                query = parse_qs(urlsplit(self.path).query)
                if authorization != "Basic " + base64.b64encode(b"bob:pw").decode():
                    self.answer(401, {}, b'{"details": "incorrect username or password"}')
                    return
                given.append(query)
                token = f"token{len(given)}"
                uses[token] = 3
                self.answer(200, {}, json.dumps({"token": token}).encode())
                return
            token = authorization.removeprefix("Bearer ")
            if uses.get(token, 0) <= 0:
                scope = "repository:team/token:pull"
                challenge = f'Bearer realm="http://{own}/token",service="gate",scope="{scope}"'
                self.answer(401, {"WWW-Authenticate": challenge}, b'{"errors": [{"message": "no token"}]}')
                return
            uses[token] -= 1
            if "/blobs/" in self.path:  # redirects to another host, which must not get the token
                self.answer(307, {"Location": f"http://localhost:{host.partition(':')[2]}{self.path}"})
                return
            self.relay(host, self.path)

    with served(Gate) as gate:
        with pytest.raises(CreateError, match=r"without a login|no token|incorrect"):
            pull(store, f"{gate}/team/token")
        (nobody / "config.json").write_text(
            json.dumps({"auths": {gate: {"auth": base64.b64encode(b"bob:pw").decode()}}})
        )
        assert len(files(store, pull(store, f"{gate}/team/token"))) == 6
    assert len(given) >= 2
    assert given[0] == {"service": ["gate"], "scope": ["repository:team/token:pull"]}


def test_a_registry_that_is_busy_is_asked_again(host: str, store: Store) -> None:
    push(host, "team/busy", "latest", Image([tar(member("a", os.urandom(10_000)))]))
    moods = iter([429, 503, 0, 500, 0, 502, 0])

    class Moody(Relay):
        def do_GET(self) -> None:
            if mood := next(moods, 0):
                self.answer(mood, {"Retry-After": "0"})
            else:
                self.relay(host, self.path)

    with served(Moody) as busy:
        pull(store, f"{busy}/team/busy")
    assert next(moods, None) is None


# --- Mirrors ---------------------------------------------------------------------------------------


def test_mirrors_come_first_and_the_registry_last(host: str, store: Store, tmp_path: Path) -> None:
    push(host, "team/mirrored", "latest", Image([tar(member("a", b"of the origin"))]))
    proxy = f"proxy: {{remoteurl: http://{host}}}"
    with composing.nobody() as dead, composing.registry(tmp_path / "mirror", proxy) as mirror:
        name = "registry.example/team/mirrored"
        kept = pull(store, name, mirrors={"registry.example": (f"http://{dead}", f"http://{mirror}")})
        assert kept.name == f"{name}:latest"
        assert files(store, kept) == {"a": b"of the origin"}
        kept = pull(store, f"{host}/team/mirrored", mirrors={host: (f"http://{dead}",)})
        assert kept.name == f"{host}/team/mirrored:latest"


# --- Cuts, kills, and many at once -----------------------------------------------------------------


class Cutter:
    """A proxy to a registry that cuts each connection after some bytes, and counts them. Close it."""

    def __init__(self, host: str, budget: int = 1 << 40) -> None:
        self._to = ("127.0.0.1", int(host.partition(":")[2]))
        self._budget = budget
        self._server = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.bytes = self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                theirs, _ = self._server.accept()
                self.connections += 1
                ours = socket.create_connection(self._to)
                threading.Thread(target=self._pass, args=(theirs, ours, 1 << 40), daemon=True).start()
                threading.Thread(target=self._pass, args=(ours, theirs, self._budget), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, budget: int) -> None:
        with contextlib.suppress(OSError):
            while budget > 0 and (data := source.recv(min(65536, budget))):
                budget -= len(data)
                if source.getpeername() == self._to:  # count before the reader can look
                    self.bytes += len(data)
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._server.close()


def test_cut_connections_are_taken_up_again(host: str, store: Store) -> None:
    data = {f"f{n}": os.urandom(1_500_000) for n in range(3)}
    image = Image([tar(member(name, content)) for name, content in data.items()])
    push(host, "team/cut", "latest", image)
    with contextlib.closing(Cutter(host, 400_000)) as cutter:
        kept = pull(store, f"{cutter.host}/team/cut")
    assert files(store, kept) == data
    assert cutter.connections > 10
    # Nothing but headers was fetched twice.
    assert cutter.bytes < sum(map(len, data.values())) * 1.1


def test_a_stopped_pull_leaves_only_what_it_can_take_up(host: str, store: Store) -> None:
    image = Image([tar(member("big", os.urandom(8_000_000)))])
    push(host, "team/stopped", "latest", image)
    cancel = CancelToken()

    def watch(event: LayerProgress) -> None:
        if event.phase == "downloading" and event.done > 3_000_000:
            cancel.set()

    with pytest.raises(Cancelled):
        Puller(store, progress=watch, cancel=cancel).pull(parse(f"{host}/team/stopped"))
    (part,) = (store.root / "parts").iterdir()
    assert 3_000_000 < part.stat().st_size < 8_000_000
    with contextlib.closing(Cutter(host)) as cutter:
        pull(store, f"{cutter.host}/team/stopped")
    assert cutter.bytes < 5_500_000
    assert nothing_is_left(store)


def test_a_registry_without_ranges_begins_anew(host: str, store: Store) -> None:
    """While the layer is unpacked: the first part is downloaded again, but not unpacked again."""
    data = {f"f{n}": os.urandom(1_000_000) for n in range(4)}
    push(host, "team/whole", "latest", Image([tar(*[member(n, d) for n, d in data.items()])]))
    cuts = [1_500_000, 2_500_000]

    class Forgetful(Relay):
        protocol_version = "HTTP/1.0"  # each response ends its connection, also one that is cut

        def do_GET(self) -> None:
            self.relay(host, self.path)

        def send_body(self, body: bytes) -> None:
            large = len(body) > 100_000
            super().send_body(body[: cuts.pop(0)] if large and cuts else body)

    with served(Forgetful) as address:
        kept = pull(store, f"{address}/team/whole")
    assert files(store, kept) == data
    assert not cuts
    assert nothing_is_left(store)


def test_a_proxy_of_the_environment_is_used(host: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    push(host, "team/proxied", "latest", Image([tar(member("one", b"1"))]))
    seen: list[tuple[str, str | None]] = []

    class Proxy(Relay):
        def do_GET(self) -> None:
            seen.append((self.path, self.headers.get("Proxy-Authorization")))
            self.relay(host, urlsplit(self.path).path)

        def do_CONNECT(self) -> None:
            seen.append((self.path, self.headers.get("Proxy-Authorization")))
            self.send_error(502)

    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with served(Proxy) as address:
        monkeypatch.setenv("HTTP_PROXY", f"http://user:p%40ss@{address}")
        monkeypatch.setenv("HTTPS_PROXY", f"http://{address}")
        kept = pull(store, "registry.invalid:5000/team/proxied", insecure=("registry.invalid:5000",))
        assert files(store, kept) == {"one": b"1"}
        login = "Basic " + base64.b64encode(b"user:p@ss").decode()
        assert {who for _, who in seen} == {login}
        assert all(path.startswith("http://registry.invalid:5000/v2/team/proxied/") for path, _ in seen)
        seen.clear()
        with pytest.raises(CreateError, match="cannot be reached"):
            pull(store, "registry.invalid/team/proxied")
        assert {path for path, _ in seen} == {"registry.invalid:443"}
        monkeypatch.setenv("NO_PROXY", host)
        seen.clear()
        pull(store, f"{host}/team/proxied")
        assert not seen
    monkeypatch.setenv("HTTPS_PROXY", "socks5://127.0.0.1:1")
    with pytest.raises(CreateError, match="name it http://"):
        pull(store, "registry.invalid/team/proxied")


def test_nothing_is_asked_for_what_is_there(host: str, store: Store) -> None:
    """For a tag only the manifest, for a digest nothing. The store is not written."""
    digest = push(host, "team/there", "latest", Image([tar(member("one", b"1"))]))
    with contextlib.closing(Cutter(host)) as cutter:
        pull(store, f"{cutter.host}/team/there")
        first, before = cutter.bytes, {path: path.stat().st_mtime_ns for path in store.root.glob("images/*")}
        pull(store, f"{cutter.host}/team/there")
        assert cutter.bytes - first < 2000
        assert {path: path.stat().st_mtime_ns for path in store.root.glob("images/*")} == before
        pull(store, f"{cutter.host}/team/there@{digest}")
        connections = cutter.connections
        pull(store, f"{cutter.host}/team/there@{digest}")
        assert cutter.connections == connections


def test_a_rotten_part_is_fetched_anew(host: str, store: Store) -> None:
    image = Image([tar(member("big", os.urandom(1_000_000)))])
    push(host, "team/rotten", "latest", image)
    part = store.download_path(image.layers[0]["digest"])
    for rotten in (b"rotten" * 1000, b"x" * 5_000_000, b"x" * image.layers[0]["size"]):
        part.write_bytes(rotten)
        pull(store, f"{host}/team/rotten")
        store.remove_image(f"{host}/team/rotten:latest")
        store.collect()


PULL = """
import sys
from pathlib import Path
from dutyfree.engine.images.pull import Puller
from dutyfree.engine.images.reference import parse
from dutyfree.engine.store.layer_lease import LayerLease
from dutyfree.engine.store.store import Store
Puller(Store(Path(sys.argv[1]))).pull(parse(sys.argv[2])).close()
"""


def test_killed_pulls_leave_no_half_image(host: str, store: Store) -> None:
    data = {f"f{n}": os.urandom(3_000_000) for n in range(5)}
    image = Image([tar(member(name, content)) for name, content in data.items()])
    push(host, "team/killed", "latest", image)
    name = f"{host}/team/killed"
    order = random.Random(0)
    command = [sys.executable, "-c", PULL, str(store.root), name]
    begun = time.monotonic()
    subprocess.run(command, check=True)
    whole = time.monotonic() - begun
    for _ in range(int(os.environ.get("DUTYFREE_KILLS", "8"))):
        store.remove_image(f"{name}:latest")
        store.collect()
        process = subprocess.Popen(command)
        time.sleep(order.uniform(0.2, 1.0) * whole)
        process.send_signal(signal.SIGKILL)
        process.wait()
        for facts in store.layers():
            lease = store.lease(facts.key)
            assert lease is not None
            with lease:
                assert [path.stat().st_size for path in lease.tree.iterdir()] == [3_000_000]
        store.collect()  # removes what the killed process left
        assert not [path for path in (store.root / "making").iterdir() if path.name != ".lock"]
        assert files(store, pull(store, name)) == data
        assert nothing_is_left(store)


def test_many_processes_fetch_once(host: str, store: Store) -> None:
    image = Image([tar(member(f"f{n}", os.urandom(1_000_000))) for n in range(3)])
    push(host, "team/many", "latest", image)
    with contextlib.closing(Cutter(host)) as cutter:
        command = [sys.executable, "-c", PULL, str(store.root), f"{cutter.host}/team/many"]
        processes = [subprocess.Popen(command) for _ in range(4)]
        assert [process.wait() for process in processes] == [0] * 4
    assert cutter.bytes < 3_300_000
    assert nothing_is_left(store)


def test_a_full_disk_is_told(host: str, tmp_path: Path) -> None:
    push(host, "team/large", "latest", Image([tar(member("zero", os.urandom(8_000_000)))]))
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(small)], check=True)
    try:
        with pytest.raises(CreateError, match="disk is full") as told:
            pull(Store(small / "store"), f"{host}/team/large")
        assert "image gc" in told.value.remedy
        assert not [p for p in (small / "store/making").iterdir() if p.name != ".lock"]
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_collecting_never_takes_what_is_being_pulled(host: str, store: Store) -> None:
    image = Image([tar(member(f"f{n}", os.urandom(20_000))) for n in range(20)])
    push(host, "team/race", "latest", image)
    done = threading.Event()

    def collect() -> None:
        while not done.is_set():
            store.remove_image(f"{host}/team/race:latest")
            store.collect()

    collector = threading.Thread(target=collect)
    collector.start()
    try:
        for _ in range(5):
            held = Puller(store).pull(parse(f"{host}/team/race"))
            try:
                for lease in held.leases:
                    assert list(lease.tree.iterdir())
            finally:
                held.close()
    finally:
        done.set()
        collector.join()


def test_no_way_to_plain_http(store: Store) -> None:
    assert registries.bases(parse("debian"), {}, ()) == ["https://registry-1.docker.io"]
    for host in ("localhost:5000", "127.0.0.1", "[::1]:5000"):
        assert registries.bases(parse(f"{host}/x"), {}, ()) == [f"http://{host}"]
    assert registries.bases(parse("127.0.0.1.example/x"), {}, ()) == ["https://127.0.0.1.example"]
    assert registries.bases(parse("lan:5000/x"), {}, ("lan:5000",)) == ["http://lan:5000"]
    mirrored = registries.bases(parse("debian"), {"docker.io": ("mirror.example", "http://lan")}, ())
    assert mirrored == ["https://mirror.example", "http://lan", "https://registry-1.docker.io"]
