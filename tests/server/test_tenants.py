"""What a tenant of a server cannot do, although the engine could: reach the host, or see other tenants."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import http.server
import io
import json
import os
import struct
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dutyfree.contract import Exec
from dutyfree.contract.errors import ArgumentError, Exhausted, LimitError, RecipeError, UsageError
from dutyfree.engine.launcher.isolation import FULL_ISOLATION
from dutyfree.server import files, json_form, swerex, tenant_rules
from dutyfree.server.admission import TenantLimits
from dutyfree.server.bodies import LARGEST_REQUEST, ByteBudget
from dutyfree.server.tokens import Tokens
from dutyfree.substrates.native import NativeConfig
from tests.serving import serving


class Tenant:
    """A client with a token that knows only HTTP and JSON."""

    def __init__(self, url: str, token: str) -> None:
        self._address = url.removeprefix("http://")
        self._headers = {"Authorization": f"Bearer {token}"}

    def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self._address, timeout=120)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, {**self._headers, **headers})
        answer = connection.getresponse()
        found = answer.read()
        connection.close()
        return answer.status, json.loads(found) if found else None


class Two(NamedTuple):
    url: str
    one: Tenant
    other: Tenant


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    state = tmp_path_factory.mktemp("state")
    with Tokens(state / "server.sqlite") as tokens:
        secrets = [tokens.create(name) for name in ("one", "other")]
    with serving(state) as url:
        yield Two(url, Tenant(url, secrets[0]), Tenant(url, secrets[1]))


@pytest.fixture
def loopback_service() -> Iterator[int]:
    """The port of a service on the host's loopback, which trusts whoever connects."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"a secret of the host")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


FETCH = (
    "import urllib.request; "
    "print(urllib.request.urlopen('http://169.254.1.2:{port}', timeout=3).read().decode())"
)


# --- The host ---------------------------------------------------------------------------------------


@pytest.mark.native
@pytest.mark.root("only root gives sandboxes networks of their own")
def test_no_sandbox_of_a_tenant_reaches_the_hosts_loopback(two: Two, loopback_service: int) -> None:
    status, made = two.one("POST", "/v1/sandboxes", {"limits": {"network": "on"}})
    assert status == 201
    command = ["python3", "-c", FETCH.format(port=loopback_service)]
    status, seen = two.one("POST", f"/v1/sandboxes/{made['id']}/exec", {"command": command})
    assert (status, seen["exit_code"]) == (200, 1)
    assert "secret" not in seen["stdout"]
    for policy in (["host"], [f"host:{loopback_service}"], ["example.org", "host:1"]):
        status, error = two.one("POST", "/v1/sandboxes", {"limits": {"network": policy}})
        assert (status, error["error"]["code"]) == (400, "limit"), policy
        status, error = two.one("POST", f"/v1/sandboxes/{made['id']}/set_network", {"policy": policy})
        assert (status, error["error"]["code"]) == (400, "limit"), policy
    two.one("POST", f"/v1/sandboxes/{made['id']}/set_network", {"policy": "on"})
    _, seen = two.one("POST", f"/v1/sandboxes/{made['id']}/exec", {"command": command})
    assert "secret" not in seen["stdout"]


@pytest.mark.native
@pytest.mark.root("only root gives sandboxes networks of their own")
def test_a_local_client_reaches_it_as_its_user_does(tmp_path: Path, loopback_service: int) -> None:
    """So the tests above can fail."""
    with serving(tmp_path) as url:
        client = Tenant(url, "")
        _, made = client("POST", "/v1/sandboxes", {"limits": {"network": "on"}})
        command = ["python3", "-c", FETCH.format(port=loopback_service)]
        _, seen = client("POST", f"/v1/sandboxes/{made['id']}/exec", {"command": command})
        assert "a secret of the host" in seen["stdout"]


@pytest.mark.native
@pytest.mark.root("only root gives sandboxes networks of their own")
def test_it_is_opened_only_for_a_local_client_who_says_so(tmp_path: Path, loopback_service: int) -> None:
    """Code in a sandbox would use the server as its user does: it has no token."""
    command = ["python3", "-c", FETCH.format(port=loopback_service)]
    with serving(tmp_path) as url:
        client = Tenant(url, "")

        def reaches(sandbox: str) -> bool:
            _, seen = client("POST", f"/v1/sandboxes/{sandbox}/exec", {"command": command})
            return "a secret of the host" in seen["stdout"]

        for network, expected in ((None, False), ({"allowOut": ["host"]}, True)):
            status, made = client("POST", "/v2/sandboxes", {"templateID": "base", "network": network})
            assert (status, reaches(made["sandboxID"])) == (201, expected), network
        assert client("PUT", f"/sandboxes/{made['sandboxID']}/network", {})[0] == 204
        assert not reaches(made["sandboxID"])
        stage = {"kind": "setup", "commands": [command]}
        _, error = client("POST", "/v1/sandboxes", {"recipe": {"stages": [stage]}})
        assert error["error"]["code"] == "stage"
        assert "secret" not in error["error"]["message"]


def test_what_is_open_by_itself_where_it_cannot_be_filtered() -> None:
    assert tenant_rules.without_host(FULL_ISOLATION, networked=False) == "off"
    assert tenant_rules.without_host(NativeConfig(isolation="none").walls, networked=False) == "on"


@pytest.mark.native
@pytest.mark.root("only root gives sandboxes networks of their own")
def test_no_stage_of_a_tenant_reaches_the_hosts_loopback(two: Two, loopback_service: int) -> None:
    stage = {"kind": "setup", "commands": [["python3", "-c", FETCH.format(port=loopback_service)]]}
    status, error = two.one("POST", "/v1/sandboxes", {"recipe": {"stages": [stage]}})
    assert status >= 400
    assert error["error"]["code"] == "stage"
    assert "secret" not in error["error"]["message"]


@pytest.mark.parametrize(
    "image",
    [
        "127.0.0.1:5000/image",
        "localhost/image",
        "10.0.0.1/image",
        "169.254.169.254/latest/meta-data",
        "[::1]:5000/image",
        "registry:5000/image",
        "vault.internal/image",
        "127.1:5000/image",
        "0x7f.1:5000/image",
    ],
)
def test_registries_inside_the_servers_network_are_not_for_tenants(image: str) -> None:
    with pytest.raises(RecipeError, match="inside"):
        tenant_rules.check_image("one", image, known_registries=())
    registry = image.partition("/")[0]
    tenant_rules.check_image("one", image, known_registries=(registry,))
    tenant_rules.check_image(tenant_rules.LOCAL, image, known_registries=())


@pytest.mark.parametrize("image", ["debian:12", "ghcr.io/team/image:tag", "host", "8.8.8.8:5000/image"])
def test_public_images_are(image: str) -> None:
    tenant_rules.check_image("one", image, known_registries=())


def test_without_networks_of_their_own_tenants_get_none() -> None:
    with pytest.raises(LimitError, match="no network"):
        tenant_rules.allowed_network("one", "on", networked=False)
    assert tenant_rules.allowed_network("one", "off", networked=False) == "off"


@pytest.mark.native
def test_what_would_fill_the_servers_memory_is_refused(two: Two) -> None:
    status, error = two.one("POST", "/v1/sandboxes", {"limits": {"output": 1 << 31}})
    assert (status, error["error"]["code"]) == (400, "limit")
    status, error = two.one("POST", "/v1/sandboxes", {"labels": {"a": "x" * 100_000}})
    assert (status, error["error"]["code"]) == (400, "usage")
    status, error = two.one("POST", "/v1/sandboxes", {}, **{"Idempotency-Key": "x" * 1000})
    assert (status, error["error"]["code"]) == (400, "usage")
    _, made = two.one("POST", "/v1/sandboxes", {})
    path = f"/v1/sandboxes/{made['id']}"
    two.one("POST", f"{path}/exec", {"command": f"truncate -s {LARGEST_REQUEST + 1} /workspace/sparse"})
    status, error = two.one("GET", f"{path}/files?path=sparse")
    assert (status, error["error"]["kind"]) == (422, "too_large")
    status, error = two.one("POST", f"{path}/batch", {"actions": [{"type": "list", "path": "."}] * 5000})
    assert (status, error["error"]["code"]) == (400, "usage")


@pytest.mark.native
def test_bombs_are_not_unpacked(two: Two) -> None:
    bomb = gzip.compress(bytes(LARGEST_REQUEST + 1), 1)
    _, made = two.one("POST", "/sandboxes", {"templateID": "base"})
    access = {"e2b-sandbox-id": made["sandboxID"], "x-access-token": made["envdAccessToken"]}
    headers = {**access, "content-encoding": "gzip", "content-type": "application/octet-stream"}
    status, error = two.one("POST", "/files?path=/workspace/x", bomb, **headers)
    assert status == 400
    assert "more than" in error["message"]
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(LARGEST_REQUEST + 1))
    boundary = "frontier"
    parts = {"target_path": b"/workspace", "unzip": b"true"}
    form = b"".join(
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode() + value + b"\r\n"
        for name, value in parts.items()
    )
    form += f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="x.zip"\r\n\r\n'.encode()
    form += packed.getvalue() + f"\r\n--{boundary}--\r\n".encode()
    kind = {"content-type": f"multipart/form-data; boundary={boundary}"}
    status, error = two.one("POST", "/swerex/bomb/upload", form, **kind)
    assert status == 511
    assert "more than" in error["swerexception"]["message"]


def zipped(content: bytes, compression: int) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", compression) as archive:
        archive.writestr("file", content)
    return packed.getvalue()


def test_archives_are_unpacked_within_a_bound() -> None:
    good = zipped(bytes(1 << 20), zipfile.ZIP_DEFLATED)
    archive = swerex._archive(good)
    assert swerex._content(archive, archive.infolist()[0]) == bytes(1 << 20)
    with pytest.raises(swerex.SwerexError, match="deflate"):  # it would be unpacked at once
        swerex._archive(zipped(b"x", zipfile.ZIP_BZIP2))
    with pytest.raises(swerex.SwerexError, match="members"):
        swerex._archive(swerex._MEMBER * (swerex.MOST_MEMBERS + 1))
    entry = good.index(swerex._MEMBER)
    archive = swerex._archive(good[: entry + 24] + (10).to_bytes(4, "little") + good[entry + 28 :])
    with pytest.raises(swerex.SwerexError, match="not valid"):  # it says that it has 10 bytes
        swerex._content(archive, archive.infolist()[0])


def unpacked(data: bytes) -> list[bytes]:
    with contextlib.closing(swerex._archive(data)) as archive:
        return [swerex._content(archive, member) for member in archive.infolist()]


def changed(data: bytes, at: int, part: bytes) -> bytes:
    return data[:at] + part + data[at + len(part) :]


def bad_archives() -> dict[str, bytes]:
    """For each, zipfile has an error of another kind."""
    good = zipped(b"content", zipfile.ZIP_STORED)
    entry, end = good.index(swerex._MEMBER), good.index(b"PK\x05\x06")
    utf8 = b"\x00\x08"  # says that the name is UTF-8
    offset = struct.pack("<HHQ", 1, 8, 1 << 63)  # that of the member, in 64 bits
    large = changed(good, entry + 42, b"\xff" * 4)
    large = changed(large, entry + 30, struct.pack("<H", len(offset)))
    large = changed(large, end + 12, struct.pack("<I", end - entry + len(offset)))
    return {
        "no archive": b"content",
        "name in the directory": changed(changed(good, entry + 8, utf8), entry + 46, b"\xff"),
        "name of the member": changed(changed(good, 6, utf8), 30, b"\xff"),
        "offset above 2^63": large[:end] + offset + large[end:],
        "offset below 0": changed(good, end + 16, b"\xff" * 4),
    }


@pytest.mark.parametrize("name", bad_archives())
def test_an_archive_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(swerex.SwerexError, match="not valid"):
        unpacked(bad_archives()[name])


@given(st.data())
def test_an_archive_is_unpacked_or_refused(data: st.DataObject) -> None:
    archive = zipped(b"content", data.draw(st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(archive) - 1))
        archive = changed(archive, at, data.draw(st.binary(min_size=1, max_size=8)))
    with contextlib.suppress(swerex.SwerexError):
        unpacked(archive)


def test_a_few_bytes_of_json_do_not_become_many_objects() -> None:
    many = b'{"command": [' + b"{}," * (3 << 20) + b"{}]}"
    with pytest.raises(ArgumentError, match="more than 2097152 values"):
        json_form.load(many, Exec)
    large = b'{"command": "cat", "stdin": {"base64": "' + b"AAAA" * (3 << 20) + b'"}}'
    assert json_form.load(large, Exec).stdin == bytes(9 << 20)


@pytest.mark.native
def test_a_swerex_name_can_be_used_again(two: Two) -> None:
    assert two.one("GET", "/swerex/again/is_alive")[0] == 200
    assert two.one("POST", "/swerex/again/close", {})[0] == 200
    assert two.one("GET", "/swerex/another/is_alive")[0] == 200  # from here on, the first one is forgotten
    assert two.one("GET", "/swerex/again/is_alive")[0] == 200


# --- Other tenants ----------------------------------------------------------------------------------


@pytest.mark.native
def test_a_sandbox_of_another_tenant_is_as_one_that_never_was(two: Two) -> None:
    """The same answers, to the letter, apart from the id."""
    _, made = two.one("POST", "/v1/sandboxes", {}, **{"Idempotency-Key": "same"})
    never = "sb-" + "0" * 16
    for method, rest, body in [
        ("GET", "", None),
        ("DELETE", "", None),
        ("POST", "/exec", {"command": "id"}),
        ("POST", "/fork", {"key": "k", "count": 1}),
        ("POST", "/set_network", {"policy": "off"}),
        ("GET", "/files?path=x", None),
    ]:
        theirs = two.other(method, f"/v1/sandboxes/{made['id']}{rest}", body)
        nobodys = two.other(method, f"/v1/sandboxes/{never}{rest}", body)
        assert theirs[0] == nobodys[0] == 404
        assert json.dumps(theirs[1]).replace(made["id"], never) == json.dumps(nobodys[1])
    status, gone = two.other("POST", "/v1/keep_alive", {"sandboxes": [made["id"]], "lease": 1})
    assert (status, gone) == (200, [made["id"]])
    status, mine = two.other("POST", "/v1/sandboxes", {"lease": 5}, **{"Idempotency-Key": "same"})
    assert status == 201
    assert mine["id"] != made["id"]
    assert all(one["id"] != made["id"] for one in two.other("GET", "/v1/sandboxes")[1]["sandboxes"])


@pytest.mark.native
def test_one_tenant_in_a_queue_keeps_no_other_waiting(two: Two) -> None:
    """SWE-ReX creates sandboxes at the first request: each name on its own."""
    results: dict[str, int] = {}

    def ask(tenant: Tenant, name: str) -> None:
        results[name] = tenant("GET", f"/swerex/{name}/is_alive")[0]

    threads = [
        threading.Thread(target=ask, args=(tenant, name))
        for tenant, name in ((two.one, "first"), (two.other, "second"), (two.one, "third"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"first": 200, "second": 200, "third": 200}


# --- Browsers ---------------------------------------------------------------------------------------


@pytest.mark.native
def test_a_name_that_leads_to_the_loopback_is_refused_without_a_token(tmp_path: Path) -> None:
    """DNS rebinding: the page of a site whose name now has this machine's address."""
    with serving(tmp_path) as url:
        client = Tenant(url, "")
        port = url.rpartition(":")[2]
        foreign = {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"}
        assert client("GET", "/v1/sandboxes", **foreign)[0] == 403
        assert client("GET", "/v1/sandboxes", **{"Sec-Fetch-Site": "cross-site"})[0] == 403
        for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
            assert client("GET", "/v1/sandboxes", Host=host)[0] == 200


@pytest.mark.native
def test_the_first_token_closes_a_running_server(tmp_path: Path) -> None:
    with serving(tmp_path) as url:
        with Tokens(tmp_path / "server.sqlite") as tokens:
            secret = tokens.create("trainer")
            tokens.create("other")
        client = Tenant(url, "")
        for _ in range(2000):
            if client("GET", "/v1/sandboxes")[0] == 401:
                break
        else:
            pytest.fail("a client without a token is let in")
        assert Tenant(url, secret)("GET", "/v1/sandboxes")[0] == 200


# --- The server's disk and memory -------------------------------------------------------------------


def test_the_files_of_a_tenant_are_bounded(tmp_path: Path) -> None:
    kept = files.TenantFiles(tmp_path, most=3 * 4096)
    home = tmp_path / "one"
    home.mkdir()
    for number in range(4):
        tree = home / f"{number:064x}"
        tree.write_bytes(b"x")
    with pytest.raises(Exhausted, match="may take"):  # all were used just now
        kept._make_room(home)
    oldest = home / f"{2:064x}"
    os.utime(oldest, (0, 0))
    kept._make_room(home)
    assert not oldest.exists()
    assert len(list(home.iterdir())) == 3


def test_no_client_takes_all_of_the_memory_for_requests() -> None:
    budget = ByteBudget(100)
    budget.take("one", 50)
    with pytest.raises(Exhausted):
        budget.take("one", 1)
    budget.take("other", 50)
    with pytest.raises(Exhausted):
        budget.take("third", 1)
    budget.give_back("one", 50)
    budget.take("third", 50)


# --- The name of callers without a token ------------------------------------------------------------


def test_the_name_of_callers_without_a_token_is_reserved(tmp_path: Path) -> None:
    with Tokens(tmp_path / "server.sqlite") as tokens:
        with pytest.raises(UsageError, match="'local' is reserved"):
            tokens.create("local")
        with pytest.raises(UsageError, match="'local' is reserved"):
            tokens.set_limits("local", TenantLimits(1))


@pytest.mark.native
def test_a_token_of_that_name_is_refused(tmp_path: Path) -> None:
    """It was created when the name was free. It would be the operator, and reach the host's loopback."""
    with Tokens(tmp_path / "server.sqlite") as tokens:
        secret = tokens.create("localx")
        tokens._database.execute("UPDATE tokens SET tenant = 'local'")
    with serving(tmp_path) as url:
        client = Tenant(url, secret)
        for method, path in (("POST", "/v1/sandboxes"), ("GET", "/metrics"), ("GET", "/v1/layers")):
            status, found = client(method, path, {} if method == "POST" else None)
            assert (status, found["error"]["code"]) == (403, "forbidden"), path
            assert "callers without a token" in found["error"]["message"]
