"""The blocking face: the same objects, each call run to its end on a loop in a thread of its own.

>>> with dutyfree.sync.open("bare") as substrate, substrate.sandbox() as sandbox:
...     sandbox.exec("echo hello").stdout

It is one generic wrapper, so whatever the async objects learn is here too: awaitables are awaited,
async contexts become contexts, async iterators become iterators.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal

from dutyfree import contract, substrates

_WRAPPED = (contract.Substrate, contract.Sandbox)


@contextmanager
def open(name: str, **options: Any) -> Iterator[Any]:  # noqa: A001
    """Open a substrate for blocking use. Raises what ``dutyfree.open`` raises."""
    opened = substrates.open(name, **options)
    with start_blocking_portal() as portal, _context(portal, opened) as substrate:
        yield substrate


class _Blocking:
    """Stands before one async object; attributes pass through, calls block."""

    def __init__(self, portal: BlockingPortal, inner: Any) -> None:
        self._portal = portal
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            return _blocking(self._portal, self._portal.call(_resolve, value, args, kwargs))

        return call

    def __repr__(self) -> str:
        return f"<blocking {self._inner!r}>"


async def _resolve(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = function(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result


def _blocking(portal: BlockingPortal, value: Any) -> Any:
    if isinstance(value, AbstractAsyncContextManager):
        return _context(portal, value)
    if isinstance(value, AsyncIterator):
        return _iterate(portal, value)
    if isinstance(value, Sequence) and value and isinstance(value[0], _WRAPPED):
        return [_Blocking(portal, item) for item in value]
    if isinstance(value, _WRAPPED) or type(value).__module__.startswith("dutyfree.substrates."):
        return _Blocking(portal, value)
    return value


@contextmanager
def _context(portal: BlockingPortal, context: AbstractAsyncContextManager[Any]) -> Iterator[Any]:
    wrapped: AbstractContextManager[Any] = portal.wrap_async_context_manager(context)
    with wrapped as value:
        yield _blocking(portal, value)


def _iterate(portal: BlockingPortal, items: AsyncIterator[Any]) -> Iterator[Any]:
    async def following() -> tuple[Any, ...]:
        try:
            return (await anext(items),)
        except StopAsyncIteration:
            return ()

    while found := portal.call(following):
        yield found[0]
