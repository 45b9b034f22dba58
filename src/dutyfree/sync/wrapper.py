"""The wrapper: an object whose calls run on an event loop in its own thread."""

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
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import msgspec
from anyio.from_thread import BlockingPortal, start_blocking_portal

from dutyfree import abilities, contract, substrates
from dutyfree.contract.errors import SandboxClosed

if TYPE_CHECKING:
    from dutyfree.substrates.registry import NativeName
    from dutyfree.sync import types

T = TypeVar("T")

_WRAPPED = (contract.Substrate, contract.Sandbox, abilities.Leasing)
_DATA = (msgspec.Struct, bytes, str, int, float, dict, os.PathLike)


@overload
def open(name: NativeName, **options: Any) -> AbstractContextManager[types.Native]: ...
@overload
def open(name: Literal["docker"], **options: Any) -> AbstractContextManager[types.DockerSubstrate]: ...
@overload
def open(name: Literal["bare"], **options: Any) -> AbstractContextManager[types.Bare]: ...
@overload
def open(name: Literal["scripted"], **options: Any) -> AbstractContextManager[types.Scripted]: ...
@overload
def open(name: str, **options: Any) -> AbstractContextManager[types.Substrate]: ...


def open(name: str, **options: Any) -> AbstractContextManager[Any]:
    """Open a substrate for blocking use. It raises the errors of ``dutyfree.open``, at the same moments."""
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
                # A forked process does not have the loop's thread, so the portal must not wait for it.
                portal._event_loop_thread_id = None


class _Blocking:
    """Wraps one async object: attributes pass through, calls block."""

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
    return _wrapper_class(type(inner))(portal, inner)  # type: ignore[arg-type]  # types are hashable


@functools.cache
def _wrapper_class(inner: type) -> type[_Blocking]:
    """A wrapper class with the public names of ``inner``: ``isinstance`` looks for them in the class."""
    names = (name for name in dir(inner) if not name.startswith("_"))
    return type(f"Blocking{inner.__name__}", (_Blocking,), {name: _forwarded(name) for name in names})


def _forwarded(name: str) -> property:
    return property(lambda self: self.__getattr__(name))


def _plain(argument: Any) -> Any:
    return argument._inner if isinstance(argument, _Blocking) else argument


def _run(portal: BlockingPortal, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run a function on the loop. Raises its errors, and SandboxClosed once the context of ``open`` ended."""
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
    """Turn a result into what the caller of a blocking object gets."""
    # First, because a substrate or a pool can also be an async context manager.
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
    return _wrapped(portal, value)  # a shell, a process, or another object of a substrate


@contextmanager
def _context(portal: BlockingPortal, context: AbstractAsyncContextManager[Any]) -> Iterator[Any]:
    wrapped: AbstractContextManager[Any] = portal.wrap_async_context_manager(context)
    with _skipped_in_fork(wrapped) as value:
        yield _blocking(portal, value)


@contextmanager
def _skipped_in_fork(context: AbstractContextManager[T]) -> Iterator[T]:
    """Do not exit the context in a forked process, where no loop runs that could exit it."""
    owner = os.getpid()
    with ExitStack() as stack:
        value = stack.enter_context(context)
        try:
            yield value
        finally:
            if os.getpid() != owner:
                stack.pop_all()


def _iterate(portal: BlockingPortal, items: AsyncIterator[Any]) -> Iterator[Any]:
    async def next_item() -> tuple[Any, ...]:
        try:
            return (await anext(items),)
        except StopAsyncIteration:
            return ()

    try:
        while found := portal.call(next_item):
            yield found[0]
    finally:
        # Do not wait: the garbage collector may call this at any time and in any thread.
        if isinstance(items, AsyncGenerator):
            with suppress(RuntimeError):  # the loop has ended
                portal.start_task_soon(items.aclose)
