"""A forked copy of the owner is not the owner: what ties a sandbox to it must not live on in the copy."""

from __future__ import annotations

import functools
import os
import weakref
from typing import Protocol

FORKED = "this process is a fork of the one that it belongs to"
REMEDY = "open a substrate of its own after os.fork"


class Bound(Protocol):
    """Something that belongs to the process that made it."""

    def orphan(self) -> None:
        """We are in a copy: close descriptors, say so to whoever asks, and touch nothing that is shared.

        The event loop's selector is shared with the parent: taking a descriptor out would take it from the
        parent too.
        """
        ...


_BOUND: weakref.WeakSet[Bound] = weakref.WeakSet()


def bind(one: Bound) -> None:
    """``one`` is told if it finds itself in a copy."""
    _register()
    _BOUND.add(one)


@functools.cache
def _register() -> None:
    os.register_at_fork(after_in_child=_orphan_all)


def _orphan_all() -> None:
    for one in list(_BOUND):
        one.orphan()
    _BOUND.clear()
