"""A server on the loopback for one substrate alone: for studies and tests."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from dutyfree.contract.errors import Unavailable
from dutyfree.engine.store.locks import try_lock

START_SECONDS = 60.0
"""How long the server may take until it listens."""
PREFIX = "dutyfree-server-"
"""Begins the name of the directory of such a server. The server removes it when it ends."""


class OwnServer:
    """A ``dutyfree serve`` that ends with this process, however that ends."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._state = ""

    async def start(self) -> str:
        """Start it, and return its address. Raises Unavailable."""
        self._state = await anyio.to_thread.run_sync(tempfile.mkdtemp, "", PREFIX)
        options = ("--state", self._state, "--remove-state", "--until-eof", "--log-level", "warning")
        command = ("serve", "--listen", "127.0.0.1:0", *options)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "dutyfree",
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must end the sandboxes first, then the server
        )
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), START_SECONDS)
            found = re.search(r"serving sandboxes at (\S+);", line.decode())
            if found is None:
                raise Unavailable("the server for this substrate did not start", remedy="run: dutyfree serve")
        except BaseException:
            await self.end()
            raise
        return found[1]

    @property
    def pid(self) -> int | None:
        """The id of its process, if it was started."""
        return None if self._process is None else self._process.pid

    async def end(self) -> None:
        """End it, if it was started, and remove its directory."""
        if self._process is None:
            return
        with anyio.CancelScope(shield=True):
            assert self._process.stdin is not None
            self._process.stdin.close()
            await self._process.wait()
            await anyio.to_thread.run_sync(partial(shutil.rmtree, self._state, ignore_errors=True))


def leftovers() -> Iterator[Path]:
    """The directories of servers that were killed: they have a lock, and no process holds it."""
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):  # it has no lock yet, or belongs to another user
            descriptor = os.open(path / "lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if path.stat().st_uid == os.geteuid() and try_lock(descriptor, fcntl.LOCK_EX):
                    yield path
            finally:
                os.close(descriptor)
