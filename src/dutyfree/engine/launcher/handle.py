"""One sandbox as the launcher knows it: how it is frozen, and how it ends."""

from __future__ import annotations

import contextlib

import anyio

from dutyfree.contract.errors import ActionTimeout, CleanupError, ExecError
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.client import Launcher, LauncherError
from dutyfree.engine.launcher.protocol import Request

PATIENCE = 30.0
"""So long the kernel may take to end, or to freeze, all that runs in a sandbox."""


RESPONSE = 5.0
"""Seconds in which a launcher that works answers."""


class SandboxHandle:
    def __init__(self, launcher: Launcher, number: int, name: str, *, freezer: bool) -> None:
        self.number = number
        self.freezer = freezer
        """Whether the host can freeze: control groups of version 2 can."""
        self._launcher = launcher
        self._name = name

    async def freeze(self) -> None:
        """Every process of it stands still, its init too; if that fails, some may.

        Without a freezer it is init alone. Raises ExecError, and ActionTimeout if processes keep running.
        """
        try:
            with anyio.fail_after(PATIENCE):
                await self._launcher.ask(Request.FREEZE, self.number)
        except TimeoutError as error:
            what = f"sandbox {self._name} cannot be frozen within {PATIENCE:g} s"
            raise (ActionTimeout(what) if await self.responds() else ExecError(what)) from error
        except LauncherError as error:
            raise ExecError(f"sandbox {self._name} cannot be frozen: {error.message}") from error

    async def look(self) -> tuple[int, str]:
        """The memory that it takes (0 where nobody counts), and in words what is not as in the beginning.

        From outside: nothing in it can make it say otherwise. Raises ExecError.
        """
        try:
            reply = await self._launcher.ask(Request.AUDIT, self.number)
        except LauncherError as error:
            raise ExecError(f"sandbox {self._name} cannot be looked at: {error.message}") from error
        (memory,) = protocol.AUDIT_RESULT.unpack_from(reply.text)
        return memory, reply.text[protocol.AUDIT_RESULT.size :].decode(errors="replace")

    async def responds(self) -> bool:
        """Whether the launcher answers soon."""
        with anyio.move_on_after(RESPONSE), contextlib.suppress(LauncherError):
            await self._launcher.ask(Request.HELLO)
            return True
        return False

    def thaw(self) -> None:
        """It goes on soon. Ignored once the launcher, and with it the sandbox, is gone."""
        self._launcher.tell(Request.THAW, self.number)

    def give_up(self) -> None:
        """It shall end, and nobody waits for that."""
        self._launcher.tell(Request.DESTROY, self.number)

    async def destroy(self) -> None:
        """Nothing of it is left. Raises CleanupError, also if the kernel takes too long."""
        try:
            with anyio.fail_after(PATIENCE):
                await self._launcher.ask(Request.DESTROY, self.number)
        except TimeoutError as error:
            raise CleanupError(
                f"sandbox {self._name} is not gone after {PATIENCE:g} s: its processes have not ended",
                remedy="it is removed when they end, or with the substrate",
            ) from error
        except LauncherError as error:
            raise CleanupError(f"sandbox {self._name} could not be removed: {error.message}") from error
