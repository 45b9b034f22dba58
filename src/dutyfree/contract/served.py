"""How a sandbox was served to the caller who requested it."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

ServedKind: TypeAlias = Literal["warm", "promoted", "joined", "layer", "fetched", "forked", "cold"]
"""What the sandbox was made from, from the warmest start to the coldest.

warm: an idle sandbox in exactly this state. promoted: an idle sandbox at an earlier stage; the missing stages
ran. joined: work that was already in progress for the pool or for another request. layer: a new sandbox on a
layer from disk. fetched: a new sandbox on a layer from a peer. forked: a copy of another member of the group.
cold: nothing was ready.
"""


class Served(msgspec.Struct, frozen=True):
    """How one sandbox was served: from what, in how many seconds, and what a cold start would have cost."""

    kind: ServedKind
    stage: str
    """The kind of the last stage that did not have to run; "none" for a cold start."""
    seconds: float
    cold_seconds: float
    """The estimated seconds of a cold start."""
    sandbox: str
    recipe: str
    """The content key of the recipe."""
    waited: float = 0.0
    """The part of ``seconds`` before the budget had room. A cold start would have waited as long."""
