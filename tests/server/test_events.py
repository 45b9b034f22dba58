"""The event stream: what is in it, who sees what, and how readers come back."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from dutyfree.contract import Exec
from dutyfree.server import events as module
from dutyfree.server.events import Events, Ring
from dutyfree.server.sandboxes import Sandboxes
from dutyfree.server.tokens import Tokens
from dutyfree.wire import codec
from dutyfree.wire.events import Released
from tests.processes import eventually
from tests.server.test_http import Client
from tests.serving import serving

Found = tuple[str, str, dict[str, Any]]
"""Id, kind and data of an event."""


def parsed(text: str) -> list[Found]:
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "data" in fields:
            found.append((fields.get("id", ""), fields["event"], json.loads(fields["data"])))
    return found


def lately(client: Client, **headers: str) -> list[Found]:
    """What the server still knows."""
    status, data = client.raw("GET", "/v1/events?replay=4096&follow=false", **headers)
    assert status == 200
    return parsed(data.decode())


@contextmanager
def listening(client: Client, **headers: str) -> Iterator[list[Found]]:
    """The events of a stream, which a thread adds as they come."""
    connection = http.client.HTTPConnection(client.address, timeout=60)
    connection.request("GET", "/v1/events", headers={**client.headers, **headers})
    answer = connection.getresponse()
    assert answer.headers["content-type"].startswith("text/event-stream")
    found: list[Found] = []

    def read() -> None:
        block = b""
        while line := answer.readline():
            block += line
            if line == b"\n":
                found.extend(parsed(block.decode()))
                block = b""

    thread = threading.Thread(target=read)
    thread.start()
    try:
        assert eventually(lambda: found)
        yield found
    finally:
        if connection.sock is not None:
            connection.sock.shutdown(2)
        thread.join(60)
        answer.close()
        connection.close()


def kinds(found: list[Found]) -> list[str]:
    return [kind for _, kind, _ in found]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("state")) as found:
        yield found


@pytest.fixture
def client(url: str) -> Client:
    return Client(url)


@pytest.mark.native
class TestStream:
    """A server as users start it."""

    def test_the_life_of_a_sandbox(self, client: Client) -> None:
        with listening(client) as found:
            made = client("POST", "/v1/sandboxes", {"labels": {"run": "7"}})[1]["id"]
            path = f"/v1/sandboxes/{made}"
            client("POST", f"{path}/exec", {"command": "echo hello; exit 3"})
            client("POST", f"{path}/exec", {"command": "sleep 60", "timeout": 0.1})
            client("GET", f"{path}/files?path=none")
            client("POST", "/v1/keep_alive", {"sandboxes": [made], "lease": 1000})
            assert eventually(lambda: "lease" in kinds(found))
            client("DELETE", path)
            assert eventually(lambda: "released" in kinds(found))
        about = [(kind, data) for _, kind, data in found if data.get("sandbox") == made]
        (_, created), (_, first), (_, second), (_, third), (_, _) = about
        assert created["served"]["kind"] in ("cold", "layer")
        assert created["labels"] == {"run": "7"}
        assert (first["call"], first["label"]) == ("exec", "echo hello; exit 3")
        assert (first["outcome"], first["exit_code"]) == ("failed", 3)
        assert {"dispatch", "spawn", "run"} <= {name for name, _, _ in first["spans"]}
        assert second["outcome"] == "timeout"
        assert (third["outcome"], third["error"]["code"]) == ("task", "path_not_found")
        assert [kind for kind, _ in about] == ["created", "action", "action", "failure", "released"]
        (lease,) = [data for _, kind, data in found if kind == "lease"]
        assert (lease["change"], list(lease["sandboxes"])) == ("extended", [made])
        assert "pool" in kinds(found)

    def test_it_begins_with_what_exists(self, client: Client) -> None:
        made = client("POST", "/v1/sandboxes", {})[1]["id"]
        with listening(client) as found:
            _, kind, state = found[0]
            assert kind == "state"
            assert made in [one["sandbox"] for one in state["sandboxes"]]
        client("DELETE", f"/v1/sandboxes/{made}")

    def test_a_reader_who_comes_back_misses_nothing(self, client: Client) -> None:
        with listening(client) as found:
            last = found[0][0]
        made = client("POST", "/v1/sandboxes", {})[1]["id"]
        client("DELETE", f"/v1/sandboxes/{made}")
        back = lately(client, **{"Last-Event-ID": last})
        assert kinds(back)[:2] == ["created", "released"]
        numbers = [int(number.rpartition("-")[2]) for number, _, _ in back[:2]]
        first = int(last.rpartition("-")[2])
        assert numbers == [first + 1, first + 2]

    @pytest.mark.parametrize("last", ["other-1", "x", "-5", "0-99999999999999999999"])
    def test_an_id_of_another_server_is_answered_with_the_state(self, client: Client, last: str) -> None:
        found = kinds(lately(client, **{"Last-Event-ID": last}))
        assert found[-1] == "state"
        assert found[0] == "lost" or "-" not in last[1:]

    def test_a_group_has_one_name(self, client: Client) -> None:
        made = client("POST", "/v1/sandboxes", {})[1]["id"]
        copies = client("POST", f"/v1/sandboxes/{made}/fork", {"key": "f1", "count": 2})[1]
        ids = {one["id"] for one in copies}
        groups = {data["group"] for _, kind, data in lately(client) if data.get("sandbox") in ids}
        assert len(groups) == 1
        assert groups < ids
        for one in (*ids, made):
            client("DELETE", f"/v1/sandboxes/{one}")

    def test_long_calls_are_announced_and_so_are_pauses_and_ends_of_leases(self, client: Client) -> None:
        with listening(client) as found:
            made = client("POST", "/v1/sandboxes", {"lease": 5})[1]["id"]
            client("POST", f"/v1/sandboxes/{made}/exec", {"command": "sleep 2"})
            client("POST", f"/v1/sandboxes/{made}/pause")
            assert eventually(lambda: "released" in kinds(found))
        (began,) = [data for _, kind, data in found if kind == "began"]
        (action,) = [data for _, kind, data in found if kind == "action" and data["call"] == "exec"]
        assert (began["label"], began["number"]) == ("sleep 2", action["number"])
        assert [data["paused"] for _, kind, data in found if kind == "paused"] == [True]
        changes = [data["change"] for _, kind, data in found if kind == "lease"]
        assert changes == ["ending", "expired"]

    def test_a_batch_has_the_outcome_of_its_actions(self, client: Client) -> None:
        made = client("POST", "/v1/sandboxes", {})[1]["id"]
        for command in ("true", "false"):
            body = {"actions": [{"type": "exec", "command": command}, {"type": "exec", "command": "true"}]}
            client("POST", f"/v1/sandboxes/{made}/batch", body)
        client("DELETE", f"/v1/sandboxes/{made}")
        batches = [data for _, _, data in lately(client) if data.get("call") == "batch"]
        assert [(one["label"], one["outcome"]) for one in batches] == [
            ("2 actions", "ok"),
            ("2 actions", "failed"),
        ]

    def test_run_code_is_an_action_without_a_sandbox_of_its_own(self, client: Client) -> None:
        for code in ("true", "exit 3"):
            assert client("POST", "/run_code", {"code": code, "language": "bash"})[0] == 200
        found = [data for _, _, data in lately(client) if data.get("call") == "run_code"]
        assert [(one["label"], one["outcome"], one["sandbox"]) for one in found] == [
            ("bash", "ok", ""),
            ("bash", "failed", ""),
        ]

    def test_a_call_whose_sandbox_is_ended_is_cancelled(self, client: Client) -> None:
        made = client("POST", "/v1/sandboxes", {})[1]["id"]
        path = f"/v1/sandboxes/{made}"
        body = {"command": "touch began; sleep 1000"}
        thread = threading.Thread(target=client, args=("POST", f"{path}/exec", body))
        thread.start()
        assert eventually(lambda: client.raw("GET", f"{path}/files?path=began")[0] == 200)
        client("DELETE", path)
        thread.join(60)

        def outcomes() -> list[str]:
            return [data["outcome"] for _, _, data in lately(client) if data.get("label") == body["command"]]

        assert eventually(lambda: outcomes() == ["cancelled"]), outcomes()

    def test_names_that_are_no_text(self, client: Client) -> None:
        made = client("POST", "/v1/sandboxes", {})[1]["id"]
        body = codec.encode(Exec(("true", "\udcff\n\r\n\ndata: x")))
        kind = {"Content-Type": "application/msgpack"}
        assert client.raw("POST", f"/v1/sandboxes/{made}/exec", body, **kind)[0] == 200
        found = lately(client)
        client("DELETE", f"/v1/sandboxes/{made}")
        assert kinds(found)[-1] == "state"
        (action,) = [data for _, _, data in found if data.get("sandbox") == made and data["kind"] == "action"]
        assert action["label"].endswith("\n\r\n\ndata: x")

    def test_large_labels_and_commands_are_cut(self, client: Client) -> None:
        labels = {f"{number}-{'n' * 1000}": "v" * 1000 for number in range(100)}
        status, made = client("POST", "/v1/sandboxes", {"labels": labels})
        if status == 201:  # an engine may also refuse such labels
            client("POST", f"/v1/sandboxes/{made['id']}/exec", {"command": f"true {'x' * 100_000}"})
            client("DELETE", f"/v1/sandboxes/{made['id']}")
        assert max(len(json.dumps(data)) for _, kind, data in lately(client) if kind != "state") < 10_000

    @pytest.mark.parametrize("query", ["replay=-1", "replay=x", "replay=", "replay=9999999999"])
    def test_wrong_queries_are_explained(self, client: Client, query: str) -> None:
        status, answer = client("GET", f"/v1/events?{query}")
        assert (status, answer["error"]["code"]) == (400, "argument")

    def test_streams_of_a_tenant_are_limited(self, client: Client) -> None:
        with ExitStack() as open_streams:
            for _ in range(module.LISTENERS):
                connection = http.client.HTTPConnection(client.address, timeout=60)
                open_streams.callback(connection.close)
                connection.request("GET", "/v1/events")
                answer = open_streams.enter_context(connection.getresponse())
                assert answer.status == 200
            assert client("GET", "/v1/events")[0] == 429
        assert eventually(lambda: client.raw("GET", "/v1/events?follow=false")[0] == 200)

    def test_the_server_ends_although_somebody_listens(self, tmp_path: Path) -> None:
        with serving(tmp_path) as url:
            connection = http.client.HTTPConnection(Client(url).address, timeout=60)
            connection.request("GET", "/v1/events")
            answer = connection.getresponse()
        with answer:
            assert kinds(parsed(answer.read().decode()))[-1] == "bye"
        connection.close()

    def test_tenants_see_their_own_events_and_the_operator_all(self, tmp_path: Path) -> None:
        with Tokens(tmp_path / "server.sqlite") as tokens:
            secrets = {name: tokens.create(name) for name in ("ours", "theirs", "operator")}
            identity = next(one.id for one in tokens.all() if one.tenant == "theirs")
            with serving(tmp_path) as url:
                assert Client(url).raw("GET", "/v1/events")[0] == 401
                ours, theirs, operator = (Client(url, secret) for secret in secrets.values())
                made = ours("POST", "/v1/sandboxes", {"labels": {"secret": "plan"}})[1]["id"]
                ours("POST", f"/v1/sandboxes/{made}/exec", {"command": "echo plan"})
                theirs("POST", f"/v1/sandboxes/{made}/exec", {"command": "true"})
                assert "plan" in json.dumps(lately(ours))
                seen = lately(theirs)
                assert kinds(seen) == ["failure", "state"]
                assert seen[0][0].endswith("-1")  # and not how many events others have
                assert seen[0][2]["number"] == 1
                assert "plan" not in json.dumps(seen)
                assert seen[-1][2]["pool"].keys() <= {
                    "kind",
                    "at",
                    "tenant",
                    "saved_seconds",
                    "waited_seconds",
                }
                assert made in json.dumps(lately(operator))
                assert lately(operator)[-1][2]["sees_all"]
                with listening(theirs) as found:
                    tokens.revoke(identity)
                    assert eventually(lambda: kinds(found)[-1] == "bye")


def released(number: int, tenant: str = "a") -> Released:
    return Released(at=0.0, tenant=tenant, sandbox=str(number))


def test_a_ring_says_how_many_events_are_gone() -> None:
    ring = Ring()
    for number in range(module.KEPT + 10):
        ring.add(released(number))
    lost, found = ring.after(0)
    assert (lost, len(found)) == (10, module.KEPT)
    assert ring.after(ring.last) == (0, [])
    lost, found = ring.after(ring.last - 2)
    assert (lost, found) == (0, [released(module.KEPT + 8), released(module.KEPT + 9)])


async def test_a_slow_reader_is_told_how_much_it_has_lost() -> None:
    from starlette.requests import Request

    from dutyfree.server.event_stream import Reader

    events = Events(Sandboxes(), lambda: None)
    request = Request({"type": "http", "query_string": b"", "headers": []})
    reader = Reader(events, SimpleNamespace(), request, "a", "a")  # type: ignore[arg-type]
    parts = reader.parts()
    assert kinds(parsed((await anext(parts)).decode())) == ["state"]
    for number in range(module.KEPT + 5):
        events.publish(released(number))
        events.publish(released(number, "b"))
    with anyio.fail_after(60):
        found = parsed((await anext(parts)).decode())
    assert kinds(found) == ["lost", "state"]
    assert found[0][2]["events"] == 5
    await parts.aclose()  # type: ignore[attr-defined]


async def test_memory_is_bounded_and_nothing_runs_while_nobody_listens() -> None:
    events = Events(Sandboxes(), lambda: None)
    for number in range(3 * module.KEPT):
        events.publish(released(number))
    assert len(events.ring(None).after(0)[1]) == module.KEPT
    ticks = [events.ticks]
    with events.listening("a"):
        ticks.append(events.ticks)
    assert [*ticks, events.ticks] == [False, True, False]
