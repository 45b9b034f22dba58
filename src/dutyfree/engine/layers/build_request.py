"""A prefix of a recipe that is to be made: what it is called in the store, and what is told of it there."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping
from typing import NamedTuple

from dutyfree.contract import Stage
from dutyfree.engine.exchange.peers import QUICK, MissingLayers
from dutyfree.engine.layers.disk_bridge import StartState
from dutyfree.engine.store import provenance
from dutyfree.engine.store.provenance import Provenance

FORM = 3
"""Of what lies in the store: changed with it."""


class ParentPrefix(NamedTuple):
    """The prefix that a stage is made upon, by its key; the shortest is the image."""

    key: str
    base: StartState
    """As it was when the stage was wanted, which is made upon this run of it; held until then."""
    image: StartState
    names: tuple[str, ...]
    """Keys in the store of all prefixes down to the image, the shortest first."""


class BuildRequest(NamedTuple):
    """A prefix that is to be made, and the stage that makes it of the one below."""

    key: str
    below: ParentPrefix
    stage: Stage
    number: int
    identity: str | None
    rest: tuple[str, ...]
    """Keys of this prefix and of all longer ones that are kept."""

    def missing(self, seconds: Mapping[str, float]) -> MissingLayers | None:
        """What peers are asked for: nothing upon a snapshot, known here alone, nor what takes no time."""
        took = sum(seconds.get(key, QUICK) for key in self.rest)
        if self.identity is None or self.below.image.origin.keys or took < QUICK:
            return None
        wanted = tuple(name(key, self.identity) for key in self.rest)
        return MissingLayers(self.identity, self.below.names, wanted, self.below.base.build_id)

    def described(self, build_id: str, seconds: float, commit: str) -> Provenance:
        """As it is told beside its layer, once it was made."""
        origin, stage = self.below.image.origin, self.stage
        return Provenance(
            kind=stage.kind,
            seconds=seconds,
            image=origin.image,
            identity=self.identity or "",
            mounted=origin.mounted,
            below=(*origin.keys, *self.below.names),
            recipe=self.key,
            build_id=build_id,
            parent_build=self.below.base.build_id,
            commands=tuple(one if isinstance(one, str) else shlex.join(one) for one in stage.commands),
            commit=commit,
        )


def name(key: str, identity: str) -> str:
    """The key in the store of a recipe's prefix upon an image."""
    return f"{provenance.STAGE}:{hashlib.sha256(f'{FORM} {identity} {key}'.encode()).hexdigest()}"
