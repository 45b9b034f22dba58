"""The protocol between a pool and the engine that makes its sandboxes.

A depth is an index into ``PrefixChain.keys``: 0 is the base, 1 the image, 1 + n the n-th stage of the recipe.
A call that fails or is cancelled leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from dutyfree.contract import Recipe, Sandbox
from dutyfree.contract.served import Served
from dutyfree.engine.layers.urgency import Urgency
from dutyfree.engine.pool.scheduler.values import JobResult


class NewSandbox(JobResult, frozen=True):
    """A sandbox that a source made, and what it cost."""

    sandbox: Sandbox


class SandboxSource(Protocol):
    """Makes the sandboxes of a pool. Background work must run at the lowest priority."""

    async def create(
        self, recipe: Recipe, start: int, depth: int, *, keep: int, urgency: Urgency
    ) -> NewSandbox:
        """A new sandbox at ``depth``, made on the layer at ``start``; without a layer, ``start`` is 0.

        Keeps the layers of the stages up to depth ``keep``. Raises StageError if a stage fails, and another
        SubstrateError if the machinery fails.
        """

    async def promote(
        self, sandbox: Sandbox, recipe: Recipe, start: int, depth: int, *, keep: int, urgency: Urgency
    ) -> NewSandbox:
        """Run the stages after ``start`` up to ``depth`` in an unused sandbox.

        Raises as ``create`` does. The pool then destroys the sandbox.
        """

    async def reset(self, sandbox: Sandbox) -> tuple[Sandbox, int]:
        """Put a sandbox back into its state. Returns the clean sandbox, and its depth. Raises SubstrateError.

        The clean sandbox may be another object with another id, so that the former holder cannot reach it.
        """

    async def verify(self, sandbox: Sandbox) -> None:
        """Check that a reset left nothing behind. Raises SubstrateError: the pool then discards it."""

    def alive(self, sandbox: Sandbox) -> bool:
        """Whether the sandbox is alive, as far as is known. Called at every hand-out, so it does not wait."""

    def hand_out(self, sandbox: Sandbox, served: Served, recipe: Recipe, labels: Mapping[str, str]) -> None:
        """A caller has this sandbox now: give it the variables of the recipe, and show the labels.

        The recipe may differ from the one that the sandbox was made for in ``env`` and ``path``, and only if
        it has no services.
        """

    async def destroy(self, sandbox: Sandbox) -> None:
        """Remove a sandbox, dead or alive. Raises CleanupError."""

    def forget(self, layer: str) -> None:
        """Drop a layer, named as in ``PrefixChain.layers``, that no sandbox and no other layer uses."""


@runtime_checkable
class ForkingSource(Protocol):
    """A source that can fork an unused sandbox."""

    async def fork(self, sandbox: Sandbox, count: int) -> Sequence[NewSandbox]:
        """``count`` copies, all or none. Raises SubstrateError."""
