"""Logs, traces and readiness: what an operator sees of a server."""

from __future__ import annotations

import http.client
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import dutyfree
from dutyfree.contract.errors import UsageError
from dutyfree.server.service import Service
from dutyfree.server.tokens import Tokens
from dutyfree.server.tracing import Tracing
from tests.awaiting import until
from tests.processes import eventually
from tests.server.in_process import served

pytestmark = pytest.mark.native


@contextmanager
def logged(state: Path, *arguments: str, **environment: str) -> Iterator[tuple[str, Path, int]]:
    """The address of a server, the file with its standard error, and its process id."""
    command = [sys.executable, "-m", "dutyfree", "serve", "--listen", "127.0.0.1:0", "--state", str(state)]
    path = state / "stderr"
    with (
        path.open("w") as errors,
        subprocess.Popen(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **environment},
        ) as process,
    ):
        try:
            assert process.stdout
            found = re.search(r"at http://(\S+);", process.stdout.readline())
            assert found
            yield found[1], path, process.pid
        finally:
            process.send_signal(signal.SIGINT)


def ask(address: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request(method, path, None if body is None else json.dumps(body).encode(), headers)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, json.loads(data) if data else None, answer.headers


# --- Logs -------------------------------------------------------------------------------------------


def test_a_line_of_json_for_each_call(tmp_path: Path) -> None:
    with Tokens(tmp_path / "server.sqlite") as tokens:
        token = tokens.create("trainer")
    with logged(tmp_path, "--log-format", "json", "--log-level", "debug") as (address, path, _):
        allowed = {"Authorization": f"Bearer {token}"}
        _, made, headers = ask(address, "POST", "/v1/sandboxes", {}, **allowed)
        assert re.fullmatch(r"[0-9a-f]{16}", headers["x-request-id"])
        command = {"command": "echo a-secret-of-the-client"}
        exec_path = f"/v1/sandboxes/{made['id']}/exec"
        _, _, headers = ask(address, "POST", exec_path, command, **allowed, **{"X-Request-Id": "rollout-7"})
        assert headers["x-request-id"] == "rollout-7"
        _, _, headers = ask(address, "POST", exec_path, command, **allowed, **{"X-Request-Id": "bad id\t"})
        assert headers["x-request-id"] != "bad id\t"
        ask(address, "POST", f"/v1/sandboxes/{made['id']}/read", {"path": "none"}, **allowed)
        ask(address, "GET", "/v1/sandboxes", Authorization="Bearer dutyfree_wrong")
        ask(address, "DELETE", f"/v1/sandboxes/{made['id']}", **allowed)
    text = path.read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    calls = {line["call"]: line for line in lines if line["event"] == "call"}
    expected = {"tenant": "trainer", "sandbox": made["id"], "outcome": "ok", "level": "debug"}
    assert expected.items() <= calls["exec"].items()
    assert calls["exec"]["seconds"] > 0
    assert "rollout-7" in [line.get("request") for line in lines]
    assert (calls["read"]["outcome"], calls["read"]["code"]) == ("task", "path_not_found")
    events = [line["event"] for line in lines]
    assert events.index("sandbox created") < events.index("call") < events.index("sandbox released")
    refused = next(line for line in lines if line["event"] == "refused")
    assert (refused["status"], refused["path"]) == (401, "/v1/sandboxes")
    for secret in (token, "dutyfree_wrong", "a-secret-of-the-client"):
        assert secret not in text


def test_logfmt_with_commands_if_asked_for(tmp_path: Path) -> None:
    with logged(tmp_path, "--log-level", "debug", "--log-commands") as (address, path, _):
        _, made, _ = ask(address, "POST", "/v1/sandboxes", {})
        command = 'echo "two\nlines"'
        ask(address, "POST", f"/v1/sandboxes/{made['id']}/exec", {"command": command})
    line = next(line for line in path.read_text().splitlines() if "call=exec" in line)
    assert re.match(r"time=\S+Z level=debug event=call call=exec tenant=local sandbox=sb-", line)
    assert json.dumps(command) in line
    assert re.search(r" outcome=ok seconds=0\.\d+", line)


def test_by_default_calls_that_succeed_are_not_logged(tmp_path: Path) -> None:
    with logged(tmp_path) as (address, path, _):
        _, made, _ = ask(address, "POST", "/v1/sandboxes", {})
        ask(address, "POST", f"/v1/sandboxes/{made['id']}/exec", {"command": "true"})
    text = path.read_text()
    assert 'event="sandbox created"' in text
    assert "event=call" not in text


# --- Readiness --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Service, str]]:
    async with served(tmp_path_factory.mktemp("state")) as found:
        yield found


async def get(address: str, path: str) -> tuple[int, Any]:
    status, found, _ = await anyio.to_thread.run_sync(ask, address, "GET", path)
    return status, found


async def test_a_server_is_ready_until_it_drains(server: tuple[Service, str]) -> None:
    service, address = server
    assert await get(address, "/readyz") == (
        200,
        {"ready": True, "engine": "ok", "disk": "ok", "draining": False},
    )
    service.readiness.draining = True
    status, found = await get(address, "/readyz")
    assert (status, found["ready"], found["draining"]) == (503, False, True)
    service.readiness.draining = False
    assert (await get(address, "/readyz"))[0] == 200


async def test_a_full_disk_is_not_ready(server: tuple[Service, str], monkeypatch: pytest.MonkeyPatch) -> None:
    service, address = server
    full = os.statvfs_result((4096, 4096, 1000, 10, 10, 1000, 900, 900, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    service.readiness._last = None
    status, found = await get(address, "/readyz")
    service.readiness._last = None
    assert (status, found["disk"]) == (503, "the disk of the server is nearly full")


def test_without_its_launcher_a_server_is_not_ready(tmp_path: Path) -> None:
    with logged(tmp_path) as (address, _, pid):
        assert ask(address, "GET", "/readyz")[0] == 200
        tasks = Path(f"/proc/{pid}/task").iterdir()
        (launcher,) = [child for task in tasks for child in (task / "children").read_text().split()]
        os.kill(int(launcher), signal.SIGKILL)
        assert eventually(lambda: ask(address, "GET", "/readyz")[0] == 503)
        assert ask(address, "GET", "/readyz")[1]["engine"] != "ok"
        connection = http.client.HTTPConnection(address)
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 200, "the process lives"
        connection.close()


# --- Traces -----------------------------------------------------------------------------------------


class Traced:
    """A server whose spans the test sees, and the provider of a client's own spans."""

    def __init__(self, service: Service, address: str) -> None:
        self.address = address
        self.spans = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.spans))
        service.calls.tracing = Tracing(self.provider)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans.get_finished_spans() if span.name == name]


@pytest.fixture
def traced(server: tuple[Service, str]) -> Iterator[Traced]:
    service, address = server
    yield Traced(service, address)
    service.calls.tracing = None


async def test_calls_and_their_phases_are_spans(traced: Traced) -> None:
    tracer = traced.provider.get_tracer("client")
    async with dutyfree.open("hosted", url=f"http://{traced.address}") as hosted:
        with tracer.start_as_current_span("rollout") as rollout:
            async with hosted.sandbox() as sandbox:
                seen = await sandbox.exec("sleep 0.05")
                with pytest.raises(FileNotFoundError):
                    await sandbox.read("none")
        await until(lambda: traced.named("dutyfree.release"))
    (call,) = traced.named("dutyfree.exec")
    assert call.parent is not None
    assert call.context is not None
    assert call.parent.span_id == rollout.get_span_context().span_id
    assert call.context.trace_id == rollout.get_span_context().trace_id
    assert call.attributes is not None
    assert call.attributes["dutyfree.outcome"] == "ok"
    assert call.attributes["dutyfree.tenant"] == "local"
    phases = [
        span
        for span in traced.spans.get_finished_spans()
        if span.parent and span.parent.span_id == call.context.span_id
    ]
    inside = [span.name for span in seen.spans if span.name != "network"]
    assert [phase.name for phase in phases] == inside
    run = next(phase for phase in phases if phase.name == "run")
    assert run.end_time is not None
    assert run.start_time is not None
    assert run.end_time - run.start_time >= 50_000_000
    (create,) = traced.named("dutyfree.create")
    assert [span for span in traced.spans.get_finished_spans() if span.parent == create.context]
    (read,) = traced.named("dutyfree.read")
    assert read.status.status_code is trace.StatusCode.ERROR


async def test_traceparent_over_http(traced: Traced) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"traceparent": parent}

    def create() -> Any:
        return ask(traced.address, "POST", "/v1/sandboxes", {"lease": 5}, **headers)

    await anyio.to_thread.run_sync(create)
    (call,) = traced.named("dutyfree.create")
    assert call.context is not None
    assert call.parent is not None
    assert f"{call.context.trace_id:032x}-{call.parent.span_id:016x}" == parent[3:52]


def test_spans_reach_a_collector(tmp_path: Path) -> None:
    """Over OTLP and HTTP, as the standard variables say."""
    requests: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            requests.append((self.path, body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
            "OTEL_SERVICE_NAME": "sandboxes-of-the-test",
            "NO_PROXY": "127.0.0.1",
        }
        with logged(tmp_path, **environment) as (address, _, _):
            _, made, _ = ask(address, "POST", "/v1/sandboxes", {})
            ask(address, "POST", f"/v1/sandboxes/{made['id']}/exec", {"command": "true"})
        collector.shutdown()
        thread.join()
    assert {path for path, _ in requests} == {"/v1/traces"}
    names, services = set(), set()
    for _, body in requests:
        sent = ExportTraceServiceRequest.FromString(body)
        for resource in sent.resource_spans:
            services |= {
                one.value.string_value for one in resource.resource.attributes if one.key == "service.name"
            }
            names |= {span.name for scope in resource.scope_spans for span in scope.spans}
    assert services == {"sandboxes-of-the-test"}
    assert {"dutyfree.create", "dutyfree.exec", "run"} <= names


def test_traces_are_off_unless_the_environment_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    assert Tracing.from_environment() is None
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert Tracing.from_environment() is None
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    with pytest.raises(UsageError, match="zipkin"):
        Tracing.from_environment()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(UsageError, match="not installed") as missing:
        Tracing.from_environment()
    assert "otel" in missing.value.remedy
