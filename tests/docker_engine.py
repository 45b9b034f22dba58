"""What a Docker engine has, and a proxy that breaks off or hangs like an engine that fails."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import msgspec

from dutyfree.substrates.docker import socket_path
from dutyfree.substrates.docker.engine import Engine


async def containers(engine: Engine, label: str) -> list[str]:
    filters = msgspec.json.encode({"label": [label]}).decode()
    query = {"all": "1", "filters": filters}
    return [found["Id"] for found in await engine.request("GET", "/containers/json", query=query)]


async def images(engine: Engine, label: str) -> list[str]:
    filters = msgspec.json.encode({"label": [label]}).decode()
    return [found["Id"] for found in await engine.request("GET", "/images/json", query={"filters": filters})]


async def until_gone(engine: Engine, label: str) -> None:
    with anyio.fail_after(60):
        while await containers(engine, label) or await images(engine, label):  # noqa: ASYNC110 (the engine's events are not under test)
            await anyio.sleep(0.1)


class Proxy:
    """Stands between us and the real engine, and can be cut."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.cut = False
        self.answers = anyio.Event()
        self.answers.set()
        self._pairs: list[anyio.abc.SocketStream] = []

    async def serve(self, client: anyio.abc.SocketStream) -> None:
        async with client:
            if self.cut:
                return
            async with await anyio.connect_unix(socket_path(None)) as server:
                self._pairs += [client, server]
                try:
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(self._copy, client, server)
                        await self._copy(server, client)
                        tasks.cancel_scope.cancel()
                except* (anyio.BrokenResourceError, anyio.ClosedResourceError):
                    pass

    async def _copy(self, source: anyio.abc.SocketStream, target: anyio.abc.SocketStream) -> None:
        try:
            async for piece in source:
                await self.answers.wait()
                await target.send(piece)
            await target.send_eof()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            pass

    def hang(self) -> None:
        """From now on requests are taken, and never answered."""
        self.answers = anyio.Event()

    async def break_off(self) -> None:
        self.cut = True
        for stream in self._pairs:
            await stream.aclose()


@asynccontextmanager
async def proxied(tmp_path: Path) -> AsyncIterator[Proxy]:
    proxy = Proxy(str(tmp_path / "proxy.sock"))
    async with await anyio.create_unix_listener(proxy.path) as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, proxy.serve)
        yield proxy
        tasks.cancel_scope.cancel()
