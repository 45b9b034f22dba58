"""The two ends of every substrate: it is opened only where it can be used, and its sandboxes are closed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import anyio

from dutyfree.contract import Availability
from dutyfree.contract.errors import CleanupError, SubstrateError, Unavailable


def require(found: Availability, substrate: str) -> None:
    """Raises Unavailable, with the remedy, unless the probe found that it can be used."""
    if not found.available:
        raise Unavailable(f"{substrate}: {found.detail}", remedy=found.remedy)


class Closable(Protocol):
    async def close(self) -> None:
        """Raises OSError, SubstrateError."""
        ...


@asynccontextmanager
async def closing(sandbox: Closable) -> AsyncIterator[None]:
    """Close it afterwards, shielded from cancellation.

    Raises CleanupError for an OSError of ``close``. If the body fails, its error is raised instead.
    """
    well = False
    try:
        yield
        well = True
    finally:
        with anyio.CancelScope(shield=True):
            try:
                await sandbox.close()
            except OSError as error:
                if well:
                    raise CleanupError(f"cannot remove {error.filename}: {error.strerror}") from error
            except SubstrateError:
                if well:
                    raise
