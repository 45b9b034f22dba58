"""A peer that answers in time or not at all: it has a thread of its own, and is left behind if it hangs.

A command or a connection could be given up otherwise; a directory of a file server that is gone could not.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from time import monotonic
from typing import Any, TypeVar

from dutyfree.contract.errors import CreateError
from dutyfree.engine.exchange import sources
from dutyfree.engine.exchange.chains import Blob, LayerChain
from dutyfree.engine.exchange.messages import PATIENCE
from dutyfree.engine.exchange.protocol import BlobRequest, Peer
from dutyfree.engine.images.streams import Readable
from dutyfree.engine.store.cancel import CancelToken
from dutyfree.engine.store.store import Store

SILENCE = 10.0
"""Seconds that one may need to be reached and to say what it has, and for each piece of what it sends."""

T = TypeVar("T")


class DeadlinePeer:
    """One conversation. Its methods block, and raise CreateError and Cancelled; ``close`` it in the end."""

    def __init__(self, source: str, store: Store, cancel: CancelToken) -> None:
        self.source = source
        self._cancel = cancel
        self._inner = cancel.child()
        self._calls: queue.SimpleQueue[Callable[[Peer | None], None] | None] = queue.SimpleQueue()
        self._last: Future[Any] = Future()
        self._broken: BaseException | None = None
        self.thread = threading.Thread(
            target=self._talk, args=(store,), name=f"dutyfree-peer {source}", daemon=True
        )
        self.thread.start()

    def asked(self, wanted: Sequence[str]) -> Future[list[LayerChain]]:
        """Ask what it has, without waiting: ``heard`` gives the answer."""
        return self._begun(lambda peer: peer.offer(wanted))

    def heard(self, answer: Future[T], until: float = float("inf")) -> T:
        """An answer that comes before that time of the monotonic clock."""
        while not futures.wait([answer], PATIENCE).done:
            self._cancel.check()
            if monotonic() > until:
                raise silent()
        return answer.result()

    def offer(self, wanted: Sequence[str]) -> list[LayerChain]:
        return self.heard(self.asked(wanted), monotonic() + SILENCE)

    def pack(self, keys: Sequence[str]) -> dict[str, tuple[Blob, ...]]:
        """May take long: it is packed now, if nobody has wanted it lately."""
        return self.heard(self._begun(lambda peer: peer.pack(keys)))

    @contextlib.contextmanager
    def send(self, blobs: Sequence[BlobRequest]) -> Iterator[Readable]:
        stack = contextlib.ExitStack()  # of the thread
        begun = self._begun(lambda peer: stack.enter_context(peer.send(blobs)))
        stream = self.heard(begun, monotonic() + SILENCE)
        try:
            yield _Pieces(self, stream)
        finally:
            self._calls.put(lambda _: stack.close())

    def read(self, stream: Readable, size: int) -> bytes:
        return self.heard(self._begun(lambda _: stream.read(size)), monotonic() + SILENCE)

    def close(self) -> bool:
        """Hang up, without waiting: the thread cleans up as soon as it can. Whether it hangs."""
        self._calls.put(None)
        if self._last.done():
            return False
        self._inner.set()
        return True

    # --- In the thread ------------------------------------------------------------------------------

    def _begun(self, function: Callable[[Peer], T]) -> Future[T]:
        answer: Future[T] = Future()
        self._last = answer

        def call(peer: Peer | None) -> None:
            try:
                if peer is None:
                    raise self._broken or CreateError("the peer is gone")
                answer.set_result(function(peer))
            except BaseException as error:  # noqa: BLE001 (raised where the answer is heard)
                answer.set_exception(error)

        self._calls.put(call)
        return answer

    def _talk(self, store: Store) -> None:
        try:
            with sources.opened(self.source, store, self._inner, alone=True) as peer:
                while call := self._calls.get():
                    call(peer)
                return
        except BaseException as error:  # noqa: BLE001 (raised where the answers are heard)
            self._broken = error
        while call := self._calls.get():
            call(None)


def silent() -> CreateError:
    return CreateError(f"the peer said nothing for {SILENCE:g} s")


class _Pieces:
    def __init__(self, timely: DeadlinePeer, stream: Readable) -> None:
        self._timely = timely
        self._stream = stream

    def read(self, size: int, /) -> bytes:
        return self._timely.read(self._stream, size)
