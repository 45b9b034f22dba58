"""Close the connections to launcher and sandboxes in a forked copy of the owner.

The copy must not keep them open: sandboxes end when their owner closes its sockets.
"""

from __future__ import annotations

import functools
import os
import weakref
from typing import Protocol

FORKED = "this process is a fork of the one that it belongs to"
REMEDY = "open a substrate of its own after os.fork"


class Bound(Protocol):
    """An object that belongs to the process that created it."""

    def orphan(self) -> None:
        """Called in the forked copy: close the descriptors, and refuse further use.

        Do not touch the event loop: it shares its selector with the parent, so a descriptor removed here is
        removed there too.
        """


_BOUND: weakref.WeakSet[Bound] = weakref.WeakSet()


def bind(one: Bound) -> None:
    """Call ``one.orphan`` in each forked copy of this process."""
    _register()
    _BOUND.add(one)


@functools.cache
def _register() -> None:
    os.register_at_fork(after_in_child=_orphan_all)


def _orphan_all() -> None:
    for one in list(_BOUND):
        one.orphan()
    _BOUND.clear()
