"""Work of one layer beside its other work: a thread that decompresses and hashes ahead of the unpacking."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any

from dutyfree.engine.store.cancel import Halt

DEPTH = 8
"""Pieces that may wait to be used."""


@contextlib.contextmanager
def ahead(pieces: Iterator[bytes], halt: Halt) -> Iterator[Iterator[bytes]]:
    """The same pieces, made by another thread; what making them raises comes in their place.

    Left before the last piece was taken, it halts whoever makes them, and waits for the thread.
    """
    line: queue.Queue[Any] = queue.Queue(DEPTH)
    left = threading.Event()

    def make() -> None:
        last: BaseException | None = None
        try:
            for piece in pieces:
                line.put(piece)
                if left.is_set():
                    return
        except BaseException as error:  # noqa: BLE001 (raised where the pieces are used)
            last = error
        line.put(last)

    thread = threading.Thread(target=make, name="dutyfree-ahead", daemon=True)
    thread.start()
    done = False

    def taken() -> Iterator[bytes]:
        nonlocal done
        while isinstance(piece := line.get(), bytes):
            yield piece
        done = True
        if piece is not None:
            raise piece

    try:
        yield taken()
    finally:
        if not done:
            left.set()
            halt.set()
            while thread.is_alive():
                with contextlib.suppress(queue.Empty):
                    line.get(timeout=0.01)
        thread.join()
