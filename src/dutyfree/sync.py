"""The blocking face: the same objects, each call run to its end on a loop in a thread of its own.

>>> with dutyfree.sync.open("bare") as substrate, substrate.sandbox() as sandbox:
...     sandbox.exec("echo hello").stdout

It is one generic wrapper, so whatever the async objects learn is here too: awaitables are awaited,
async contexts become contexts, async iterators become iterators.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from typing import Any

import msgspec
from anyio.from_thread import BlockingPortal, start_blocking_portal

from dutyfree import contract, substrates

_WRAPPED = (contract.Substrate, contract.Sandbox)
_DATA = (msgspec.Struct, bytes, str, int, float, dict)


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


def _wrapped(portal: BlockingPortal, inner: Any) -> _Blocking:
    return _face(type(inner))(portal, inner)  # type: ignore[arg-type]  # types are hashable


@functools.cache
def _face(inner: type) -> type[_Blocking]:
    """A class with the public names of ``inner``: asking for an ability looks for them in the class."""
    names = (name for name in dir(inner) if not name.startswith("_"))
    return type(f"Blocking{inner.__name__}", (_Blocking,), {name: _passing(name) for name in names})


def _passing(name: str) -> property:
    return property(lambda self: self.__getattr__(name))


async def _resolve(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = function(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result


def _blocking(portal: BlockingPortal, value: Any) -> Any:
    """What the caller of a blocking object sees of a result."""
    # First, for a substrate may well be its own context.
    if isinstance(value, _WRAPPED):
        return _wrapped(portal, value)
    if isinstance(value, AbstractAsyncContextManager):
        return _context(portal, value)
    if isinstance(value, AsyncIterator):
        return _iterate(portal, value)
    if isinstance(value, list | tuple):
        return type(value)(_blocking(portal, item) for item in value)
    if value is None or isinstance(value, _DATA):
        return value
    return _wrapped(portal, value)  # a shell, a process, or whatever else a substrate gives


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

    try:
        while found := portal.call(following):
            yield found[0]
    finally:
        if isinstance(items, AsyncGenerator):
            portal.call(items.aclose)
