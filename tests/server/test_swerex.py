"""The remote runtime of SWE-ReX: which sandbox a name has, and for how long."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.types import Message

from dutyfree.server.access import Access
from dutyfree.server.swerex import SwerexRoutes
from tests.awaiting import until
from tests.server.in_process import served
from tests.server.test_http import Client
from tests.serving import ended_by_sigterm, serving

pytestmark = pytest.mark.native


def test_the_next_server_goes_on_with_the_sandbox_of_a_name(tmp_path: Path) -> None:
    """With its files, and without its sessions."""
    with ended_by_sigterm(tmp_path) as url:
        client = Client(url)
        written = client("POST", "/swerex/task/write_file", {"path": "/tmp/file", "content": "kept"})
        assert written[0] == client("POST", "/swerex/task/create_session", {})[0] == 200
        (one,) = client("GET", "/v1/sandboxes")[1]["sandboxes"]
        client("POST", f"/v1/sandboxes/{one['id']}/fork", {"key": "copy", "count": 1})  # has the same label
        client("POST", f"/v1/sandboxes/{one['id']}/exec", {"command": "echo later >> /tmp/file"})
    with serving(tmp_path) as url:
        client = Client(url)
        found = client("POST", "/swerex/task/read_file", {"path": "/tmp/file"})[1]
        assert found == {"content": "keptlater\n"}
        status, error = client("POST", "/swerex/task/run_in_session", {"command": "true"})
        assert status == 511
        assert error["swerexception"]["class_path"] == "swerex.exceptions.SessionDoesNotExistError"
        assert client("POST", "/swerex/task/close", {})[0] == 200
        left = [other["id"] for other in client("GET", "/v1/sandboxes")[1]["sandboxes"]]
        assert one["id"] not in left


def test_a_lost_sandbox_is_not_replaced_by_an_empty_one(tmp_path: Path) -> None:
    command = {"command": ["cat", "/tmp/file"]}

    def fails(client: Client) -> bool:
        status, answer = client("POST", "/swerex/task/execute", command)
        return status == 511 and "has ended" in answer["swerexception"]["message"]

    with ended_by_sigterm(tmp_path) as url:
        client = Client(url)
        client("POST", "/swerex/task/write_file", {"path": "/tmp/file", "content": "work"})
        (one,) = client("GET", "/v1/sandboxes")[1]["sandboxes"]
        assert client("DELETE", f"/v1/sandboxes/{one['id']}")[0] == 204
        assert fails(client)
    with serving(tmp_path) as url:
        client = Client(url)
        assert fails(client)
        assert client("POST", "/swerex/task/close", {})[0] == 200
        assert client("POST", "/swerex/task/execute", command)[1]["exit_code"] == 1  # a new one
        assert client("POST", "/swerex/task/close", {})[0] == 200


async def posted(app: Starlette, path: str, body: Any) -> int:
    """The status of the answer."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": json.dumps(body).encode()}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b""}
    await app({**scope, "headers": [(b"host", b"localhost")]}, receive, send)
    return int(sent[0]["status"])


async def test_the_lease_is_extended_while_a_command_runs(tmp_path: Path) -> None:
    async with served(tmp_path) as (service, _):
        access = Access(service.tokens, needs_token=False)
        app = Starlette(routes=SwerexRoutes(service, access, extend_seconds=0.01).routes())
        command = {"command": "touch /tmp/begun; until [ -e /tmp/over ]; do sleep 0.02; done", "shell": True}
        running = asyncio.create_task(posted(app, "/swerex/task/execute", command))
        (held,) = await until(lambda: service.sandboxes.of("local"))

        async def begun() -> bool:
            return any(entry.name == "begun" for entry in await held.sandbox.list("/tmp"))

        await until(begun)
        for _ in range(3):
            before = held.until
            await until(lambda: held.until > before)  # noqa: B023 (it ends before the next turn)
        await held.sandbox.write("/tmp/over", b"")
        assert await running == 200
