"""The substrate: where sandboxes run, and the class that a registry entry names."""

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
    """Where sandboxes run. Given by ``dutyfree.open``; use it inside its context."""

    @property
    def name(self) -> str: ...

    @property
    def host_address(self) -> str | None:
        """Where a sandbox whose network is on reaches services of this host; None if it cannot.

        One of this host's addresses is where such a service has to listen; any other one stands for the
        host's loopback.
        """
        ...

    def sandbox(
        self,
        recipe: Recipe | None = None,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AbstractAsyncContextManager[Sandbox]:
        """A sandbox in the recipe's state, gone when the context is left.

        Raises CreateError on entering (PoolError where a pool has none to give), and CleanupError on leaving,
        unless the body raised: then that.
        """
        ...

    async def prepare(self, recipe: Recipe | None = None) -> None:
        """Do all that can be done for the recipe before a sandbox is wanted. Raises CreateError."""
        ...

    async def facts(self) -> dict[str, str]:
        """Versions, image digests and settings that a reader of the measurements should know."""
        ...


class Availability(msgspec.Struct, frozen=True):
    """Whether a substrate can be used here; if not, why, and how to enable it."""

    available: bool
    detail: str
    remedy: str = ""


class Provider(Protocol):
    """What a registry entry names: a class made from its frozen ``Config``, entered to open it."""

    summary: ClassVar[str]
    Config: ClassVar[type[msgspec.Struct]]

    def __call__(self, config: msgspec.Struct, /) -> AbstractAsyncContextManager[Substrate]: ...

    async def probe(self, config: msgspec.Struct, /) -> Availability:
        """A cheap look at whether it would open; raises nothing. A classmethod."""
        ...


def refuse_second_entry(is_open: bool, substrate: str) -> None:
    """Raises UsageError for a substrate that is open: entering it again would lose what it holds."""
    if is_open:
        raise UsageError(
            f"{substrate} is open already", remedy="enter it once and share it, or open another one"
        )


def require_open(is_open: bool) -> None:
    """Raises UsageError for a substrate that was not entered yet, or is left already."""
    if not is_open:
        raise UsageError(
            "the substrate is not open", remedy="use it inside of: async with dutyfree.open(…) as substrate"
        )
