"""A request to build one prefix of a recipe: its key in the store, its provenance, and what came of it."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from dutyfree.contract import Stage
from dutyfree.engine.exchange.peers import BUILD_SECONDS_MIN, MissingLayers
from dutyfree.engine.layers.start_state import StartState
from dutyfree.engine.store import provenance
from dutyfree.engine.store.provenance import Provenance

FORMAT = 3
"""Version of the stored layers. It is part of each key."""


class ParentPrefix(NamedTuple):
    """The prefix that a stage is built on. The shortest one is the image."""

    key: str
    state: StartState
    """The build that the new stage is built on, held until the end of the build."""
    image: StartState
    layer_keys: tuple[str, ...]
    """Keys in the store of this prefix and of all shorter ones, the shortest first."""


class BuildRequest(NamedTuple):
    """A prefix to build: the stage, and the prefix that it is built on."""

    key: str
    parent: ParentPrefix
    stage: Stage
    number: int
    """The stage's number in the recipe, from 1."""
    identity: str | None
    """The image's identity; None if the layer is not written to disk."""
    rest: tuple[str, ...]
    """Keys of this prefix and of all longer ones of the recipe that are written to disk."""

    def missing(self, seconds: Mapping[str, float]) -> MissingLayers | None:
        """What to fetch from peers: nothing on a snapshot, which no peer has, nor what builds quickly."""
        took = sum(seconds.get(key, BUILD_SECONDS_MIN) for key in self.rest)
        if self.identity is None or self.parent.image.origin.keys or took < BUILD_SECONDS_MIN:
            return None
        wanted = tuple(layer_key(key, self.identity) for key in self.rest)
        return MissingLayers(self.identity, self.parent.layer_keys, wanted, self.parent.state.build_id)

    def provenance(self, build_id: str, seconds: float, commit: str) -> Provenance:
        """The provenance of the layer, once it is built."""
        origin, stage = self.parent.image.origin, self.stage
        return Provenance(
            kind=stage.kind,
            seconds=seconds,
            image=origin.image,
            identity=self.identity or "",
            mounted=origin.mounted,
            below=(*origin.keys, *self.parent.layer_keys),
            recipe=self.key,
            build_id=build_id,
            parent_build=self.parent.state.build_id,
            commands=tuple(one if isinstance(one, str) else shlex.join(one) for one in stage.commands),
            commit=commit,
        )


class StageResult(NamedTuple):
    """The state after a stage."""

    state: StartState
    commit: str = ""
    """The commit of a cloned repository."""


BuildOutcome: TypeAlias = Literal["ran", "fetched", "found", "joined"]
"""The stage ran here, its layer came from a peer, was on disk, or was built by another process."""


@dataclass
class BuildTrace:
    """Where the layers of one recipe came from."""

    found: int = 0
    """How many stages had a layer already."""
    ran: int = 0
    """How many stages ran for this request. Another request built the rest, or a peer had them."""
    fetched: int = 0
    """Number of the last stage that a peer had; none up to it had to run."""
    number: int = 0
    """How many stages there are."""
    image: bool = True
    """Whether the image was open already."""

    def note(self, outcome: BuildOutcome, number: int) -> None:
        """Count a stage that was not in memory."""
        if outcome == "ran":
            self.ran += 1
        elif outcome == "fetched":
            self.fetched = number
        elif outcome == "found" and self.found == number - 1:
            self.found = number


def layer_key(key: str, identity: str) -> str:
    """The key in the store of a prefix (its content key) on an image (its identity)."""
    return f"{provenance.STAGE}:{hashlib.sha256(f'{FORMAT} {identity} {key}'.encode()).hexdigest()}"
