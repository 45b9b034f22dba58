"""Start states and snapshots on record, for a new owner of the launcher (``sandbox.kept``)."""

from __future__ import annotations

import msgspec

from dutyfree.engine.launcher.protocol import Tree
from dutyfree.engine.layers.command_defaults import command_defaults
from dutyfree.engine.layers.start_state import StartState, StoredOrigin


class KeptState(msgspec.Struct, frozen=True):
    """A start state: the numbers of its layers mean something to one launcher only."""

    trees: tuple[Tree, ...]
    env: dict[str, str]
    user: str
    directory: str
    program: tuple[str, ...]
    origin: StoredOrigin
    build_id: str

    @classmethod
    def of(cls, state: StartState) -> KeptState:
        defaults = state.defaults
        return cls(
            state.trees,
            dict(defaults.environment),
            defaults.user,
            defaults.directory,
            defaults.program,
            state.origin,
            state.build_id,
        )

    @property
    def state(self) -> StartState:
        defaults = command_defaults(self.env, self.user, self.directory, self.program)
        return StartState(self.trees, defaults, self.origin, self.build_id)


class KeptSnapshot(msgspec.Struct, frozen=True):
    """A snapshot without a name."""

    image: str
    """The image of its recipe."""
    start: KeptState
    in_memory: dict[int, tuple[int, int]]
    """Its layers in memory: the size and the weight of each."""
    made: float

    @property
    def layers(self) -> set[int]:
        """The launcher's numbers of all its layers."""
        return {layer for _, layers in self.start.trees for layer in layers}
