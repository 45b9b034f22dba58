"""A substrate that is slower than bare by a known time. The worker imports this module, so it is small."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import anyio
import msgspec

from dutyfree.substrates.bare import Bare, BareConfig, BareSandbox


class DelayedConfig(BareConfig, frozen=True):
    milliseconds: float = 0.0


class Delayed(Bare):
    """Bare with a delay at the creation of a sandbox."""

    Config: ClassVar[type[msgspec.Struct]] = DelayedConfig

    def __init__(self, config: DelayedConfig) -> None:
        super().__init__(config)
        self._delay = config.milliseconds / 1e3

    @asynccontextmanager
    async def sandbox(self, *arguments: Any, **options: Any) -> AsyncIterator[BareSandbox]:
        if self._delay:
            await anyio.sleep(self._delay)
        async with super().sandbox(*arguments, **options) as sandbox:
            yield sandbox
