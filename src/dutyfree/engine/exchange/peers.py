"""Peers that are asked for a stage's layer before it is built here.

All are asked at once what they have; the deepest offer is taken, and of equal ones that which came first. One
that is gone, silent, hostile or wrong costs seconds, is told of once, and is left alone for a while, longer
each time: whatever happens here, the stage can still be built.
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
from dutyfree.engine.exchange.deadline_peer import SILENCE, DeadlinePeer, silent
from dutyfree.engine.exchange.fetcher import Fetcher, FetchResult, LayerBusy
from dutyfree.engine.exchange.messages import PATIENCE
from dutyfree.engine.store.cancel import Cancelled, CancelToken
from dutyfree.engine.store.store import Store
from dutyfree.printable import printable_line

QUICK = 0.25
"""Seconds of building in which hardly anything is fetched."""
LACKING = 30.0
"""Seconds for which what no peer had is not asked for again."""
AT_ONCE = 8
"""Chains that are fetched at the same time."""
STUCK = 4
"""Conversations with a peer that hang: it is not asked again before some of them have ended."""
ENDING = 2.0
"""Seconds that others are given to end, when all is over."""
BACKOFF, LONGEST = 5.0, 300.0
"""Seconds for which a peer that failed is left alone: doubled each time, up to the latter."""
KNOWN = 4096
SAID = 500
"""Characters of a complaint that are told."""

_log = logging.getLogger(__name__)


class PeerStats(msgspec.Struct, frozen=True):
    """What became of one peer."""

    asked: int = 0
    chains: int = 0
    """That came from it."""
    layers: int = 0
    size: int = 0
    """Bytes that came."""
    seconds: float = 0.0
    """That all this took."""
    failures: int = 0
    failure: str = ""
    """The last one."""


class MissingLayers(NamedTuple):
    """A chain upon an image that is here up to some layer."""

    identity: str
    """Of the image."""
    below: tuple[str, ...]
    """Keys of the layers that are here, the lowest first."""
    wanted: tuple[str, ...]
    """Of those that are not."""
    parent_build: str = ""
    """The build_id of the last layer that is here."""


class _Neighbour:
    """Changed under the lock of all."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.figures = PeerStats()
        self.in_a_row = 0
        self.retry_at = 0.0
        self.hanging: list[threading.Thread] = []
        """Conversations that were left behind."""

    def count(self, **more: float) -> None:
        now = {name: getattr(self.figures, name) + value for name, value in more.items()}
        self.figures = msgspec.structs.replace(self.figures, **now)

    def usable(self, now: float) -> bool:
        self.hanging = [thread for thread in self.hanging if thread.is_alive()]
        return self.retry_at <= now and len(self.hanging) < STUCK


class _Limit:
    """A cancel that comes by itself after some seconds."""

    def __init__(self, cancel: CancelToken, seconds: float) -> None:
        self._outer = cancel
        self.cancel = cancel.child()
        self._timer = threading.Timer(seconds, self.cancel.set)
        self._timer.daemon = True

    @property
    def is_over(self) -> bool:
        return self.cancel.is_set() and not self._outer.is_set()

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


class _Offer(NamedTuple):
    chain: LayerChain
    peer: _Neighbour
    talk: DeadlinePeer


class PeerSet:
    """Those of one open substrate. May be used from any thread."""

    def __init__(self, sources: Sequence[str], seconds: float) -> None:
        self._peers = [_Neighbour(source) for source in dict.fromkeys(sources)]
        self._seconds = seconds
        """The longest that one fetch may take."""
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(AT_ONCE)
        self._lacking: dict[str, float] = {}
        self._brought: set[str] = set()
        self._ending: list[threading.Thread] = []

    @property
    def figures(self) -> dict[str, PeerStats]:
        return {peer.source: peer.figures for peer in self._peers}

    def fetch(self, store: Store, missing: MissingLayers, cancel: CancelToken) -> None:
        """Bring what there is of it. Blocks; raises Cancelled and nothing else."""
        now = monotonic()
        with self._lock:
            asked = [peer for peer in self._peers if peer.usable(now)]
            lacking = self._lacking.get(missing.wanted[0], 0.0) > now
        if lacking or not asked or not self._taken(cancel):
            return
        try:
            with _Limit(cancel, self._seconds) as limit, self._talks(asked, store, limit.cancel) as talks:
                self._fetch(store, missing, talks, limit)
        except RuntimeError as error:  # no thread was to be had
            _log.warning("peers cannot be asked: %s", error)
        finally:
            self._slots.release()

    def brought(self, key: str) -> bool:
        """Whether this layer came by a fetch; that is told once."""
        with self._lock:
            came = key in self._brought
            self._brought.discard(key)
        return came

    def close(self) -> None:
        """Wait a little for conversations that were ended. Blocks."""
        until = monotonic() + ENDING
        for thread in self._ending:
            thread.join(max(0.0, until - monotonic()))

    # --- One fetch ----------------------------------------------------------------------------------

    def _taken(self, cancel: CancelToken) -> bool:
        """A slot, unless too many wait for one."""
        until = monotonic() + SILENCE
        while not self._slots.acquire(timeout=PATIENCE):
            cancel.check()
            if monotonic() > until:
                return False
        return True

    @contextlib.contextmanager
    def _talks(
        self, asked: Sequence[_Neighbour], store: Store, cancel: CancelToken
    ) -> Iterator[list[tuple[_Neighbour, DeadlinePeer]]]:
        talks: list[tuple[_Neighbour, DeadlinePeer]] = []
        try:
            talks.extend((peer, DeadlinePeer(peer.source, store, cancel)) for peer in asked)
            yield talks
        finally:
            with self._lock:
                for peer, talk in talks:
                    peer.count(asked=1)
                    if talk.close():
                        peer.hanging.append(talk.thread)
                ended = [talk.thread for _, talk in talks]
                self._ending = [thread for thread in (*self._ending, *ended) if thread.is_alive()]

    def _fetch(
        self,
        store: Store,
        missing: MissingLayers,
        talks: list[tuple[_Neighbour, DeadlinePeer]],
        limit: _Limit,
    ) -> None:
        for offer in self._offers(store, missing, talks, limit):
            if chains.strange(store, offer.chain):  # what came of another before it failed is of another run
                continue
            begun, fetcher = monotonic(), Fetcher(store, offer.talk, cancel=limit.cancel, eager=True)
            try:
                done = fetcher.fetch(offer.chain)
            except LayerBusy:  # who makes it is waited for by whoever wants it
                return
            except Cancelled:
                if not limit.is_over:
                    raise
                self._failed(offer.peer, TimeoutError(f"it took longer than {self._seconds:g} s"))
                break
            except Exception as error:  # noqa: BLE001 (whatever a stranger does, it is built here then)
                self._failed(offer.peer, error)
                continue
            finally:
                with self._lock:
                    self._brought.update(fetcher.brought)
            self._came(offer.peer, done, monotonic() - begun)
            self._lack(missing.wanted[len(offer.chain.upper) - len(missing.below) :])
            return
        self._lack(missing.wanted)

    def _offers(
        self,
        store: Store,
        missing: MissingLayers,
        talks: list[tuple[_Neighbour, DeadlinePeer]],
        limit: _Limit,
    ) -> list[_Offer]:
        """What there is, the best first; who has a whole chain is not kept waiting by the others."""
        names = missing.wanted[::-1]
        pending: dict[Future[list[LayerChain]], tuple[_Neighbour, DeadlinePeer]] = {
            talk.asked(names): (peer, talk) for peer, talk in talks
        }
        until = monotonic() + min(SILENCE, self._seconds / 2)
        offers: list[_Offer] = []
        longest = len(missing.below) + len(missing.wanted)
        while pending and not any(len(offer.chain.upper) == longest for offer in offers):
            for answer in futures.wait(pending, PATIENCE, futures.FIRST_COMPLETED).done:
                peer, talk = pending.pop(answer)
                try:
                    chain = best(store, missing, answer.result())
                except Cancelled:  # with all of it
                    continue
                except Exception as error:  # noqa: BLE001
                    self._failed(peer, error)
                    continue
                if chain is None:
                    self._well(peer)
                else:
                    offers.append(_Offer(chain, peer, talk))
            if monotonic() > until:
                for peer, _ in pending.values():
                    self._failed(peer, silent())
                break
            limit.cancel.check()
        return sorted(offers, key=lambda offer: -len(offer.chain.upper))

    # --- What is known of them ----------------------------------------------------------------------

    def _lack(self, keys: Sequence[str]) -> None:
        with self._lock:
            if len(self._lacking) > KNOWN:
                self._lacking.clear()
            self._lacking.update(dict.fromkeys(keys, monotonic() + LACKING))

    def _well(self, peer: _Neighbour) -> None:
        with self._lock:
            peer.in_a_row = 0

    def _came(self, peer: _Neighbour, done: FetchResult, seconds: float) -> None:
        self._well(peer)
        with self._lock:
            peer.count(chains=1, layers=done.layers, size=done.size, seconds=seconds)

    def _failed(self, peer: _Neighbour, error: BaseException) -> None:
        with self._lock:
            peer.in_a_row += 1
            pause = min(LONGEST, BACKOFF * 2 ** min(peer.in_a_row - 1, 60))
            peer.retry_at = monotonic() + pause
            peer.count(failures=1)
            told = printable_line((str(error) or type(error).__name__)[:SAID])
            peer.figures = msgspec.structs.replace(peer.figures, failure=told)
            first = peer.in_a_row == 1
        if first:
            _log.warning("no layers from %s, they are built here: %s", peer.source, told)


def best(store: Store, missing: MissingLayers, offered: Sequence[LayerChain]) -> LayerChain | None:
    """The longest of what is offered that is missing, fits what is here, and is worth the way."""
    names = (*missing.below, *missing.wanted)
    for chain in sorted(offered, key=lambda chain: -len(chain.upper)):
        upper = chain.upper
        keys = tuple(layer.key for layer in upper)
        more = upper[len(missing.below) :]
        seconds = sum(layer.made.seconds for layer in more if layer.made)
        if (
            more
            and _is_upon(chain, missing)
            and keys == names[: len(keys)]
            and chain.identity == missing.identity
            and seconds >= QUICK
            and not chains.strange(store, chain)
        ):
            # Its image is here: neither that nor any name for it is taken from who happens to have the rest.
            return msgspec.structs.replace(chain, layers=upper, known=None)
    return None


def _is_upon(chain: LayerChain, missing: MissingLayers) -> bool:
    """Whether it goes on from the very run of the stages that is here, which may be in memory alone."""
    ground = chain.upper[len(missing.below) - 1].made if missing.below else None
    return ground is None or ground.build_id == missing.parent_build
