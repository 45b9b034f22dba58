"""Layers and images over the server: as a registry for any client, and from an attacker's side."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import shutil
import socket
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import anyio
import pytest

import dutyfree
from dutyfree import layers
from dutyfree.contract import Recipe, Stage
from dutyfree.contract.errors import CreateError, RecipeError, UsageError
from dutyfree.engine.exchange.distribution import NAMES_MAX, artifact_tag
from dutyfree.engine.images import find
from dutyfree.engine.images.pull import Puller, PullOptions
from dutyfree.engine.images.reference import parse
from dutyfree.engine.store.store import Store
from dutyfree.server.layers import TRANSFERS_MAX
from dutyfree.server.tokens import Tokens
from tests.engine.images.composing import Image, busybox, layout, member, tar
from tests.opening import open_native
from tests.processes import eventually, ran
from tests.serving import certificates, serving

pytestmark = [pytest.mark.native, pytest.mark.root("layers hold files of many owners")]

IMAGE = "carried:1"
FULL = "docker.io/library/carried"
ZSTD = "application/vnd.oci.image.layer.v1.tar+zstd"
UNKNOWN = "sha256:" + "0" * 64


class Answer:
    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.status = answer.status
        self.headers = answer.headers
        self.body = answer.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of a registry's error."""
        (error,) = self.json["errors"]
        assert error["message"]
        return str(error["code"])


class Client:
    """A client with a token, which knows only HTTP."""

    def __init__(self, url: str, token: str = "") -> None:
        self.url = url
        self.token = token
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}

    def get(self, path: str, method: str = "GET", **headers: str) -> Answer:
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, headers={**self.headers, **headers})
            return Answer(connection.getresponse())

    def chains(self, *names: str) -> list[Any]:
        answer = self.get(f"/v1/layers?{urlencode([('name', name) for name in names])}")
        assert answer.status == 200, answer.body
        return list(answer.json["chains"])

    def artifact(self, key: str) -> Answer:
        return self.get(f"/v2/dutyfree/layers/manifests/{artifact_tag(key)}")


class World:
    """A server with an image, an operator and two tenants."""

    def __init__(self, url: str, root: Path, secrets: dict[str, str]) -> None:
        self.url = url
        self.root = root
        self.secrets = secrets
        self.operator, self.ours, self.theirs = (
            Client(url, secrets[name]) for name in ("operator", "ours", "theirs")
        )

    @property
    def host(self) -> str:
        return urlsplit(self.url).netloc

    def prepare(self, client: Client, recipe: Recipe) -> None:
        """Let a tenant use a recipe, with a real client: it sends the recipe's files."""

        async def work() -> None:
            async with dutyfree.open("hosted", url=client.url, token=client.token) as hosted:
                await hosted.prepare(recipe)

        anyio.run(work)
        if recipe.stages:  # a sandbox can use the layers before they are on disk
            assert eventually(lambda: client.chains(f"recipe:{recipe.key()}"))


def names_of(recipe: Recipe) -> list[str]:
    return [f"recipe:{key}" for key in recipe.keys()[1:]]


def compose(root: Path, text: bytes) -> None:
    """Import an image under the name ``IMAGE`` into the cache in use."""
    layout(root, Image([busybox(), tar(member("etc/text", text))], {"Env": ["A=b"], "WorkingDir": "/w"}))
    anyio.run(find.import_image, f"oci:{root}", IMAGE)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("world")
    with Tokens(root / "state/server.sqlite") as tokens:
        secrets = {name: tokens.create(name) for name in ("operator", "ours", "theirs")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DUTYFREE_CACHE", str(root / "cache"))
        patch.setenv("DOCKER_CONFIG", str(root / "docker"))
        compose(root / "layout", b"first")
        with serving(root / "state") as url:
            patch.setenv("DUTYFREE_CACHE", str(root / "elsewhere"))
            yield World(url, root, secrets)


# --- A registry ---------------------------------------------------------------------------------------


def test_the_version_and_the_token(world: World) -> None:
    refused = Client(world.url).get("/v2/")
    assert (refused.status, refused.code) == (401, "UNAUTHORIZED")
    assert refused.headers["www-authenticate"].startswith("Basic ")
    assert Client(world.url, "dutyfree_wrong").get("/v2/").status == 401
    for login in (f"any:{world.ours.token}", f":{world.ours.token}"):
        basic = "Basic " + base64.b64encode(login.encode()).decode()
        answer = Client(world.url).get("/v2/", Authorization=basic)
        assert (answer.status, answer.json) == (200, {})
        assert answer.headers["docker-distribution-api-version"] == "registry/2.0"
    for wrong in ("Basic ", "Basic *", "Basic " + base64.b64encode(b"any").decode(), "Digest x"):
        assert Client(world.url).get("/v2/", Authorization=wrong).status == 401


def test_an_image_is_pulled_as_from_any_registry(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docker").mkdir()
    login = base64.b64encode(f"any:{world.operator.token}".encode()).decode()
    config = {"auths": {world.host: {"auth": login}}}
    (tmp_path / "docker/config.json").write_text(json.dumps(config))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    for number, (name, options) in enumerate(
        (
            (f"{world.host}/{FULL}:1", PullOptions()),
            (f"{world.host}/library/carried:1", PullOptions()),
            (IMAGE, PullOptions({"docker.io": (world.url,)})),
        )
    ):
        store = Store(tmp_path / f"store-{number}")
        held = Puller(store, options).pull(parse(name))
        with contextlib.closing(held):
            assert (held.image.settings.env, held.image.settings.workdir) == ({"A": "b"}, "/w")
            texts = [(lease.tree / "etc/text") for lease in held.leases]
            assert [path.read_bytes() for path in texts if path.exists()] == [b"first"]
    with pytest.raises(CreateError, match="no such manifest"):
        Puller(Store(tmp_path / "none")).pull(parse(f"{world.host}/{FULL}:2"))


def test_skopeo_copies_what_a_node_has(world: World, tmp_path: Path) -> None:
    if shutil.which("skopeo") is None:
        pytest.skip("skopeo is missing; to enable it: apt-get install skopeo")
    recipe = command("for-skopeo")
    world.prepare(world.ours, recipe)
    (chain,) = world.ours.chains(*names_of(recipe))
    skopeo = ["skopeo", "copy", "--insecure-policy", "--src-tls-verify=false"]
    login = ["--src-creds", f"any:{world.ours.token}"]
    names = {
        "image": f"{FULL}:1",
        "stage": f"dutyfree/stage:{chain['name'].partition(':')[2]}",
        "layer": f"dutyfree/layers:{artifact_tag(chain['layers'][-1]['key'])}",
    }
    for number, name in names.items():
        source, target = f"docker://{world.host}/{name}", f"oci:{tmp_path / number}"
        assert "unauthorized" in ran([*skopeo, source, target]).stderr
        theirs = ["--src-creds", f"any:{world.theirs.token}"]
        if number != "image":
            assert "manifest unknown" in ran([*skopeo, *theirs, source, target]).stderr.lower()
        ran([*skopeo, *login, source, target], check=True)
    # What another tool has copied is an image to us.
    store = Store(tmp_path / "store")

    async def bring() -> None:
        held = await find.import_image(f"oci:{tmp_path / 'stage'}", "copied:1", store=store)
        with contextlib.closing(held):
            made = [path for lease in held.leases if (path := lease.tree / "w/made").exists()]
            assert [await anyio.Path(path).read_text() for path in made] == ["for-skopeo\n"]

    anyio.run(bring)


@pytest.mark.docker
def test_docker_pulls_and_runs_what_a_node_has(world: World, tmp_path: Path) -> None:
    if shutil.which("docker") is None:
        pytest.skip("the docker command is missing; to enable it: apt-get install docker-cli")
    recipe = command("for-docker")
    world.prepare(world.ours, recipe)
    (chain,) = world.ours.chains(*names_of(recipe))
    stage = chain["name"].partition(":")[2]
    docker = ["docker", "--config", str(tmp_path)]
    login = [*docker, "login", world.host, "--username", "any", "--password-stdin"]
    assert ran(login, input="dutyfree_wrong").returncode != 0
    assert ran(login, input=world.ours.token).returncode == 0
    version = ran([*docker, "version", "--format", "{{.Server.Version}}"], check=True).stdout
    if int(version.partition(".")[0]) < 23:
        pytest.skip(f"Docker {version.strip()} cannot unpack zstd; to enable it: install version 23 or newer")
    for name, shown in ((f"{FULL}:1", "/etc/text"), (f"dutyfree/stage:{stage}", "/w/made")):
        image = f"{world.host}/{name}"
        try:
            done = ran([*docker, "run", "--rm", "--network=none", "--pull=always", image, "cat", shown])
            assert done.stdout.strip() in ("first", "for-docker"), done
        finally:
            ran([*docker, "image", "rm", image])
    assert ran([*docker, "pull", f"{world.host}/dutyfree/stage:{'0' * 64}"]).returncode != 0


def test_manifests_and_blobs(world: World) -> None:
    get = world.operator.get
    found = get(f"/v2/{FULL}/manifests/1")
    digest = found.headers["docker-content-digest"]
    assert digest == f"sha256:{hashlib.sha256(found.body).hexdigest()}"
    assert found.headers["content-type"] == found.json["mediaType"]
    assert get(f"/v2/{FULL}/manifests/{digest}").body == found.body
    head = get(f"/v2/{FULL}/manifests/1", "HEAD")
    assert (head.status, head.body, head.headers["docker-content-digest"]) == (200, b"", digest)
    assert int(head.headers["content-length"]) == len(found.body)
    assert get(f"/v2/{FULL}/tags/list").json == {"name": FULL, "tags": ["1"]}
    config = found.json["config"]
    assert hashlib.sha256(get(f"/v2/{FULL}/blobs/{config['digest']}").body).hexdigest() in config["digest"]
    for layer in found.json["layers"]:
        path = f"/v2/{FULL}/blobs/{layer['digest']}"
        blob = get(path)
        assert (layer["mediaType"], layer["size"]) == (ZSTD, len(blob.body))
        assert layer["digest"] == f"sha256:{hashlib.sha256(blob.body).hexdigest()}"
        head = get(path, "HEAD")
        assert (head.status, head.headers["content-length"], head.body) == (200, str(len(blob.body)), b"")
        part = get(path, Range="bytes=10-")
        assert (part.status, part.body) == (206, blob.body[10:])
        assert part.headers["content-range"] == f"bytes 10-{len(blob.body) - 1}/{len(blob.body)}"
        assert get(path, Range="bytes=3-5").body == blob.body[3:6]
        assert get(path, Range=f"bytes={len(blob.body)}-").status == 416


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/v2/none/manifests/1", 404, "MANIFEST_UNKNOWN"),
        (f"/v2/{FULL}/manifests/2", 404, "MANIFEST_UNKNOWN"),
        (f"/v2/{FULL}/manifests/{UNKNOWN}", 404, "MANIFEST_UNKNOWN"),
        (f"/v2/{FULL}/manifests/..%2f..%2fetc", 404, "NAME_UNKNOWN"),
        ("/v2/../../etc/manifests/passwd", 404, "MANIFEST_UNKNOWN"),
        ("/v2/UPPER/manifests/1", 404, "MANIFEST_UNKNOWN"),
        ("/v2/dutyfree/layers/manifests/stage-../../etc", 404, "NAME_UNKNOWN"),
        ("/v2/dutyfree/layers/manifests/..-" + "a" * 64, 404, "MANIFEST_UNKNOWN"),
        ("/v2/dutyfree/layers/manifests/stage-" + "a" * 64, 404, "MANIFEST_UNKNOWN"),
        ("/v2/dutyfree/layers/manifests/latest", 404, "MANIFEST_UNKNOWN"),
        ("/v2/dutyfree/snapshot/manifests/none", 404, "MANIFEST_UNKNOWN"),
        (f"/v2/{FULL}/blobs/{UNKNOWN}", 404, "BLOB_UNKNOWN"),
        (f"/v2/{FULL}/blobs/sha256:..", 400, "DIGEST_INVALID"),
        (f"/v2/{FULL}/blobs/sha256:*", 400, "DIGEST_INVALID"),
        (f"/v2/{FULL}/blobs/md5:1", 400, "DIGEST_INVALID"),
        ("/v2/none/tags/list", 404, "NAME_UNKNOWN"),
        ("/v2/_catalog", 404, "NAME_UNKNOWN"),
    ],
)
def test_what_is_not_there(world: World, path: str, status: int, code: str) -> None:
    answer = world.operator.get(path)
    assert (answer.status, answer.code) == (status, code)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize("path", ["blobs/uploads/", "manifests/1", f"blobs/{UNKNOWN}"])
def test_nothing_can_be_pushed(world: World, method: str, path: str) -> None:
    answer = world.operator.get(f"/v2/{FULL}/{path}", method)
    assert (answer.status, answer.code) == (405, "UNSUPPORTED")


def test_questions_without_sense_are_refused(world: World) -> None:
    for query in ("", "?other=1", "?" + "&".join(["name=x"] * (NAMES_MAX + 1))):
        answer = world.operator.get(f"/v1/layers{query}")
        assert (answer.status, answer.json["error"]["code"]) == (400, "argument")
    names = ["../../etc", "snapshot:../x", "recipe:", "recipe:x", "stage:x", "x" * 10_000, "\0", "é"]
    assert world.operator.chains(*names) == []


# --- Layers -------------------------------------------------------------------------------------------


def command(text: str) -> Recipe:
    return Recipe(IMAGE, (Stage("setup", commands=(f"echo {text} > made",)),))


def with_files(root: Path, text: str) -> Recipe:
    path = root / text
    path.write_text(text)
    copied = Stage("files", files={"private": path})
    return Recipe(IMAGE, (copied, Stage("setup", commands=("cat private > copy",))))


def everything(client: Client, recipe: Recipe) -> dict[str, Any]:
    """All that a client can get of a recipe's layers: paths and their digests."""
    chains = client.chains(*names_of(recipe))
    keys = {layer["key"] for chain in chains for layer in chain["layers"]}
    found = {f"/v2/dutyfree/layers/manifests/{artifact_tag(key)}" for key in keys}
    found |= {f"/v2/dutyfree/stage/manifests/{chain['name'].partition(':')[2]}" for chain in chains}
    for path in list(found):
        answer = client.get(path)
        assert answer.status == 200, answer.body
        repository = path.partition("/manifests/")[0]
        found.add(f"{repository}/manifests/{answer.headers['docker-content-digest']}")
        if answer.json["config"]["digest"] != f"sha256:{hashlib.sha256(b'{}').hexdigest()}":
            found.add(f"{repository}/blobs/{answer.json['config']['digest']}")
        found |= {f"{repository}/blobs/{layer['digest']}" for layer in answer.json["layers"]}
    contents = {path: hashlib.sha256(client.get(path).body).hexdigest() for path in found}
    return {"names": [*names_of(recipe), *keys], "contents": contents}


def sees_nothing(client: Client, known: dict[str, Any], shared: AbstractSet[str] = frozenset()) -> bool:
    """Whether a client gets nothing, although it knows all names, keys and digests."""
    assert known["contents"]
    found = {path for path in known["contents"] if client.get(path).status != 404} - shared
    return not found and client.chains(*known["names"]) == []


def test_files_of_a_tenant_stay_with_it(world: World, tmp_path: Path) -> None:
    recipe = with_files(tmp_path, "treasure")
    world.prepare(world.ours, recipe)
    known = everything(world.ours, recipe)
    assert known == everything(world.operator, recipe)
    assert sees_nothing(world.theirs, known)
    # To ask for a recipe with the digest of files is not enough: one must have them.
    wanted = {"kind": "files", "files": {"private": "0" * 64}}
    body = json.dumps({"image": IMAGE, "stages": [wanted]}).encode()
    connection = http.client.HTTPConnection(world.host, timeout=60)
    connection.request("POST", "/v1/prepare", body, world.theirs.headers)
    assert connection.getresponse().status == 400
    connection.close()
    assert sees_nothing(world.theirs, known)
    # A tenant who has the same files builds the same layers, and learns nothing by fetching them.
    world.prepare(world.theirs, recipe)
    assert everything(world.theirs, recipe) == known


def test_what_a_tenant_builds_stays_with_it(world: World) -> None:
    recipe = command("by-us")
    world.prepare(world.ours, recipe)
    known = everything(world.ours, recipe)
    image = {path for path in known["contents"] if world.theirs.get(path).status == 200}
    other = command("by-them")
    world.prepare(world.theirs, other)  # on the same image: its layers are theirs too
    shared = set(known["contents"]) & set(everything(world.theirs, other)["contents"])
    assert not image - shared
    assert sees_nothing(world.theirs, known, shared)
    upper = world.ours.chains(*names_of(recipe))[0]["layers"][-1]["key"]
    assert world.theirs.artifact(upper).status == 404
    assert world.ours.artifact(upper).status == 200


def test_an_image_is_seen_by_those_who_have_used_it(world: World) -> None:
    with Tokens(world.root / "state/server.sqlite") as tokens:
        stranger = Client(world.url, tokens.create("stranger"))
    digest = world.operator.get(f"/v2/{FULL}/manifests/1").headers["docker-content-digest"]
    blob = world.operator.get(f"/v2/{FULL}/manifests/1").json["layers"][0]["digest"]
    paths = [f"manifests/{digest}", f"blobs/{blob}", "manifests/1", "tags/list"]
    assert [stranger.get(f"/v2/{FULL}/{path}").status for path in paths] == [404] * 4
    world.prepare(stranger, Recipe(IMAGE))
    assert [stranger.get(f"/v2/{FULL}/{path}").status for path in paths] == [200] * 4


def test_layers_of_the_operator_are_not_for_tenants(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built on the machine itself: with the operator's secrets, perhaps."""
    monkeypatch.setenv("DUTYFREE_CACHE", str(world.root / "cache"))
    recipe = command("by-the-operator")

    async def build() -> None:
        async with dutyfree.open("native") as native, native.sandbox(recipe) as sandbox:
            await sandbox.snapshot("kept")

    anyio.run(build)
    known = everything(world.operator, recipe)
    world.prepare(world.ours, Recipe(IMAGE))
    shared = {path for path in known["contents"] if world.ours.get(path).status == 200}
    assert sees_nothing(world.ours, known, shared)
    (upper,) = [
        layer["key"] for layer in world.operator.chains(*names_of(recipe))[0]["layers"] if layer["made"]
    ]
    assert world.ours.artifact(upper).status == 404
    (snapshot,) = world.operator.chains("snapshot:kept")
    assert world.ours.chains("snapshot:kept", snapshot["layers"][-1]["key"]) == []
    assert world.operator.get("/v2/dutyfree/snapshot/manifests/kept").status == 200
    assert world.ours.get("/v2/dutyfree/snapshot/manifests/kept").status == 404


def test_no_page_of_another_site_reads_layers(world: World) -> None:
    answer = world.operator.get("/v2/", Origin="http://evil.example")
    assert (answer.status, answer.code) == (403, "DENIED")


def test_without_a_token_one_sees_what_was_used_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sandbox with a network can reach the loopback of its host."""
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "cache"))
    compose(tmp_path / "layout", b"first")
    recipe = Recipe(IMAGE, (Stage("setup", commands=("echo 1 > one",)),))

    async def build() -> None:
        async with dutyfree.open("native") as native:
            await native.prepare(recipe)

    anyio.run(build)
    with serving(tmp_path / "state") as url:
        nobody = Client(url)
        assert nobody.chains(*names_of(recipe)) == []
        assert nobody.get(f"/v2/{FULL}/manifests/1").status == 404
        World(url, tmp_path, dict.fromkeys(("operator", "ours", "theirs"), "")).prepare(nobody, recipe)
        assert len(nobody.chains(*names_of(recipe))) == 1


def test_what_a_tenant_has_used_outlives_the_server_but_not_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "cache"))
    compose(tmp_path / "layout", b"first")
    with Tokens(tmp_path / "state/server.sqlite") as tokens:
        secrets = {name: tokens.create(name) for name in ("operator", "ours", "theirs")}
    recipe = command("once")
    with serving(tmp_path / "state") as url:
        world = World(url, tmp_path, secrets)
        world.prepare(world.ours, recipe)
        known = everything(world.ours, recipe)
    with serving(tmp_path / "state") as url:
        world = World(url, tmp_path, secrets)
        assert everything(world.ours, recipe) == known
        assert sees_nothing(world.theirs, known)
        compose(tmp_path / "other", b"second")
        assert world.ours.chains(*known["names"]) == []
        assert len(world.operator.chains(*known["names"])) >= 1


# --- Clients that take up the server's time and room ------------------------------------------------------


def test_transfers_of_a_tenant_are_limited(world: World) -> None:
    recipe = Recipe(None, (Stage("setup", commands=("head -c 12000000 /dev/urandom > noise",)),))
    world.prepare(world.ours, recipe)
    (key,) = [layer["key"] for layer in world.ours.chains(*names_of(recipe))[0]["layers"]]
    blobs = world.ours.artifact(key).json["layers"]
    largest = max(blobs, key=lambda blob: blob["size"])
    path = f"/v2/dutyfree/layers/blobs/{largest['digest']}"
    host, _, port = world.host.rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(TRANSFERS_MAX):
            reader = stack.enter_context(socket.socket())
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.settimeout(60)
            reader.connect((host, int(port)))
            request = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {world.ours.token}\r\n\r\n"
            reader.sendall(request.encode())
            assert b"200 OK" in reader.recv(100)
        refused = world.ours.get(path)
        assert (refused.status, refused.code) == (429, "TOOMANYREQUESTS")
        assert int(refused.headers["retry-after"]) > 0
        assert world.operator.get(path).status == 200  # others are not disturbed
        assert world.ours.get("/v1/sandboxes").status == 200
    assert eventually(lambda: world.ours.get(path).status == 200)  # after the clients have gone


# --- Between machines -----------------------------------------------------------------------------------


def test_layers_come_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, chain, key = certificates(tmp_path)
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "here"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    recipe = Recipe(stages=(Stage("setup", commands=("sleep 0.3; date +%N > stamp",)),))

    async def served(*peers: str) -> tuple[str, bytes]:
        async with open_native(peers=peers) as native, native.sandbox(recipe) as sandbox:
            return sandbox.served.kind, await sandbox.read("stamp")

    _, stamp = anyio.run(served)
    with Tokens(tmp_path / "state/server.sqlite") as tokens:
        monkeypatch.setenv("DUTYFREE_PEER_TOKEN", tokens.create("operator"))
        stranger = tokens.create("stranger")
    tls = ("--certificate", str(chain), "--key", str(key))
    with serving(tmp_path / "state", *tls) as url:
        assert url.startswith("https://")
        # An attacker between the machines has no certificate that this one trusts.
        monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "there"))
        with pytest.raises(CreateError, match="certificate verify failed"):
            layers.bring(url, [recipe])
        monkeypatch.setenv("SSL_CERT_FILE", str(root))

        monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "third"))
        with monkeypatch.context() as patch:
            patch.setenv("DUTYFREE_PEER_TOKEN", stranger)
            with pytest.raises(UsageError, match="there are no layers"):
                layers.bring(url, [recipe])
        assert anyio.run(served, url) == ("fetched", stamp)


def test_a_hosted_client_gets_no_layers_of_another_by_its_name(world: World) -> None:
    """Snapshots in memory have names that can be guessed."""
    for image in ("snapshot:kept", "snapshot:#1-1"):
        with pytest.raises(RecipeError, match="there is no snapshot"):
            world.prepare(world.theirs, Recipe(image, (Stage("setup", commands=("true",)),)))
