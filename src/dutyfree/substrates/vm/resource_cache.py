"""What many sandboxes of one opening use, such as disks and saved machines: made once, closed when unused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

import anyio
import anyio.to_thread


class Closable(Protocol):
    """A resource."""

    def close(self) -> None:
        """Blocks."""


Resource = TypeVar("Resource", bound=Closable)


class _Entry(Generic[Resource]):
    """A place for one resource, from its first user on."""

    def __init__(self) -> None:
        self.resource: Resource | None = None
        self.users = 0
        self.lock = anyio.Lock()


class ResourceCache(Generic[Resource]):
    """Resources by their key. Of those without a user, the most recently used ones stay."""

    def __init__(self, idle: int = 8) -> None:
        """``idle``: how many stay."""
        self._idle = idle
        self._entries: dict[Hashable, _Entry[Resource]] = {}
        """The most recently used last."""

    @asynccontextmanager
    async def use(self, key: Hashable, make: Callable[[], Awaitable[Resource]]) -> AsyncIterator[Resource]:
        """The resource of a key, made first if there is none. Raises what ``make`` raises.

        Others who want it wait for ``make`` without a thread.
        """
        found = self._entries.pop(key, None)
        entry = self._entries[key] = _Entry() if found is None else found
        entry.users += 1
        try:
            async with entry.lock:
                if entry.resource is None:
                    entry.resource = await make()
            yield entry.resource
        finally:
            entry.users -= 1
            with anyio.CancelScope(shield=True):
                for unused in self._unused():
                    await anyio.to_thread.run_sync(unused.close)

    def _unused(self) -> list[Resource]:
        """Take out those to close, because too many have no user."""
        free = {key: entry.resource for key, entry in self._entries.items() if not entry.users}
        made = [key for key, resource in free.items() if resource is not None]
        kept = {*made[-self._idle :]} if self._idle else set()
        gone = [key for key in free if key not in kept]  # also those that could not be made
        return [resource for key in gone if (resource := self._entries.pop(key).resource) is not None]

    def close(self) -> None:
        """Close all. Blocks."""
        while self._entries:
            if (resource := self._entries.popitem()[1].resource) is not None:
                resource.close()
