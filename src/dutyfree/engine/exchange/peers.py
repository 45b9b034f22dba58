"""Ask peers for the layers of a recipe before they are built.

All peers are asked at once. The deepest offer wins; of equal ones, the first. A peer that is gone, hangs, or
sends wrong data costs some seconds, is logged once, and is not asked again for a while, longer each time. In
all these cases the stage is built here.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from time import monotonic
from typing import NamedTuple, Self

import msgspec

from dutyfree.engine.exchange import chains
from dutyfree.engine.exchange.chains import LayerChain
from dutyfree.engine.exchange.deadline_peer import ANSWER_SECONDS, DeadlinePeer, no_answer
from dutyfree.engine.exchange.fetcher import Fetcher, FetchResult, LayerBusy
from dutyfree.engine.store.cancel import POLL_SECONDS, Cancelled, CancelToken
from dutyfree.engine.store.store import Store
from dutyfree.printable import printable_line

BUILD_SECONDS_MIN = 0.25
"""Layers that are built faster than this are not fetched."""
FETCHES_MAX = 8
"""Chains that are fetched at the same time."""
HANGING_MAX = 4
"""A peer with this many hanging threads is not asked until some have ended."""
CLOSE_SECONDS = 2.0
"""How long ``close`` waits for conversations to end."""
ABSENT_MAX = 4096
"""Keys that are remembered as absent at all peers."""
FAILURE_LENGTH_MAX = 500

_log = logging.getLogger(__name__)


class PeerTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts of a PeerSet, in seconds."""

    answer: float = ANSWER_SECONDS
    """How long a peer may take to offer, and for each piece of a blob."""
    absent: float = 30.0
    """How long a layer that no peer has is not requested again."""
    backoff: float = 5.0
    """How long a peer that failed is not asked. Doubles with each further failure."""
    backoff_max: float = 300.0
    build_min: float = BUILD_SECONDS_MIN
    """Layers that are built faster than this are not fetched."""


class PeerStats(msgspec.Struct, frozen=True):
    """Counters of one peer."""

    asked: int = 0
    chains: int = 0
    """Chains that were fetched from it."""
    layers: int = 0
    size: int = 0
    """Bytes that were fetched."""
    seconds: float = 0.0
    """Duration of all fetches."""
    failures: int = 0
    failure: str = ""
    """The last failure."""


class MissingLayers(NamedTuple):
    """The layers of a recipe on an image that are not on this machine."""

    identity: str
    """Identity of the image."""
    below: tuple[str, ...]
    """Keys of the layers above the image that are here, the lowest first."""
    wanted: tuple[str, ...]
    """Keys of those that are missing."""
    parent_build: str = ""
    """Build id of the last layer that is here."""


class _PeerState:
    """What is known of one peer. Guarded by the lock of the PeerSet."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.stats = PeerStats()
        self.failures_in_a_row = 0
        self.retry_at = 0.0
        self.hanging: list[threading.Thread] = []
        """Threads of abandoned conversations."""

    def count(self, **more: float) -> None:
        sums = {name: getattr(self.stats, name) + value for name, value in more.items()}
        self.stats = msgspec.structs.replace(self.stats, **sums)

    def is_usable(self, now: float) -> bool:
        self.hanging = [thread for thread in self.hanging if thread.is_alive()]
        return self.retry_at <= now and len(self.hanging) < HANGING_MAX


class _TimeLimit:
    """A child token that is set after some seconds."""

    def __init__(self, cancel: CancelToken, seconds: float) -> None:
        self._outer = cancel
        self.cancel = cancel.child()
        self._timer = threading.Timer(seconds, self.cancel.set)
        self._timer.daemon = True

    @property
    def is_exceeded(self) -> bool:
        return self.cancel.is_set() and not self._outer.is_set()

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


class _Conversation(NamedTuple):
    state: _PeerState
    peer: DeadlinePeer


class _Offer(NamedTuple):
    chain: LayerChain
    state: _PeerState
    peer: DeadlinePeer


class PeerSet:
    """The peers of one node. Thread-safe. ``timing`` may be replaced at any time."""

    def __init__(
        self, sources: Sequence[str], fetch_seconds: float, timing: PeerTiming | None = None
    ) -> None:
        self.timing = timing or PeerTiming()
        self._peers = [_PeerState(source) for source in dict.fromkeys(sources)]
        self._fetch_seconds = fetch_seconds
        """The longest time for one fetch."""
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(FETCHES_MAX)
        self._absent: dict[str, float] = {}
        """Keys that no peer has, and until when they are not requested again."""
        self._fetched: set[str] = set()
        self._ending: list[threading.Thread] = []

    @property
    def stats(self) -> dict[str, PeerStats]:
        return {peer.source: peer.stats for peer in self._peers}

    def fetch(self, store: Store, missing: MissingLayers, cancel: CancelToken) -> None:
        """Fetch as many of the missing layers as peers have. Blocks. Raises only Cancelled."""
        now = monotonic()
        with self._lock:
            usable = [peer for peer in self._peers if peer.is_usable(now)]
            is_absent = self._absent.get(missing.wanted[0], 0.0) > now
        if is_absent or not usable or not self._acquire_slot(cancel):
            return
        try:
            with (
                _TimeLimit(cancel, self._fetch_seconds) as limit,
                self._conversations(usable, store, limit.cancel) as conversations,
            ):
                self._fetch(store, missing, conversations, limit)
        except RuntimeError as error:  # the system has no more threads
            _log.warning("peers cannot be asked for layers: %s", error)
        finally:
            self._slots.release()

    def pop_fetched(self, key: str) -> bool:
        """Whether this layer was fetched. True only once for each fetch."""
        with self._lock:
            was_fetched = key in self._fetched
            self._fetched.discard(key)
        return was_fetched

    def close(self) -> None:
        """Wait briefly for conversations that were closed. Blocks."""
        until = monotonic() + CLOSE_SECONDS
        for thread in self._ending:
            thread.join(max(0.0, until - monotonic()))

    # --- One fetch ----------------------------------------------------------------------------------

    def _acquire_slot(self, cancel: CancelToken) -> bool:
        """Wait for a free slot; False if none becomes free in time."""
        until = monotonic() + self.timing.answer
        while not self._slots.acquire(timeout=POLL_SECONDS):
            cancel.check()
            if monotonic() > until:
                return False
        return True

    @contextlib.contextmanager
    def _conversations(
        self, usable: Sequence[_PeerState], store: Store, cancel: CancelToken
    ) -> Iterator[list[_Conversation]]:
        conversations: list[_Conversation] = []
        try:
            for state in usable:
                peer = DeadlinePeer(state.source, store, cancel, self.timing.answer)
                conversations.append(_Conversation(state, peer))
            yield conversations
        finally:
            with self._lock:
                for state, peer in conversations:
                    state.count(asked=1)
                    if peer.close():
                        state.hanging.append(peer.thread)
                ended = [peer.thread for _, peer in conversations]
                self._ending = [thread for thread in (*self._ending, *ended) if thread.is_alive()]

    def _fetch(
        self, store: Store, missing: MissingLayers, conversations: list[_Conversation], limit: _TimeLimit
    ) -> None:
        for offer in self._offers(store, missing, conversations, limit):
            if chains.other_builds(store, offer.chain):  # layers came from another peer before it failed
                continue
            started, fetcher = monotonic(), Fetcher(store, offer.peer, cancel=limit.cancel, eager=True)
            try:
                done = fetcher.fetch(offer.chain)
            except LayerBusy:  # the caller waits for the process that builds it
                return
            except Cancelled:
                if not limit.is_exceeded:
                    raise
                self._failed(
                    offer.state, TimeoutError(f"the fetch took longer than {self._fetch_seconds:g} s")
                )
                break
            except Exception as error:  # noqa: BLE001 (whatever a peer does, the stage is built here)
                self._failed(offer.state, error)
                continue
            finally:
                with self._lock:
                    self._fetched.update(fetcher.fetched)
            self._succeeded(offer.state, done, monotonic() - started)
            self._remember_absent(missing.wanted[len(offer.chain.upper) - len(missing.below) :])
            return
        self._remember_absent(missing.wanted)

    def _offers(
        self, store: Store, missing: MissingLayers, conversations: list[_Conversation], limit: _TimeLimit
    ) -> list[_Offer]:
        """Collect offers, the best first. Does not wait for the others once a peer has everything."""
        names = missing.wanted[::-1]
        pending: dict[Future[list[LayerChain]], _Conversation] = {
            one.peer.start_offer(names): one for one in conversations
        }
        until = monotonic() + min(self.timing.answer, self._fetch_seconds / 2)
        offers: list[_Offer] = []
        longest = len(missing.below) + len(missing.wanted)
        while pending and not any(len(offer.chain.upper) == longest for offer in offers):
            for answer in futures.wait(pending, POLL_SECONDS, futures.FIRST_COMPLETED).done:
                state, peer = pending.pop(answer)
                try:
                    chain = best_offer(store, missing, answer.result(), self.timing.build_min)
                except Cancelled:  # checked below
                    continue
                except Exception as error:  # noqa: BLE001
                    self._failed(state, error)
                    continue
                if chain is None:
                    self._answered(state)
                else:
                    offers.append(_Offer(chain, state, peer))
            if monotonic() > until:
                for state, _ in pending.values():
                    self._failed(state, no_answer(self.timing.answer))
                break
            limit.cancel.check()
        return sorted(offers, key=lambda offer: -len(offer.chain.upper))

    # --- State of the peers -------------------------------------------------------------------------

    def _remember_absent(self, keys: Sequence[str]) -> None:
        with self._lock:
            if len(self._absent) > ABSENT_MAX:
                self._absent.clear()
            self._absent.update(dict.fromkeys(keys, monotonic() + self.timing.absent))

    def _answered(self, state: _PeerState) -> None:
        with self._lock:
            state.failures_in_a_row = 0

    def _succeeded(self, state: _PeerState, done: FetchResult, seconds: float) -> None:
        self._answered(state)
        with self._lock:
            state.count(chains=1, layers=done.layers, size=done.size, seconds=seconds)

    def _failed(self, state: _PeerState, error: BaseException) -> None:
        with self._lock:
            state.failures_in_a_row += 1
            doubled = self.timing.backoff * 2 ** min(state.failures_in_a_row - 1, 60)
            state.retry_at = monotonic() + min(self.timing.backoff_max, doubled)
            state.count(failures=1)
            failure = printable_line((str(error) or type(error).__name__)[:FAILURE_LENGTH_MAX])
            state.stats = msgspec.structs.replace(state.stats, failure=failure)
            is_first = state.failures_in_a_row == 1
        if is_first:
            _log.warning("no layers from the peer %s, so they are built here: %s", state.source, failure)


def best_offer(
    store: Store,
    missing: MissingLayers,
    offered: Sequence[LayerChain],
    build_min: float = BUILD_SECONDS_MIN,
) -> LayerChain | None:
    """The longest offered chain that has missing layers, fits on what is here, and is worth a fetch."""
    names = (*missing.below, *missing.wanted)
    for chain in sorted(offered, key=lambda chain: -len(chain.upper)):
        upper = chain.upper
        keys = tuple(layer.key for layer in upper)
        new = upper[len(missing.below) :]
        seconds = sum(layer.provenance.seconds for layer in new if layer.provenance)
        if (
            new
            and _is_built_on(chain, missing)
            and keys == names[: len(keys)]
            and chain.identity == missing.identity
            and seconds >= build_min
            and not chains.other_builds(store, chain)
        ):
            # The image is here: take neither the image nor its name from the peer.
            return msgspec.structs.replace(chain, layers=upper, stored_image=None)
    return None


def _is_built_on(chain: LayerChain, missing: MissingLayers) -> bool:
    """Whether the chain continues from the very build that is here, which may be in memory only."""
    parent = chain.upper[len(missing.below) - 1].provenance if missing.below else None
    return parent is None or parent.build_id == missing.parent_build
