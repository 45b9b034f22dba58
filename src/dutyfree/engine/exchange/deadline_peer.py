"""A peer with a deadline for each answer.

Each peer has a thread of its own, which is abandoned if it hangs. A connection could be closed; but neither
looking up a host's name nor reading a directory of a dead file server can be interrupted.
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
from dutyfree.engine.exchange.protocol import Peer
from dutyfree.engine.images.streams import Readable
from dutyfree.engine.store.cancel import POLL_SECONDS, CancelToken
from dutyfree.engine.store.store import Store

ANSWER_SECONDS = 10.0
"""How long a peer may take to be reached and to offer, and for each piece of a blob."""

T = TypeVar("T")


class DeadlinePeer:
    """One conversation with a peer. Its methods block, and raise CreateError and Cancelled. Close it."""

    def __init__(
        self, source: str, store: Store, cancel: CancelToken, answer_seconds: float = ANSWER_SECONDS
    ) -> None:
        self.source = source
        self._answer_seconds = answer_seconds
        self._cancel = cancel
        self._abandon = cancel.child()
        self._calls: queue.SimpleQueue[Callable[[Peer | None], None] | None] = queue.SimpleQueue()
        self._last: Future[Any] = Future()
        self._failure: BaseException | None = None
        self.thread = threading.Thread(
            target=self._run, args=(store,), name=f"dutyfree-peer {source}", daemon=True
        )
        self.thread.start()

    def start_offer(self, wanted: Sequence[str]) -> Future[list[LayerChain]]:
        """Request an offer without waiting for it."""
        return self._call(lambda peer: peer.offer(wanted))

    def offer(self, wanted: Sequence[str]) -> list[LayerChain]:
        return self._wait(self.start_offer(wanted), self._deadline())

    def pack(self, keys: Sequence[str]) -> dict[str, tuple[Blob, ...]]:
        """Has no deadline: packing may take long."""
        return self._wait(self._call(lambda peer: peer.pack(keys)))

    @contextlib.contextmanager
    def open_blob(self, digest: str, position: int) -> Iterator[Readable]:
        stack = contextlib.ExitStack()  # used by the thread
        answer = self._call(lambda peer: stack.enter_context(peer.open_blob(digest, position)))
        stream = self._wait(answer, self._deadline())
        try:
            yield _PieceReader(self, stream)
        finally:
            self._calls.put(lambda _: stack.close())

    def read(self, stream: Readable, size: int) -> bytes:
        return self._wait(self._call(lambda _: stream.read(size)), self._deadline())

    def close(self) -> bool:
        """End the conversation without waiting for the thread. Returns whether the thread hangs."""
        self._calls.put(None)
        if self._last.done():
            return False
        self._abandon.set()
        return True

    def _deadline(self) -> float:
        return monotonic() + self._answer_seconds

    def _wait(self, answer: Future[T], deadline: float = float("inf")) -> T:
        while not futures.wait([answer], POLL_SECONDS).done:
            self._cancel.check()
            if monotonic() > deadline:
                raise no_answer(self._answer_seconds)
        return answer.result()

    # --- In the thread ------------------------------------------------------------------------------

    def _call(self, function: Callable[[Peer], T]) -> Future[T]:
        answer: Future[T] = Future()
        self._last = answer

        def call(peer: Peer | None) -> None:
            try:
                if peer is None:
                    raise self._failure or CreateError("the peer is gone")
                answer.set_result(function(peer))
            except BaseException as error:  # noqa: BLE001 (raised where the answer is awaited)
                answer.set_exception(error)

        self._calls.put(call)
        return answer

    def _run(self, store: Store) -> None:
        try:
            with sources.open_peer(self.source, store, self._abandon, unattended=True) as peer:
                while call := self._calls.get():
                    call(peer)
                return
        except BaseException as error:  # noqa: BLE001 (raised where the answers are awaited)
            self._failure = error
        while call := self._calls.get():
            call(None)


def no_answer(seconds: float) -> CreateError:
    return CreateError(f"the peer did not answer for {seconds:g} s")


class _PieceReader:
    def __init__(self, peer: DeadlinePeer, stream: Readable) -> None:
        self._peer = peer
        self._stream = stream

    def read(self, size: int, /) -> bytes:
        return self._peer.read(self._stream, size)
