"""What a pool needs of those who make sandboxes.

Depths are indices into ``PrefixChain``: 0 the base, 1 the image, 1 + n after the n-th stage of the recipe.
A source's call that is cancelled or fails leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from dutyfree.contract import Recipe, Sandbox
from dutyfree.contract.served import Served
from dutyfree.engine.layers.urgency import Urgency


class NewSandbox(msgspec.Struct, frozen=True):
    """A sandbox, and what its making taught."""

    sandbox: Sandbox
    create_seconds: float | None = None
    """Of the sandbox itself, without stages; None for a promotion."""
    stage_seconds: Sequence[float] = ()
    """Of each stage that was run, in order."""
    layers: Mapping[int, int] = {}
    """Depth → bytes, of the layers that were kept and are still there."""
    memory: int | None = None
    """Bytes that it takes while it is idle."""
    found: int | None = None
    """The depth that was there already, where that is another than the pool thought."""
    joined: bool = False
    """What was missing was being made for somebody else, and not made twice."""
    fetched: bool = False
    """It was made on layers that a peer had."""


class SandboxSource(Protocol):
    """Where the pool's sandboxes come from. Without urgency, work should give way to all other."""

    async def create(
        self, recipe: Recipe, start: int, depth: int, *, keep: int, urgency: Urgency
    ) -> NewSandbox:
        """A new sandbox at ``depth``, on the layer at ``start``; 0 means that there is none.

        Layers are kept of the stages up to depth ``keep``. Raises StageError if a stage fails, and
        another SubstrateError if the machinery does.
        """
        ...

    async def promote(
        self, sandbox: Sandbox, recipe: Recipe, start: int, depth: int, *, keep: int, urgency: Urgency
    ) -> NewSandbox:
        """Run the stages after ``start`` up to ``depth`` in a sandbox that nobody has used.

        Raises as ``create`` does; the pool then destroys the sandbox.
        """
        ...

    async def reset(self, sandbox: Sandbox) -> tuple[Sandbox, int]:
        """Remove every trace of its use; the depth of the state that it has now. Raises SubstrateError.

        What comes back is for the next holder: it may be another object with another id, so that the former
        holder's leads nowhere.
        """
        ...

    async def verify(self, sandbox: Sandbox) -> None:
        """Look whether a reset sandbox is as good as new. Raises SubstrateError if not: it is discarded."""
        ...

    def alive(self, sandbox: Sandbox) -> bool:
        """Whether nothing is known against it; asked at every hand-out, so without waiting."""
        ...

    def hand_out(self, sandbox: Sandbox, served: Served, recipe: Recipe, labels: Mapping[str, str]) -> None:
        """Somebody has it from now on: give it the variables of their recipe, and show their labels.

        The recipe may be another than the one that it was made of, but differs in ``env`` and ``path`` alone,
        and only if it has no services.
        """
        ...

    async def destroy(self, sandbox: Sandbox) -> None:
        """Remove it, also if it died. Raises CleanupError."""
        ...

    def forget(self, layer: str) -> None:
        """Stop using a layer, named as in ``PrefixChain.layers``: nothing needs it any more."""
        ...


@runtime_checkable
class ForkingSource(Protocol):
    """A source that can copy a sandbox that nobody has used."""

    async def fork(self, sandbox: Sandbox, count: int) -> Sequence[NewSandbox]:
        """All of them or none. Raises SubstrateError."""
        ...
