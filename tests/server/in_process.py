"""A server in the process of the test, whose limits the test can set."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dutyfree.server import listen
from dutyfree.server.service import Service


@asynccontextmanager
async def served(
    state: Path, *, native: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[Service, str]]:
    """A service, and the ``HOST:PORT`` at which it listens. ``options`` are those of ``listen.serving``."""
    async with (
        Service.open(state, native or {}) as service,
        listen.serving(service, listen.Address("127.0.0.1:0"), **options) as url,
    ):
        yield service, url.removeprefix("http://")
