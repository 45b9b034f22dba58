"""Bounds of what the server holds in memory for clients: the body of one request, all bodies, all answers.

They hold for every route, also for those of other people's protocols, because they are outside of the routes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dutyfree.contract.errors import CollectError, Exhausted
from dutyfree.engine.host import capacity
from dutyfree.server.access import Refused
from dutyfree.server.connections import CONNECTION, HttpConnection
from dutyfree.wire.errors import describe

LARGEST_REQUEST = 256 << 20
"""Bytes of the largest request, and of the largest file that is read in one piece."""
LARGE = 64 << 10
"""Bytes of arguments and answers from which on they count as memory that the tenant uses."""


class TooLarge(Refused):
    """A request has more bytes than any may have."""

    def __init__(self) -> None:
        super().__init__(413, "too_large", f"a request may have {LARGEST_REQUEST} bytes")


class TooMuch(Refused):
    """The server holds too much for one client, or for all."""

    def __init__(self) -> None:
        what = "the server holds too many bytes of requests and answers in memory"
        super().__init__(503, "busy", what, "read the answers, and retry later")


def answer_lost() -> CollectError:
    """The error instead of an answer that cannot be kept until the client reads.

    What was asked for has happened, so nothing may say that it can be tried again.
    """
    return CollectError(
        "the call ended, and its answer was dropped: the server holds too many bytes for you in memory",
        remedy="read the answers to other calls sooner; make this call again only if it may run twice",
    )


class AnswerLost(Refused):
    """A request that may have changed something was carried out, and there is no room for its answer."""

    def __init__(self) -> None:
        lost = answer_lost()
        super().__init__(500, "collect", lost.message)  # after a 503, some clients try again by themselves
        self.error = describe(lost)


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
    budget: ByteBudget,
    tenant_of: Callable[[Scope], str | None],
) -> ASGIApp:
    """The same application, which gets no body that is too large, unless it ``passes_on`` the parts.

    Its large answers count until the clients have taken them. ``tenant_of`` says whose a request is, as far
    as that is known when the application reads its body.
    """

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or passes_on(scope):
            await app(scope, receive, send)
            return

        def holder() -> str:
            return tenant_of(scope) or _address(scope)

        body = _Body(budget, holder, receive)
        answer = _Answer(budget, holder, send, scope)

        async def noticed(message: Message) -> None:
            if body.refused is None:  # otherwise what a route makes of it is not the truth
                await answer.send(message)

        try:
            if declared_size(scope) > LARGEST_REQUEST:
                raise TooLarge
            await app(scope, body.receive, noticed)
            if body.refused is not None:
                raise body.refused
        except Refused as error:
            if not answer.started:
                await _refuse(send, error)
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


class _Answer:
    """The answer to one request. A large one is counted until the client has taken it."""

    def __init__(self, budget: ByteBudget, holder: Callable[[], str], send: Send, scope: Scope) -> None:
        self._budget = budget
        self._find_holder = holder
        self._send = send
        self._connection: HttpConnection = scope[CONNECTION]
        self._refusal = TooMuch if scope["method"] in ("GET", "HEAD") else AnswerLost
        self._head: Message | None = None
        """That of a large answer, which is sent with its body."""
        self.started = False

    async def send(self, message: Message) -> None:
        """Raises TooMuch or AnswerLost for a large answer without room. Then nothing was sent."""
        if message["type"] == "http.response.start":
            if declared_size(message) > LARGE:
                self._head = message
                return
        elif self._head is not None:
            await self._send_large(self._head, message)
            return
        self.started = True
        await self._send(message)

    async def _send_large(self, head: Message, message: Message) -> None:
        self._head = None
        holder = self._find_holder()
        size = 0 if message.get("more_body") else len(message["body"])  # of a file, one part is in memory
        try:
            self._budget.take(holder, size)
        except Exhausted as error:
            raise self._refusal() from error
        try:
            self.started = True
            await self._send(head)
            await self._send(message)
            if size:
                await self._connection.flow.drain()
        finally:
            self._budget.give_back(holder, size)


def _address(scope: Scope) -> str:
    """The address of a client. The name of a tenant has no colon, so it is none of these."""
    return f":{scope['client'][0]}" if scope.get("client") else ":"


def declared_size(message: Scope | Message) -> int:
    """The size that a request or an answer says it has; 0 if it does not say."""
    for name, value in message["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0


async def _refuse(send: Send, error: Refused) -> None:
    body = msgspec.json.encode({"error": error.error}) + b"\n"
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *([(b"retry-after", b"1")] if error.status == 503 else []),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
