"""Connect RPC with JSON: single answers, and streams of enveloped messages."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from dutyfree.contract.errors import ActionError, DutyfreeError, FileError, Restarting, SandboxClosed
from dutyfree.server import json_form
from dutyfree.server.bodies import LARGEST_REQUEST
from dutyfree.wire.errors import describe

T = TypeVar("T")

ENVELOPE = struct.Struct(">BI")
COMPRESSED = 0x01
"""Flag of an envelope whose message is compressed."""
LAST = 0x02
"""Flag of the envelope that ends a stream."""

STATUS = {
    "invalid_argument": 400,
    "not_found": 404,
    "already_exists": 409,
    "unauthenticated": 401,
    "unimplemented": 501,
    "unavailable": 502,
    "deadline_exceeded": 504,
    "resource_exhausted": 429,
    "internal": 500,
}


class RpcError(Exception):
    """An error of a call, with one of the codes of Connect RPC."""

    def __init__(self, code: str, message: str, status: int | None = None) -> None:
        """``status``: that of the answer, if it is not the one of the code."""
        super().__init__(message)
        self.code = code
        self.status = STATUS.get(code, 500) if status is None else status


def rpc_error(error: DutyfreeError) -> RpcError:
    """What E2B's SDK understands of an error of ours."""
    found = describe(error)
    if found.code == "sandbox_closed":
        return RpcError("unavailable", "The sandbox was not found")
    if isinstance(error, Restarting):  # not "unavailable", which clients take for the end of the sandbox
        return RpcError("internal", error.message, 503)
    if found.code == "exhausted":
        return RpcError("resource_exhausted", error.message)
    if isinstance(error, FileError) and error.kind == "not_found":
        return RpcError("not_found", error.message)
    if isinstance(error, FileError) and error.kind == "exists":
        return RpcError("already_exists", error.message)
    if found.code == "unknown_process":
        return RpcError("not_found", error.message)
    if isinstance(error, ActionError) or found.verdict == "program":
        return RpcError("invalid_argument", error.message)
    return RpcError("internal", error.message)


def body_of(error: RpcError) -> dict[str, str]:
    return {"code": error.code, "message": str(error)}


def refusal(error: RpcError) -> Response:
    """The answer to a call that failed."""
    body = msgspec.json.encode(body_of(error))
    return Response(body, error.status, media_type="application/json")


async def unary(request: Request) -> dict[str, Any]:
    """The message of a call with one answer. Raises RpcError."""
    return _decoded(await request.body() or b"{}")


async def streamed(request: Request) -> dict[str, Any]:
    """The one message of a call whose answer is a stream. Raises RpcError."""
    data = await request.body()
    if len(data) < ENVELOPE.size:
        raise RpcError("invalid_argument", "the request has no message")
    _, size = ENVELOPE.unpack_from(data)
    return _decoded(data[ENVELOPE.size : ENVELOPE.size + size])


async def messages(request: Request) -> AsyncIterator[dict[str, Any]]:
    """The messages of a call that sends a stream, as they come. Raises RpcError."""
    kept = bytearray()
    async for data in request.stream():
        kept += data
        at = 0
        while len(kept) - at >= ENVELOPE.size:
            flags, size = ENVELOPE.unpack_from(kept, at)
            if size > LARGEST_REQUEST or flags & COMPRESSED:
                raise RpcError("unimplemented", "a message is compressed, or too large")
            begin = at + ENVELOPE.size
            if len(kept) < begin + size:
                break
            if not flags & LAST:
                yield _decoded(bytes(kept[begin : begin + size]))
            at = begin + size
        del kept[:at]
    if kept:
        raise RpcError("invalid_argument", "the last message is cut off")


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json_form.decode(data, dict[str, Any])
    except msgspec.MsgspecError as error:
        raise RpcError("invalid_argument", str(error)) from error
    return found


def stream(messages: AsyncIterator[dict[str, Any]]) -> Response:
    """The answer of a call that gives messages until it ends, or fails with an RpcError."""
    return StreamingResponse(_envelopes(messages), media_type="application/connect+json")


async def _envelopes(messages: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    end: dict[str, Any] = {}
    try:
        async for message in messages:
            yield _envelope(0, message)
    except RpcError as error:
        end = {"error": body_of(error)}
    except SandboxClosed:  # not «was not found», which clients take for an answer to a call that began later
        end = {"error": body_of(RpcError("unavailable", "the sandbox ended before the stream did"))}
    except DutyfreeError as error:
        end = {"error": body_of(rpc_error(error))}
    yield _envelope(LAST, end)


def _envelope(flags: int, message: dict[str, Any]) -> bytes:
    data = msgspec.json.encode(message)
    return ENVELOPE.pack(flags, len(data)) + data


def deadline(request: Request) -> float | None:
    """The seconds that the client gives the call; None for no limit."""
    value = request.headers.get("connect-timeout-ms", "")
    return int(value) / 1000 if value.isdigit() and int(value) > 0 else None


async def in_time(source: AsyncIterator[T], seconds: float | None) -> AsyncIterator[T]:
    """The items of a source. Raises RpcError at the deadline of the call."""
    loop = asyncio.get_running_loop()
    end = None if seconds is None else loop.time() + seconds
    while True:
        try:
            left = None if end is None else max(0.0, end - loop.time())
            item = await asyncio.wait_for(anext(source), left)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise RpcError("deadline_exceeded", f"the call took longer than {seconds:g} s") from None
        yield item


def unzipped_size(data: bytes) -> int:
    """How many bytes a gzip body says that it has. Raises RpcError for more than a request may have."""
    size = int.from_bytes(data[-4:], "little")
    if size > LARGEST_REQUEST:
        raise RpcError("invalid_argument", f"the body has more than {LARGEST_REQUEST} bytes")
    return size


def unzipped(data: bytes, size: int) -> bytes:
    """Raises RpcError for what has another size: a few bytes can stand for gigabytes."""
    unzip = zlib.decompressobj(wbits=31)
    try:
        found = unzip.decompress(data, size + 1)
    except zlib.error as error:
        raise RpcError("invalid_argument", f"the body is not gzip: {error}") from error
    if not unzip.eof:
        raise RpcError("invalid_argument", f"the body is cut off, or has more than its {size} bytes")
    return found
