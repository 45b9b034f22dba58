"""A client of the Docker Engine API: HTTP/1.1 over its Unix socket, with kept connections.

A general HTTP client cannot run an exec: the exec takes over the connection, and needs one direction closed
while the other still sends. So a request here is a few lines on an asyncio stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any, BinaryIO
from urllib.parse import quote, urlencode

import anyio
import anyio.to_thread
import msgspec

from dutyfree.contract.errors import Unavailable

BUFFER = 1 << 20
CHUNK = 256 << 10
IDLE = 64
"""Connections kept for later requests."""
API = (1, 41)
"""The API version that this client uses (Docker 20.10). Newer engines still support it."""

ANSWER_SECONDS = 20.0
"""How long the engine may take to answer a question. One that hangs accepts requests and never answers."""

REMOVE_SECONDS = 30.0
"""How long the engine may take to remove a container or an image."""

REMEDY = "start Docker: `sudo scripts/docker-engine start` on Debian, or as its documentation says"


class EngineError(Exception):
    """The engine answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class EngineLost(OSError):  # noqa: N818 (a state of the connection, as ConnectionResetError)
    """The engine does not answer, or its answer broke off."""


class EngineSilent(EngineLost):
    """The engine took the request, and did not answer in time."""


class EngineResponse:
    """The head of an answer, and a reader of its body."""

    def __init__(self, status: int, headers: Mapping[str, str], connection: Connection) -> None:
        self.status = status
        self.headers = headers
        self._connection = connection

    @property
    def keeps(self) -> bool:
        """Whether the connection can be reused after the body."""
        return self.headers.get("connection", "").lower() != "close" and (
            "content-length" in self.headers or self._chunked or self.status in (204, 304)
        )

    @property
    def _chunked(self) -> bool:
        return self.headers.get("transfer-encoding", "").lower() == "chunked"

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives."""
        reader = self._connection.reader
        if self.status in (204, 304):
            return
        if self._chunked:
            while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
                async for piece in _exactly(reader, size):
                    yield piece
                await reader.readexactly(2)
            await reader.readuntil(b"\r\n")
        elif "content-length" in self.headers:
            async for piece in _exactly(reader, int(self.headers["content-length"])):
                yield piece
        else:
            while piece := await reader.read(CHUNK):
                yield piece

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def message(self) -> str:
        """The message of an error."""
        body = await self.body()
        with contextlib.suppress(msgspec.DecodeError, TypeError, KeyError):
            return str(msgspec.json.decode(body)["message"]).strip()
        return body.decode(errors="replace").strip() or f"status {self.status}"


async def _exactly(reader: asyncio.StreamReader, size: int) -> AsyncIterator[bytes]:
    while size:
        piece = await reader.read(min(size, CHUNK))
        if not piece:
            raise asyncio.IncompleteReadError(b"", size)
        size -= len(piece)
        yield piece


class Connection:
    """One connection to the engine."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @property
    def alive(self) -> bool:
        return not self.reader.at_eof() and not self.writer.is_closing()

    def close(self) -> None:
        # abort, not close: close would still send the bytes of a cancelled request.
        self.writer.transport.abort()

    def send(
        self, method: str, target: str, size: int, headers: Mapping[str, str], body: bytes = b""
    ) -> None:
        """Send the head of a request, and a short body."""
        lines = [f"{method} {target} HTTP/1.1", "Host: docker", f"Content-Length: {size}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    async def send_file(self, file: BinaryIO) -> EngineResponse:
        """Send a body after the engine asks for it (Expect: 100-continue). Returns the head of the answer.

        An engine that refuses answers before the end of the body and closes the connection. Its answer
        counts, not the broken pipe.
        """
        response = await self.head()
        if response.status != 100:
            return response
        lost: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._send_body, file)
            try:
                response = await self.head()
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                lost = error
            tasks.cancel_scope.cancel()
        if lost is not None:
            raise lost
        return response

    async def _send_body(self, file: BinaryIO) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await anyio.to_thread.run_sync(file.read, BUFFER):
                self.writer.write(piece)
                await self.writer.drain()

    async def head(self) -> EngineResponse:
        """Read the head of the answer. It can be called again after a cancellation."""
        text = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status_line, *rest = text.rstrip("\r\n").split("\r\n")
        protocol, status, *_ = f"{status_line} ".split(" ", 2)
        if not protocol.startswith("HTTP/1.") or not status.isdigit():
            raise ConnectionError(f"the answer is not HTTP: {status_line[:80]!r}")
        fields = (line.partition(":") for line in rest)
        return EngineResponse(int(status), {name.lower(): value.strip() for name, _, value in fields}, self)


class Engine:
    """A Docker engine at a Unix socket. Use it as an async context manager.

    Every request raises EngineError if the engine refuses, and EngineLost if it does not answer.
    """

    def __init__(
        self,
        path: str,
        *,
        answer_seconds: float = ANSWER_SECONDS,
        remove_seconds: float = REMOVE_SECONDS,
    ) -> None:
        self.path = path
        self.answer_seconds = answer_seconds
        self.remove_seconds = remove_seconds
        self.prefix = ""
        """The API version in the path of requests, such as ``/v1.41``; empty before ``negotiate``."""
        self._idle: list[Connection] = []
        self._closed = False

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    async def connect(self) -> Connection:
        """A kept or a new connection. Raises EngineLost."""
        while self._idle:
            connection = self._idle.pop()
            if connection.alive:
                return connection
            connection.close()
        try:
            return Connection(*await asyncio.open_unix_connection(self.path, limit=BUFFER))
        except OSError as error:
            raise EngineLost(f"no Docker engine answers at {self.path}: {error.strerror or error}") from error

    def keep(self, connection: Connection) -> None:
        """Keep a connection for a later request."""
        if connection.alive and not self._closed and len(self._idle) < IDLE:
            self._idle.append(connection)
        else:
            connection.close()

    @contextlib.asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, object] | None = None,
        json: object = None,
        content: BinaryIO | None = None,
        size: int = 0,
    ) -> AsyncIterator[EngineResponse]:
        """Send a request, and read the body of its answer piece by piece."""
        target = self.prefix + quote(path)
        if query:
            target += "?" + urlencode(query, doseq=True, errors="surrogateescape")
        headers: dict[str, str] = {}
        body = b""
        if content is not None:
            headers |= {"Content-Type": "application/x-tar", "Expect": "100-continue"}
        elif json is not None:
            body = msgspec.json.encode(json)
            size = len(body)
            headers["Content-Type"] = "application/json"
        connection = await self.connect()
        kept = False
        try:
            connection.send(method, target, size, headers, body)
            response = await (connection.head() if content is None else connection.send_file(content))
            if response.status >= 400:
                message = await response.message()
                kept = response.keeps
                raise EngineError(response.status, message)
            yield response
            kept = response.keeps
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EngineLost(f"the Docker engine at {self.path} closed the connection: {error}") from error
        finally:
            if kept:
                self.keep(connection)
            else:
                connection.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, object] | None = None,
        json: object = None,
        content: BinaryIO | None = None,
        size: int = 0,
        deadline: float | None = None,
    ) -> Any:
        """Send a request whose answer is JSON or empty. Raises EngineSilent after ``deadline`` seconds."""
        streamed = self.stream(method, path, query=query, json=json, content=content, size=size)
        with anyio.move_on_after(deadline) as scope:
            async with streamed as response:
                body = await response.body()
        if scope.cancelled_caught:
            raise EngineSilent(f"the Docker engine at {self.path} does not answer within {deadline:g} s")
        return msgspec.json.decode(body) if body.strip() else None

    async def negotiate(self, wanted: tuple[int, int]) -> dict[str, Any]:
        """Choose the API version nearest to ``wanted`` that the engine has. Returns its version facts."""
        facts: dict[str, Any] = await self.request("GET", "/version")
        newest, oldest = (_version(facts.get(name)) or wanted for name in ("ApiVersion", "MinAPIVersion"))
        agreed = max(min(wanted, newest), oldest)
        self.prefix = "/v{}.{}".format(*agreed)
        return facts


def _version(text: str | None) -> tuple[int, int] | None:
    major, dot, minor = (text or "").partition(".")
    return (int(major), int(minor)) if dot else None


def socket_path(host: str | None) -> str:
    """The path of the engine's Unix socket. Raises Unavailable for another kind of address."""
    address = host or os.environ.get("DOCKER_HOST") or "/var/run/docker.sock"
    path = address.removeprefix("unix://")
    if not path.startswith("/"):
        raise Unavailable(
            f"the Docker engine's address {address!r} is not a Unix socket",
            remedy="give host= or DOCKER_HOST as unix:///path; forward a remote engine's socket with ssh -L",
        )
    return path


async def meet(engine: Engine) -> dict[str, Any]:
    """Negotiate with the engine. Returns its version facts. Raises Unavailable if none answers."""
    try:
        with anyio.fail_after(engine.answer_seconds):
            return await engine.negotiate(API)
    except EngineLost as error:
        cause = error.__cause__
        if isinstance(cause, PermissionError):
            remedy = "run as root, or as a member of the group docker"
        else:
            remedy = REMEDY
        raise Unavailable(str(error), remedy=remedy) from error
    except TimeoutError as error:
        raise Unavailable(f"the Docker engine at {engine.path} does not answer", remedy=REMEDY) from error
    except (EngineError, msgspec.DecodeError, AttributeError, TypeError, ValueError) as error:
        raise Unavailable(
            f"the server at {engine.path} is not a Docker engine: {error}", remedy=REMEDY
        ) from error


@contextlib.asynccontextmanager
async def connected(host: str | None = None) -> AsyncIterator[Engine]:
    """A client of the engine, without a substrate. Raises Unavailable."""
    async with Engine(socket_path(host)) as engine:
        await meet(engine)
        yield engine
