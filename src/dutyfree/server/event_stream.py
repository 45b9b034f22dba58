"""``GET /v1/events``: the events of a server as server-sent events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

import dutyfree
from dutyfree.contract.errors import ArgumentError
from dutyfree.server import json_form
from dutyfree.server.access import OPERATOR, Access, Refused
from dutyfree.server.events import KEPT, LISTENERS, Events
from dutyfree.server.service import LOCAL
from dutyfree.server.tokens import FRESH
from dutyfree.wire.events import Bye, Event, Lost, Pool, State

QUIET = 15.0
"""Seconds of silence after which a comment is sent, so that both sides notice a lost connection."""

_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Content-Type-Options": "nosniff"}


async def stream(events: Events, access: Access, tenant: str, request: Request) -> Response:
    """Raises Refused, ArgumentError."""
    name = tenant
    scope = None if tenant in (LOCAL, OPERATOR) else tenant
    if events.crowded(name):
        raise Refused(429, "exhausted", f"{name} reads {LISTENERS} streams already", "end one of them")
    reader = Reader(events, access, request, name, scope)
    return StreamingResponse(reader.parts(), headers=_HEADERS, media_type="text/event-stream")


class Reader:
    """One client that listens. It has a position in a ring, and nothing is stored for it."""

    def __init__(
        self, events: Events, access: Access, request: Request, name: str, scope: str | None
    ) -> None:
        """``scope``: the tenant whose events it gets; None for all. Raises ArgumentError."""
        self._events = events
        self._access = access
        self._request = request
        self._name = name
        self._scope = scope
        self._ring = events.ring(scope)
        query = request.query_params
        self._replay = _number(query.get("replay", "0"))
        self._follows = query.get("follow", "true") != "false"
        self._pool: Pool | None = None

    async def parts(self) -> AsyncIterator[bytes]:
        """The stream, in parts of several events."""
        sent = checked = time.monotonic()
        if self._events.crowded(self._name):  # others came between the request and its answer
            yield self._bye(f"{self._name} reads {LISTENERS} streams already")
            return
        with self._events.listening(self._name):
            part, number = self._first()
            while True:
                changed = self._events.changed
                news, number = self._news(number)
                if part := part + news:
                    yield part
                    sent = time.monotonic()
                elif time.monotonic() - sent > QUIET:
                    yield b":\n\n"
                    sent = time.monotonic()
                if not self._follows:
                    return
                if time.monotonic() - checked > FRESH:
                    try:
                        await self._access.tenant(self._request)
                    except Refused as error:
                        yield self._bye(str(error))
                        return
                    checked = time.monotonic()
                if self._events.closed:
                    yield self._bye("the server ends")
                    return
                part = b""
                await changed.wait()

    def _first(self) -> tuple[bytes, int]:
        """The beginning of the stream, and the number of the last event that it stands for."""
        last = self._ring.last
        epoch, _, number = self._request.headers.get("last-event-id", "").rpartition("-")
        if epoch == self._events.epoch and number.isdecimal() and int(number) <= last:
            return b"", int(number)
        part = self._lost(None) if epoch else b""
        _, found = self._ring.after(max(0, last - self._replay))
        first = last - len(found) + 1
        part += b"".join(_frame(event, self._id(first + at)) for at, event in enumerate(found))
        return part + self._state(), last

    def _news(self, number: int) -> tuple[bytes, int]:
        """What there is after this number, and the new number."""
        lost, found = self._ring.after(number)
        if lost:
            return self._lost(lost) + self._state(), self._ring.last
        parts = [_frame(event, self._id(number + at)) for at, event in enumerate(found, 1)]
        pool = self._events.pool(self._scope)
        if self._pool is None or msgspec.structs.replace(pool, at=self._pool.at) != self._pool:
            self._pool = pool
            parts.append(_frame(pool))
        return b"".join(parts), number + len(found)

    def _id(self, number: int) -> str:
        return f"{self._events.epoch}-{number}"

    def _state(self) -> bytes:
        self._pool = self._events.pool(self._scope)
        state = State(
            at=time.time(),
            tenant=self._name,
            version=dutyfree.__version__,
            started=self._events.started,
            sees_all=self._scope is None,
            sandboxes=self._events.living(self._scope),
            pool=self._pool,
        )
        return _frame(state, self._id(self._ring.last))

    def _lost(self, count: int | None) -> bytes:
        return _frame(Lost(at=time.time(), tenant=self._name, events=count))

    def _bye(self, reason: str) -> bytes:
        return _frame(Bye(at=time.time(), tenant=self._name, reason=reason))


def _frame(event: Event, number: str = "") -> bytes:
    try:
        data = msgspec.json.encode(event)
    except UnicodeEncodeError:  # a name of a file that is no text
        data = json_form.dump(event)
    name = type(event).__name__.lower()
    return (f"id: {number}\n" if number else "").encode() + f"event: {name}\ndata: ".encode() + data + b"\n\n"


def _number(text: str) -> int:
    """Raises ArgumentError."""
    if not text.isdecimal() or len(text) > 9:
        raise ArgumentError(f"replay must be a number of events, not {text[:20]!r}")
    return min(int(text), KEPT)
