"""A substrate that opens and then proves unusable. The files in ``directory`` say how."""

from __future__ import annotations

import os
import signal
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import anyio

from dutyfree.contract import Availability
from dutyfree.contract.errors import CreateError
from dutyfree.substrates.scripted import Scripted


class BreakingConfig(Scripted.Config, frozen=True, forbid_unknown_fields=True, kw_only=True):
    directory: str


class Breaking(Scripted):
    """It cannot be prepared if there is a file ``unprepared``.

    The numbers in ``gone-after`` and ``killed-after`` say after how many sandboxes it goes away, or its
    process is killed.
    """

    Config: ClassVar[type[BreakingConfig]] = BreakingConfig

    def __init__(self, config):
        super().__init__(config)
        self.directory = Path(config.directory)
        self.created = 0

    async def prepare(self, recipe=None):
        if (self.directory / "unprepared").exists():
            raise CreateError("no image can be had", remedy="be root")
        await super().prepare(recipe)

    async def facts(self):
        return {**await super().facts(), "pid": str(os.getpid())}

    @asynccontextmanager
    async def sandbox(self, recipe=None, **settings):
        self.created += 1
        if self._after("killed-after"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._after("gone-after"):
            (self.directory / "gone").touch()
            raise CreateError("connection refused")
        async with super().sandbox(recipe, **settings) as sandbox:
            yield sandbox

    def _after(self, name):
        path = self.directory / name
        return path.exists() and self.created > int(path.read_text())

    @classmethod
    async def probe(cls, config, /):
        gone = await anyio.Path(config.directory, "gone").exists()
        return Availability(not gone, "it went away", "start it again")
