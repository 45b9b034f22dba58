"""A server that another one replaces: it takes no new requests, and waits for those that run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from dutyfree.server.e2b.connect import ENVELOPE
from dutyfree.server.sandboxes import Held
from tests.awaiting import until
from tests.server.in_process import served
from tests.server.test_http import Client

pytestmark = pytest.mark.native

WAIT = "touch /tmp/begun; until [ -e /tmp/over ]; do sleep 0.02; done"

Ask = Callable[..., Awaitable[tuple[int, bytes]]]


async def begun(held: Held) -> bool:
    return any(entry.name == "begun" for entry in await held.sandbox.list("/tmp"))


def running_requests(held: Held, token: dict[str, str]) -> dict[str, tuple[str, Any, dict[str, str]]]:
    """Requests that wait for the file, one for each way to count them."""
    process = json.dumps({"process": {"cmd": "/bin/sh", "args": ["-c", WAIT]}, "stdin": False}).encode()
    return {
        "an answer": (f"/v1/sandboxes/{held.id}/exec", {"command": WAIT}, {}),
        "a stream": ("/process.Process/Start", ENVELOPE.pack(0, len(process)) + process, token),
    }


@pytest.mark.parametrize("way", ["an answer", "a stream"])
async def test_requests_that_run_go_on_and_others_are_refused(tmp_path: Path, way: str) -> None:
    async with served(tmp_path) as (service, address):
        client = Client(f"http://{address}")

        async def ask(method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
            return await anyio.to_thread.run_sync(partial(client.raw, method, path, body, **headers))

        made = json.loads((await ask("POST", "/sandboxes", {"timeout": 600}))[1])
        held = service.sandboxes.get("local", made["sandboxID"])
        token = {"e2b-sandbox-id": held.id, "x-access-token": held.access_token}
        path, body, headers = running_requests(held, token)[way]
        running = asyncio.create_task(ask("POST", path, body, **headers))
        await until(partial(begun, held))
        draining = asyncio.create_task(service.drain(600))
        await until(lambda: service.draining)
        await refuses_new_ones(ask, held, token)
        assert not draining.done()
        await held.sandbox.write("/tmp/over", b"")
        assert (await running)[0] == 200
        await draining


async def refuses_new_ones(ask: Ask, held: Held, token: dict[str, str]) -> None:
    one = f"/v1/sandboxes/{held.id}"
    for method, path, body in [
        ("POST", "/v1/sandboxes", {}),
        ("POST", f"{one}/exec", {"command": "true"}),
        ("GET", f"{one}/ports/8000/", None),
        ("POST", "/run_code", {"code": "true", "language": "bash"}),
        ("POST", "/sandboxes", {}),
        ("POST", "/filesystem.Filesystem/Stat", {"path": "."}),
        ("POST", "/swerex/name/execute", {"command": ["true"]}),
    ]:
        status, answer = await ask(method, path, body, **token)
        assert (status, b"is being replaced" in answer) == (503, True), (path, answer)
    for path in ("/healthz", "/metrics", "/v1/events?follow=false"):
        assert (await ask("GET", path))[0] == 200
