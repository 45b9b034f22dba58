"""The server over plain HTTP, as curl uses it, and from an attacker's side."""

from __future__ import annotations

import http.client
import json
import re
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from dutyfree.server.admission import TenantLimits
from dutyfree.server.tokens import Tokens
from tests.processes import eventually, ran
from tests.serving import serving

pytestmark = pytest.mark.native


class Client:
    """A client that knows only HTTP and JSON."""

    def __init__(self, url: str, token: str = "") -> None:
        self.address = urlsplit(url).netloc
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}

    def raw(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.address, timeout=60)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, {**self.headers, **headers})
        answer = connection.getresponse()
        found = answer.status, answer.read()
        connection.close()
        return found

    def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        status, data = self.raw(method, path, body, **headers)
        return status, json.loads(data) if data else None


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("state")) as found:
        yield found


@pytest.fixture
def client(url: str) -> Client:
    return Client(url)


@pytest.fixture
def sandbox(client: Client) -> Iterator[str]:
    status, made = client("POST", "/v1/sandboxes", {})
    assert status == 201
    yield f"/v1/sandboxes/{made['id']}"
    client("DELETE", f"/v1/sandboxes/{made['id']}")


def test_curl_creates_runs_and_removes(client: Client) -> None:
    status, made = client("POST", "/v1/sandboxes", {"labels": {"run": "7"}, "lease": 60})
    assert (status, made["labels"], made["workdir"]) == (201, {"run": "7"}, "/workspace")
    path = f"/v1/sandboxes/{made['id']}"
    status, seen = client("POST", f"{path}/exec", {"command": "cat; echo oops >&2; exit 3", "stdin": "in"})
    assert (status, seen["exit_code"], seen["stdout"], seen["stderr"]) == (200, 3, "in", "oops\n")
    assert client("GET", path)[1]["id"] == made["id"]
    assert made["id"] in [one["id"] for one in client("GET", "/v1/sandboxes")[1]["sandboxes"]]
    assert client("DELETE", path) == (204, None)
    status, refused = client("POST", f"{path}/exec", {"command": "true"})
    assert (status, refused["error"]["code"]) == (404, "sandbox_closed")


def test_files(client: Client, sandbox: str) -> None:
    data = bytes(range(256))
    assert client.raw("PUT", f"{sandbox}/files?path=a/b&mode=600", data) == (204, b"")
    assert client.raw("GET", f"{sandbox}/files?path=a/b") == (200, data)
    status, listed = client("POST", f"{sandbox}/list", {"path": "a"})
    assert (status, listed) == (200, [{"name": "b", "kind": "file", "size": 256, "mode": 0o600}])
    status, failed = client("GET", f"{sandbox}/files?path=none")
    assert (status, failed["error"]["code"], failed["error"]["verdict"]) == (404, "path_not_found", "task")


def test_bytes_that_are_no_text_are_base64(client: Client, sandbox: str) -> None:
    body = {"command": "cat", "stdin": {"base64": "/wA="}}
    assert client("POST", f"{sandbox}/exec", body)[1]["stdout"] == {"base64": "/wA="}


def test_msgpack_carries_bytes(client: Client, sandbox: str) -> None:
    body = msgspec.msgpack.encode({"type": "exec", "command": "cat", "stdin": b"\xff\0"})
    headers = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
    status, data = client.raw("POST", f"{sandbox}/exec", body, **headers)
    assert (status, msgspec.msgpack.decode(data)["stdout"]) == (200, b"\xff\0")


def test_a_batch_is_one_request(client: Client, sandbox: str) -> None:
    actions = [
        {"type": "write", "path": "f", "data": "one"},
        {"type": "edit", "path": "f", "old": "one", "new": "two"},
        {"type": "read", "path": "f"},
        {"type": "exec", "command": "false"},
        {"type": "read", "path": "f"},
    ]
    status, results = client("POST", f"{sandbox}/batch", {"actions": actions})
    assert status == 200
    assert [list(one) for one in results] == [[], [], ["data"], ["observation"]]
    assert results[2]["data"] == "two"


def test_the_same_key_gives_the_same_sandbox(client: Client) -> None:
    key = {"Idempotency-Key": "k1"}
    first, second = (client("POST", "/v1/sandboxes", {}, **key)[1] for _ in range(2))
    assert first["id"] == second["id"]
    status, other = client("POST", "/v1/sandboxes", {"lease": 5}, **key)
    assert (status, other["error"]["code"]) == (400, "usage")
    client("DELETE", f"/v1/sandboxes/{first['id']}")
    status, ended = client("POST", "/v1/sandboxes", {}, **key)
    assert (status, ended["error"]["code"]) == (503, "lease_ended")


def test_a_lease_ends(client: Client) -> None:
    made = client("POST", "/v1/sandboxes", {"lease": 0.5})[1]
    path = f"/v1/sandboxes/{made['id']}"
    assert eventually(lambda: client("GET", path)[0] == 404)


def test_a_lease_is_kept_alive(client: Client) -> None:
    made = client("POST", "/v1/sandboxes", {"lease": 2})[1]
    kept = client("POST", "/v1/keep_alive", {"sandboxes": [made["id"], "sb-none"], "lease": 3600})
    assert kept == (200, ["sb-none"])
    assert client("GET", f"/v1/sandboxes/{made['id']}")[1]["expires"] > made["expires"] + 3000
    client("DELETE", f"/v1/sandboxes/{made['id']}")


def test_a_client_that_goes_away_stops_its_command(client: Client, sandbox: str) -> None:
    with _asking(client, f"{sandbox}/exec", {"command": "echo $$ > pid; sleep 1000"}):
        assert eventually(lambda: client.raw("GET", f"{sandbox}/files?path=pid")[0] == 200)
    alive = {"command": "kill -0 $(cat pid)"}
    assert eventually(lambda: client("POST", f"{sandbox}/exec", alive)[1]["exit_code"] != 0)


def test_a_client_that_goes_away_after_a_large_body_stops_its_command(client: Client, sandbox: str) -> None:
    """Above 64 KiB uvicorn reads no further until it is asked to, and so would not see the end."""
    wanted = {"command": "echo $$ > pid; sleep 1000", "stdin": "x" * (200 << 10)}
    with _asking(client, f"{sandbox}/exec", wanted):
        assert eventually(lambda: client.raw("GET", f"{sandbox}/files?path=pid")[0] == 200)
    alive = {"command": "kill -0 $(cat pid)"}
    assert eventually(lambda: client("POST", f"{sandbox}/exec", alive)[1]["exit_code"] != 0)


def test_a_client_that_goes_away_at_once_leaves_no_command(client: Client, sandbox: str) -> None:
    for _ in range(20):
        with _asking(client, f"{sandbox}/exec", {"command": "sleep 1000"}):
            pass
    looking = {"command": ["pgrep", "sleep"]}
    assert eventually(lambda: client("POST", f"{sandbox}/exec", looking)[1]["exit_code"] == 1)


@contextmanager
def _asking(client: Client, path: str, body: Any) -> Iterator[None]:
    """Send a request, and close the connection at the end, without an answer."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(tuple(client.address.split(":"))) as raw:  # type: ignore[arg-type]
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.sendall(head.encode())
        raw.sendall(data)
        yield


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("exec", b"{", "argument"),
        ("exec", b'{"command": 5}', "argument"),
        ("exec", b"[]", "argument"),
        ("exec", b'{"command": "true", "stdin": {"base64": "*"}}', "argument"),
        ("search", b'{"text": "("  , "regex": true}', "request"),
        ("attach", b'{"process": "none"}', "unknown_process"),
    ],
)
def test_wrong_bodies_are_explained(client: Client, sandbox: str, path: str, body: bytes, code: str) -> None:
    status, answer = client("POST", f"{sandbox}/{path}", body)
    assert 400 <= status < 500
    assert answer["error"]["code"] == code


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/sandboxes", b'{"x": ' + DEEP + b"}"),
        ("/run_code", b'{"code": ' + DEEP + b"}"),
        ("/sandboxes", b'{"metadata": ' + DEEP + b"}"),
        ("/swerex/deep/execute", b'{"command": ' + DEEP + b"}"),
        ("/v1/facts", b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"),
        ("/v1/missing", b"\x81\xa7digests" + b"\x91" * 100_000 + b"\xc0"),  # it is decoded twice
    ],
)
def test_what_is_nested_too_deeply_is_the_clients_mistake(client: Client, path: str, body: bytes) -> None:
    kind = "application/json" if body.startswith(b"{") else "application/msgpack"
    status, answer = client.raw("POST", path, body, **{"Content-Type": kind})
    assert status in (400, 422, 511), answer
    assert b"RecursionError" not in answer


@pytest.mark.parametrize("image", ["@layer", "localhost.:80/x", "[::ffff:127.0.0.1]:80/x", "Upper/Case"])
def test_what_names_no_image_is_the_clients_mistake(client: Client, image: str) -> None:
    """A client that trusts the answer would try it again for ever."""
    status, answer = client("POST", "/v1/sandboxes", {"image": image})
    assert (status, answer["error"]["code"], answer["error"]["retryable"]) == (400, "recipe", False)


def test_a_wrong_choice_is_answered_with_the_right_ones(client: Client) -> None:
    status, answer = client("POST", "/v1/sandboxes", {"limits": {"network": "maybe"}})
    assert status == 400
    assert "network must be 'off' or 'on' or a list" in answer["error"]["message"]


def test_a_large_number_is_shown_as_it_was_given(client: Client) -> None:
    status, answer = client("POST", "/v1/sandboxes", {"lease": 99999999})
    assert (status, answer["error"]["code"]) == (400, "limit")
    assert answer["error"]["message"].endswith("≤ 604800 seconds, not 99999999")


def test_no_patience_is_refused(client: Client) -> None:
    status, answer = client("POST", "/v1/sandboxes", {"patience": -1})
    assert (status, answer["error"]["code"]) == (400, "limit")


@pytest.mark.parametrize(
    "image", ["/etc", "./x", "~root", "oci:/etc", "docker-daemon:x", "snapshot:secret", "snapshot:#1-1"]
)
def test_no_image_is_a_file_of_the_host(client: Client, image: str) -> None:
    status, answer = client("POST", "/v1/sandboxes", {"image": image})
    assert (status, answer["error"]["code"]) == (400, "recipe")


def test_no_stage_names_a_file_of_the_host(client: Client) -> None:
    for digest in ("../../etc", "0" * 64):
        recipe = {"stages": [{"kind": "files", "files": {"x": digest}}]}
        status, answer = client("POST", "/v1/sandboxes", {"recipe": recipe})
        assert (status, answer["error"]["code"]) == (400, "recipe")


def test_the_openapi_document_names_what_is_served(client: Client, sandbox: str) -> None:
    status, document = client("GET", "/v1/openapi.json")
    assert (status, document["openapi"]) == (200, "3.1.0")
    assert "post" in document["paths"]["/v1/sandboxes/{sandbox}/exec"]
    references = set(re.findall(r"#/components/schemas/([^\"]+)", json.dumps(document)))
    assert references <= set(document["components"]["schemas"])
    for path, operations in document["paths"].items():
        for verb in operations.keys() & {"get", "post"}:
            there = path.replace("/v1/sandboxes/{sandbox}", sandbox)
            assert client.raw(verb.upper(), there, b"")[0] not in (404, 405, 500), (verb, path)


def test_pages_of_other_sites_are_refused(client: Client) -> None:
    status, answer = client("POST", "/v1/sandboxes", {}, Origin="http://evil.example")
    assert (status, answer["error"]["code"]) == (403, "forbidden")


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:7800", "127.0.0.1.evil.example", "[", "169.254.1.2:7800", "10.0.0.1"],
)
def test_names_of_other_sites_are_refused(client: Client, host: str) -> None:
    """A site can let its own name point to 127.0.0.1 after a browser has loaded its page."""
    own = {"Host": host, "Origin": f"http://{host}"}
    assert client("POST", "/v1/sandboxes", {}, **own)[0] in (400, 403)
    assert client("GET", "/v1/sandboxes", Host=host)[0] in (400, 403)


@pytest.mark.parametrize("host", ["localhost:7800", "127.0.0.1", "[::1]:80", "node7", "x.localhost"])
def test_names_of_this_machine_are_not(client: Client, host: str) -> None:
    assert client("GET", "/v1/sandboxes", Host=host)[0] == 200


def test_no_listening_beyond_the_loopback_without_a_token(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dutyfree", "serve", "--listen", "0.0.0.0:0", "--state", str(tmp_path)]
    done = ran(command)
    assert done.returncode == 2
    assert "there is no token" in done.stderr
    assert "dutyfree token create" in done.stderr


def test_a_certificate_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    files = ("--certificate", str(tmp_path / "no.pem"), "--key", str(tmp_path / "no.key"))
    command = ("serve", "--listen", "127.0.0.1:0", "--state", str(tmp_path), *files)
    done = ran([sys.executable, "-m", "dutyfree", *command])
    assert done.returncode == 2
    assert "no.key: No such file or directory" in done.stderr


def test_unknown_paths_are_explained(client: Client) -> None:
    for verb, path, status in (("POST", "/v1/sandbox", 404), ("PUT", "/v1/sandboxes", 405)):
        got, answer = client(verb, path, {})
        assert (got, answer["error"]["code"]) == (status, "not_found")


def test_tokens_separate_tenants(tmp_path: Path) -> None:
    def token(*arguments: str) -> str:
        command = [sys.executable, "-m", "dutyfree", "token", *arguments, "--state", str(tmp_path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    ours, theirs = token("create", "ours"), token("create", "theirs")
    stored = sqlite3.connect(tmp_path / "server.sqlite").execute("SELECT * FROM tokens").fetchall()
    assert ours.removeprefix("dutyfree_") not in repr(stored)
    with serving(tmp_path) as url:
        assert Client(url)("POST", "/v1/sandboxes", {})[0] == 401
        assert Client(url, "dutyfree_wrong")("POST", "/v1/sandboxes", {})[0] == 401
        mine, other = Client(url, ours), Client(url, theirs)
        made = mine("POST", "/v1/sandboxes", {})[1]
        path = f"/v1/sandboxes/{made['id']}"
        assert other("GET", path)[0] == 404
        assert other("POST", f"{path}/exec", {"command": "true"})[0] == 404
        assert other("DELETE", path)[0] == 404
        assert other("GET", "/v1/sandboxes")[1]["sandboxes"] == []
        kept = mine("POST", f"{path}/snapshot", {})[1]
        assert other("POST", "/v1/sandboxes", {"image": kept["image"]})[0] == 400
        assert mine("POST", "/v1/sandboxes", {"image": kept["image"]})[0] == 201
        identity = next(line.split()[0] for line in token("ls").splitlines() if "ours" in line)
        token("revoke", identity)
        assert eventually(lambda: mine("GET", "/v1/sandboxes")[0] == 401)
        assert other("GET", "/v1/sandboxes")[0] == 200


def run_code(client: Client, **request: Any) -> dict[str, Any]:
    status, answer = client("POST", "/run_code", request)
    assert status == 200
    return dict(answer)


def test_code_runs_as_with_sandbox_fusion(client: Client) -> None:
    good = run_code(client, code="print(input() + '!')", language="python", stdin="hi")
    assert (good["status"], good["run_result"]["stdout"], good["run_result"]["return_code"]) == (
        "Success",
        "hi!\n",
        0,
    )
    bad = run_code(client, code="exit 3", language="bash")
    assert (bad["status"], bad["run_result"]["return_code"]) == ("Failed", 3)
    slow = run_code(client, code="sleep 100", language="bash", run_timeout=0.5)
    assert (slow["status"], slow["run_result"]["status"]) == ("Failed", "TimeLimitExceeded")
    source = '#include <cstdio>\nint main() { puts("compiled"); }'
    built = run_code(client, code=source, language="cpp", compile_timeout=60)
    assert built["compile_result"]["return_code"] in (0, 127), built
    if built["compile_result"]["return_code"] == 0:
        assert built["run_result"]["stdout"] == "compiled\n"
    broken = run_code(client, code="int main( {", language="cpp", compile_timeout=60)
    assert (broken["status"], broken["run_result"]) == ("Failed", None)
    files = run_code(
        client,
        code="open('out', 'w').write(open('in').read() * 2)",
        language="python",
        files={"in": "YWI="},
        fetch_files=["out", "none"],
    )
    assert files["files"] == {"out": "YWJhYg=="}
    large = "open('large', 'wb').truncate(40 << 20)"
    one = run_code(client, code=large, language="python", fetch_files=["large"])
    assert len(one["files"]["large"]) > 40 << 20
    names = ["large", "./large"]
    assert run_code(client, code=large, language="python", fetch_files=names)["status"] == "SandboxError"
    assert run_code(client, code="", language="cobol")["status"] == "SandboxError"


def test_the_operator_sees_metrics_and_tenants_do_not(client: Client, sandbox: str, tmp_path: Path) -> None:
    client("POST", f"{sandbox}/exec", {"command": "true"})
    client("POST", f"{sandbox}/attach", {"process": "none"})
    status, text = client.raw("GET", "/metrics")
    assert status == 200
    assert b'dutyfree_calls_total{call="exec",outcome="ok"}' in text
    assert b'dutyfree_calls_total{call="attach",outcome="program"}' in text
    assert b'dutyfree_sandboxes{tenant="local"}' in text
    with Tokens(tmp_path / "server.sqlite") as tokens:
        tenant, operator = tokens.create("someone"), tokens.create("operator")
    with serving(tmp_path) as url:
        assert Client(url, tenant).raw("GET", "/metrics")[0] == 403
        assert Client(url, operator).raw("GET", "/metrics")[0] == 200


def test_limits_of_a_tenant(tmp_path: Path) -> None:
    with Tokens(tmp_path / "server.sqlite") as tokens:
        token = tokens.create("small")
        tokens.set_limits("small", TenantLimits(sandboxes=1, creates_per_second=1))
    with serving(tmp_path) as url:
        client = Client(url, token)
        assert client("POST", "/v1/sandboxes", {})[0] == 201
        status, refused = client("POST", "/v1/sandboxes", {})
        assert (status, refused["error"]["code"], refused["error"]["retryable"]) == (429, "exhausted", True)
        assert refused["error"]["fields"]["numbers"]["sandboxes"] == 1
        assert run_code(client, code="true", language="bash")["status"] == "SandboxError", "it counts too"
