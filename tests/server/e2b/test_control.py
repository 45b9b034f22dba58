"""E2B's API for sandboxes as a whole: leases, and what a restart must not lose."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from tests.server.in_process import served
from tests.server.test_http import Client
from tests.serving import ended_by_sigterm, serving

pytestmark = pytest.mark.native


async def asked(client: Client, method: str, path: str, body: Any = None) -> Any:
    """The answer to a request, which must succeed."""
    status, answer = await anyio.to_thread.run_sync(partial(client, method, path, body))
    assert status < 300, answer
    return answer


@pytest.mark.parametrize("version", ["", "/v2"])
async def test_who_connects_only_extends_the_lease(tmp_path: Path, version: str) -> None:
    async with served(tmp_path) as (service, address):
        client = Client(f"http://{address}")
        made = await asked(client, "POST", "/sandboxes", {"timeout": 600})
        held = service.sandboxes.get("local", made["sandboxID"])
        first, connect = held.until, f"{version}/sandboxes/{held.id}/connect"
        await asked(client, "POST", connect, {"timeout": 10})
        assert held.until == first
        await asked(client, "POST", connect, {"timeout": 6000})
        assert held.until > first + 5000
        await asked(client, "POST", f"/sandboxes/{held.id}/pause")
        await asked(client, "POST", connect, {"timeout": 60})  # the time of the pause does not count
        assert held.until < first


def test_a_fork_has_its_template_after_a_restart(tmp_path: Path) -> None:
    with ended_by_sigterm(tmp_path) as url:
        client = Client(url)
        made = client("POST", "/sandboxes", {"templateID": "base"})[1]
        status, (copy,) = client("POST", f"/sandboxes/{made['sandboxID']}/fork", {"timeout": 600})
        assert (status, copy["sandbox"]["templateID"]) == (201, "base")
    with serving(tmp_path) as url:
        found = Client(url)("GET", f"/sandboxes/{copy['sandbox']['sandboxID']}")[1]
        assert found["templateID"] == "base"
