"""The blocking face: the same objects, each call run to its end on a loop in a thread of its own.

>>> with dutyfree.sync.open("bare") as substrate, substrate.sandbox() as sandbox:
...     sandbox.exec("echo hello").stdout

It is one generic wrapper, so whatever the async objects learn is here too: awaitables are awaited,
async contexts become contexts, async iterators become iterators, and what an object has or gives is of this
kind too. Any thread may call, also one in which an event loop runs, which then stands still for so long.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    contextmanager,
    suppress,
)
from typing import Any, TypeVar

import msgspec
from anyio.from_thread import BlockingPortal, start_blocking_portal

from dutyfree import abilities, contract, substrates
from dutyfree.contract.errors import SandboxClosed

T = TypeVar("T")

_WRAPPED = (contract.Substrate, contract.Sandbox, abilities.Leasing)
_DATA = (msgspec.Struct, bytes, str, int, float, dict, os.PathLike)


def open(name: str, **options: Any) -> AbstractContextManager[Any]:
    """Open a substrate for blocking use. Raises what ``dutyfree.open`` raises, and when it does."""
    return _opened(substrates.open(name, **options))


@contextmanager
def _opened(opened: AbstractAsyncContextManager[contract.Substrate]) -> Iterator[Any]:
    owner = os.getpid()
    with start_blocking_portal() as portal:
        try:
            with _context(portal, opened) as substrate:
                yield substrate
        finally:
            if os.getpid() != owner:
                # A forked copy has no thread that runs the loop: the portal is to know, and not to wait.
                portal._event_loop_thread_id = None


class _Blocking:
    """Stands before one async object; attributes pass through, calls block."""

    def __init__(self, portal: BlockingPortal, inner: Any) -> None:
        self._portal = portal
        self._inner = inner
        self._owner = os.getpid()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value):
            return value if name.startswith("_") else _blocking(self._portal, value)

        def call(*args: Any, **kwargs: Any) -> Any:
            if os.getpid() != self._owner:
                raise SandboxClosed(
                    "this process is a fork of the one that opened the substrate",
                    remedy="open a substrate of its own after os.fork",
                )
            plain = [_plain(one) for one in args]
            named = {key: _plain(one) for key, one in kwargs.items()}
            return _blocking(self._portal, _run(self._portal, value, plain, named))

        return call

    def __repr__(self) -> str:
        return f"<blocking {self._inner!r}>"

    def __str__(self) -> str:
        return str(self._inner)


def _wrapped(portal: BlockingPortal, inner: Any) -> _Blocking:
    return _face(type(inner))(portal, inner)  # type: ignore[arg-type]  # types are hashable


@functools.cache
def _face(inner: type) -> type[_Blocking]:
    """A class with the public names of ``inner``: asking for an ability looks for them in the class."""
    names = (name for name in dir(inner) if not name.startswith("_"))
    return type(f"Blocking{inner.__name__}", (_Blocking,), {name: _passing(name) for name in names})


def _passing(name: str) -> property:
    return property(lambda self: self.__getattr__(name))


def _plain(argument: Any) -> Any:
    return argument._inner if isinstance(argument, _Blocking) else argument


def _run(portal: BlockingPortal, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Raises what it raises, and SandboxClosed where the context of ``open`` was left, or thrown away."""
    try:
        begun = portal.start_task_soon(_resolve, function, args, kwargs)
    except RuntimeError as error:
        if "not running" not in str(error):
            raise
        raise SandboxClosed(
            "the substrate is closed", remedy="use it inside of: with dutyfree.sync.open(…) as substrate"
        ) from None
    return begun.result()


async def _resolve(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    result = function(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result


def _blocking(portal: BlockingPortal, value: Any) -> Any:
    """What the caller of a blocking object sees of a result."""
    # First, for a substrate may well be its own context, and so is a pool.
    if isinstance(value, _WRAPPED):
        return _wrapped(portal, value)
    if isinstance(value, AbstractAsyncContextManager):
        return _context(portal, value)
    if isinstance(value, AsyncIterator):
        return _iterate(portal, value)
    if type(value) in (list, tuple):
        return type(value)(_blocking(portal, item) for item in value)
    if value is None or isinstance(value, (*_DATA, tuple)):
        return value
    return _wrapped(portal, value)  # a shell, a process, or whatever else a substrate gives


@contextmanager
def _context(portal: BlockingPortal, context: AbstractAsyncContextManager[Any]) -> Iterator[Any]:
    wrapped: AbstractContextManager[Any] = portal.wrap_async_context_manager(context)
    with _of_this_process(wrapped) as value:
        yield _blocking(portal, value)


@contextmanager
def _of_this_process(context: AbstractContextManager[T]) -> Iterator[T]:
    """In a forked copy, where there is no loop that could end anything, it is left without a word."""
    owner = os.getpid()
    with ExitStack() as stack:
        value = stack.enter_context(context)
        try:
            yield value
        finally:
            if os.getpid() != owner:
                stack.pop_all()


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
        # Not waited for: this may be the garbage collector, at any time and in any thread.
        if isinstance(items, AsyncGenerator):
            with suppress(RuntimeError):  # the loop has ended, and all of it
                portal.start_task_soon(items.aclose)
