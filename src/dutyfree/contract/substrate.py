"""The substrate, and the provider class that a registry entry names."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import ClassVar, Protocol, runtime_checkable

import msgspec

from dutyfree.contract.errors import UsageError
from dutyfree.contract.limits import Limits
from dutyfree.contract.recipe import Recipe
from dutyfree.contract.sandbox import Sandbox


@runtime_checkable
class Substrate(Protocol):
    """A kind of place where sandboxes run. ``dutyfree.open`` gives it; use it inside that context."""

    @property
    def name(self) -> str: ...

    @property
    def host_address(self) -> str | None:
        """The address at which a sandbox with network reaches services of this host; None if it cannot.

        If it is an address of this host, the service must listen on it. Any other address stands for the
        host's loopback.
        """

    def sandbox(
        self,
        recipe: Recipe | None = None,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AbstractAsyncContextManager[Sandbox]:
        """A sandbox in the recipe's state; the end of the context removes it.

        Entering raises CreateError, or PoolError if a pool cannot give one. Leaving raises CleanupError,
        unless the body raised: then the body's error passes.
        """

    async def prepare(self, recipe: Recipe | None = None) -> None:
        """Prepare the recipe, so that its first sandbox starts faster. Raises CreateError."""

    async def facts(self) -> dict[str, str]:
        """Versions, image digests and settings, for the readers of measurements."""


class Availability(msgspec.Struct, frozen=True):
    """Whether a substrate works on this machine; if not, why, and how to enable it."""

    available: bool
    detail: str
    remedy: str = ""


class Provider(Protocol):
    """A class that a registry entry names: made from its frozen ``Config``, entered to open the substrate."""

    summary: ClassVar[str]
    Config: ClassVar[type[msgspec.Struct]]

    def __call__(self, config: msgspec.Struct, /) -> AbstractAsyncContextManager[Substrate]: ...

    async def probe(self, config: msgspec.Struct, /) -> Availability:
        """Check cheaply whether it would open. A classmethod; raises nothing."""


def refuse_second_entry(is_open: bool, substrate: str) -> None:
    """Raises UsageError if the substrate is open: entering it again would lose its sandboxes."""
    if is_open:
        raise UsageError(
            f"{substrate} is open already", remedy="enter it once and share it, or open another one"
        )


def require_open(is_open: bool) -> None:
    """Raises UsageError if the substrate was not entered yet, or was already left."""
    if not is_open:
        raise UsageError(
            "the substrate is not open", remedy="use it inside of: async with dutyfree.open(…) as substrate"
        )
