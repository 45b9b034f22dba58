"""Contexts that a test enters only to see what happens."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any


async def enter(manager: AbstractAsyncContextManager[Any]) -> None:
    """Enter a context, and leave it at once."""
    async with manager:
        pass
