"""Bounds of what clients send: the body of one request, and all bodies that the server holds in memory.

They hold for every route, also for those of other people's protocols, because they are outside of the routes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dutyfree.contract.errors import Exhausted
from dutyfree.engine.host import capacity
from dutyfree.server.access import Refused

LARGEST_REQUEST = 256 << 20
"""Bytes of the largest request, and of the largest file that is read in one piece."""

TENANT = "dutyfree.tenant"
"""The key in the scope of a request under which a route says whose it is, if no token does."""


class TooLarge(Refused):
    """A request has more bytes than any may have."""

    def __init__(self) -> None:
        super().__init__(413, "too_large", f"a request may have {LARGEST_REQUEST} bytes")


class TooMuch(Refused):
    """The server holds too much for one client, or for all."""

    def __init__(self) -> None:
        super().__init__(503, "busy", "the server holds too many bytes of requests in memory", "retry later")


class ByteBudget:
    """Bytes that the server holds for clients: in all, and of each at most half of that."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._used: Counter[str] = Counter()

    def take(self, holder: str, size: int) -> None:
        """Raises Exhausted, and takes nothing."""
        if self._used[holder] + size > self._total // 2 or self._used.total() + size > self._total:
            raise Exhausted(
                "the server holds too many bytes of your requests and answers",
                remedy="read the answers, and send less at once",
                numbers={"bytes": self._used[holder], "retry_after": 1.0},
            )
        self._used[holder] += size

    def give_back(self, holder: str, size: int) -> None:
        self._used[holder] -= size
        if self._used[holder] <= 0:
            del self._used[holder]

    @contextmanager
    def held(self, holder: str, size: int) -> Iterator[None]:
        """Raises Exhausted."""
        self.take(holder, size)
        try:
            yield
        finally:
            self.give_back(holder, size)


def default_budget() -> ByteBudget:
    """A quarter of the host's memory, but room for four of the largest requests."""
    return ByteBudget(max(capacity.share_of_memory(), 4 * LARGEST_REQUEST))


def bounded(
    app: ASGIApp,
    passes_on: Callable[[Scope], bool],
    budget: ByteBudget | None = None,
    tenant_of: Callable[[Scope], str | None] = lambda _: None,
) -> ASGIApp:
    """The same application, which gets no body that is too large, unless it ``passes_on`` the parts.

    ``tenant_of`` says whose a request is, as far as that is known when the application reads its body.
    """
    kept = budget or default_budget()

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or passes_on(scope):
            await app(scope, receive, send)
            return
        body = _Body(kept, lambda: tenant_of(scope) or _address(scope), receive)
        started = False

        async def noticed(message: Message) -> None:
            nonlocal started
            if body.refused is None:  # otherwise what a route makes of it is not the truth
                started = True
                await send(message)

        try:
            if _declared(scope) > LARGEST_REQUEST:
                raise TooLarge
            await app(scope, body.receive, noticed)
            if body.refused is not None:
                raise body.refused
        except Refused as error:
            if not started:
                await _answer(send, error)
        finally:
            body.forget()

    return guarded


class _Body:
    """The body of one request, counted as it comes."""

    def __init__(self, budget: ByteBudget, holder: Callable[[], str], receive: Receive) -> None:
        self._budget = budget
        self._find_holder = holder
        self._holder = ""
        self._receive = receive
        self._size = 0
        self.refused: Refused | None = None
        """Why the rest of the body was not read."""

    async def receive(self) -> Message:
        message = await self._receive()
        size = len(message.get("body", b""))
        if size:
            if self._size + size > LARGEST_REQUEST:
                self.refused = TooLarge()
                raise self.refused
            self._holder = self._holder or self._find_holder()
            try:
                self._budget.take(self._holder, size)
            except Exhausted as error:
                self.refused = TooMuch()
                raise self.refused from error
            self._size += size
        return message

    def forget(self) -> None:
        if self._size:
            self._budget.give_back(self._holder, self._size)


def _address(scope: Scope) -> str:
    """The address of a client. The name of a tenant has no colon, so it is none of these."""
    return f":{scope['client'][0]}" if scope.get("client") else ":"


def _declared(scope: Scope) -> int:
    """The size that a request says it has; 0 if it does not say."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0


async def _answer(send: Send, error: Refused) -> None:
    body = msgspec.json.encode({"error": error.error}) + b"\n"
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *([(b"retry-after", b"1")] if error.status == 503 else []),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
