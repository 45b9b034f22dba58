"""Open a substrate only where it works, and close sandboxes in any case."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import anyio

from dutyfree.contract import Availability
from dutyfree.contract.errors import CleanupError, SubstrateError, Unavailable


def require(found: Availability, substrate: str) -> None:
    """Raises Unavailable, with the remedy, if the probe found that the substrate does not work."""
    if not found.available:
        raise Unavailable(f"{substrate}: {found.detail}", remedy=found.remedy)


class Closable(Protocol):
    """A sandbox that can be closed."""

    async def close(self) -> None:
        """Raises OSError, SubstrateError."""


@asynccontextmanager
async def closing(sandbox: Closable) -> AsyncIterator[None]:
    """Close a sandbox at the end of the context, shielded from cancellation.

    Raises CleanupError for an OSError of ``close``. If the body raises, that error passes instead.
    """
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        with anyio.CancelScope(shield=True):
            try:
                await sandbox.close()
            except OSError as error:
                if succeeded:
                    raise CleanupError(f"cannot remove {error.filename}: {error.strerror}") from error
            except SubstrateError:
                if succeeded:
                    raise
