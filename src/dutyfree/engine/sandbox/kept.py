"""A sandbox on record: what a new owner of the launcher needs to adopt it, after the former one has ended.

The record says what the launcher and init do not know. If it is older than the sandbox, little is lost: a
process that it does not name is killed at the adoption.
"""

from __future__ import annotations

import msgspec

from dutyfree.contract import Exec, Limits, Recipe, Span
from dutyfree.contract.served import Served
from dutyfree.contract.services import Service
from dutyfree.engine.launcher.protocol import Tree
from dutyfree.engine.layers.kept_state import KeptState


class KeptProcess(msgspec.Struct, frozen=True):
    """A background process."""

    id: str
    identity: int
    """Init's number of it."""
    action: Exec


class KeptService(msgspec.Struct, frozen=True):
    """A service that runs."""

    name: str
    identity: int
    starts: int


class KeptSandbox(msgspec.Struct, frozen=True):
    """One sandbox of a launcher."""

    id: str
    number: int
    """The launcher's number of it."""
    limits: Limits
    trees: tuple[Tree, ...]
    """The layers that it uses now."""
    start: KeptState
    in_memory: dict[int, tuple[int, int]]
    """The layers in memory that it uses: the size and the weight of each."""
    policy: bytes
    """Its network policy, encoded."""
    image: str | None
    services: tuple[Service, ...]
    variables: dict[str, str]
    path: tuple[str, ...]
    labels: dict[str, str] = {}
    served: Served | None = None
    spans: tuple[Span, ...] = ()
    without_overlay: tuple[str, ...] = ()
    paused_at: float | None = None
    processes: tuple[KeptProcess, ...] = ()
    running: tuple[KeptService, ...] = ()

    @property
    def recipe(self) -> Recipe:
        """Its recipe, without the stages: their files are in the layers."""
        return Recipe(self.image, (), self.services, self.variables, self.path)

    @property
    def layers(self) -> set[int]:
        """The launcher's numbers of all layers that it needs, also for a reset."""
        return {layer for _, layers in (*self.trees, *self.start.trees) for layer in layers}
