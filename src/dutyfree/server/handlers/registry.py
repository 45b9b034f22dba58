"""The table of handlers, and what a handler knows about its call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from dutyfree.server.call_events import recorded
from dutyfree.server.sandboxes import Held
from dutyfree.server.service import Service


class Context(Protocol):
    """A call that runs: for whom, in which sandbox, and its streams."""

    @property
    def service(self) -> Service: ...

    @property
    def tenant(self) -> str: ...

    @property
    def held(self) -> Held:
        """The sandbox of the call. Raises SandboxClosed."""

    @property
    def sandbox_id(self) -> str:
        """The id that the call names; empty for none."""

    async def send(self, item: object) -> None:
        """Send an item to the client, when it has room."""

    async def receive(self) -> Any:
        """The next item of the client; None at the end of its input."""


class DirectCall:
    """The context of a call that a route of the server makes. It has no items."""

    def __init__(self, service: Service, tenant: str, sandbox: str = "") -> None:
        self.service = service
        self.tenant = tenant
        self.sandbox_id = sandbox

    @property
    def held(self) -> Held:
        return self.service.sandboxes.get(self.tenant, self.sandbox_id)

    async def send(self, _item: object) -> None:
        raise AssertionError("this call has no items")

    async def receive(self) -> Any:
        raise AssertionError("this call has no items")


Handler = Callable[[Context, Any], Awaitable[Any]]
HANDLERS: dict[str, Handler] = {}
"""The handler of each call of ``wire.calls.CALLS``, by the name of the call."""


def handles(function: Handler) -> Handler:
    HANDLERS[function.__name__.rstrip("_")] = recorded(function)
    return function
