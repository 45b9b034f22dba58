"""Freeze, audit and end one sandbox through the launcher."""

from __future__ import annotations

import contextlib

import anyio

from dutyfree.contract.errors import ActionTimeout, CleanupError, ExecError
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.client import Launcher, LauncherError
from dutyfree.engine.launcher.protocol import Request
from dutyfree.engine.launcher.timeouts import DEFAULT_TIMEOUTS, Timeouts


class SandboxHandle:
    """One sandbox as the launcher knows it, by its number."""

    def __init__(
        self,
        launcher: Launcher,
        number: int,
        name: str,
        *,
        freezer: bool,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        self.number = number
        self.freezer = freezer
        """Whether the host can freeze processes, which needs control groups v2."""
        self._launcher = launcher
        self._name = name
        self._timeouts = timeouts

    async def freeze(self) -> None:
        """Freeze all processes, init too; init alone if the host has no freezer.

        If it fails, some may be frozen. Raises ExecError, and ActionTimeout if processes keep running.
        """
        try:
            with anyio.fail_after(self._timeouts.end):
                await self._launcher.ask(Request.FREEZE, self.number)
        except TimeoutError as error:
            what = f"sandbox {self._name} cannot be frozen within {self._timeouts.end:g} s"
            raise (ActionTimeout(what) if await self.responds() else ExecError(what)) from error
        except LauncherError as error:
            raise ExecError(f"sandbox {self._name} cannot be frozen: {error.message}") from error

    async def audit(self) -> tuple[int, str]:
        """The memory that it takes (0 if the host does not count it), and what a reset has left behind.

        The launcher checks this from outside, so no process in the sandbox can fake it. Raises ExecError.
        """
        try:
            reply = await self._launcher.ask(Request.AUDIT, self.number)
        except LauncherError as error:
            raise ExecError(f"sandbox {self._name} cannot be audited: {error.message}") from error
        (memory,) = protocol.AUDIT_RESULT.unpack_from(reply.text)
        return memory, reply.text[protocol.AUDIT_RESULT.size :].decode(errors="replace")

    async def responds(self) -> bool:
        """Whether the launcher answers soon."""
        with anyio.move_on_after(self._timeouts.launcher), contextlib.suppress(LauncherError):
            await self._launcher.ask(Request.HELLO)
            return True
        return False

    async def thaw(self) -> None:
        """Thaw the processes soon. Does nothing if the launcher, and so the sandbox, is gone."""
        self._launcher.tell(Request.THAW, self.number)

    def set_lease(self, until: float) -> None:
        """Let it outlive its owner until then, as ``time.monotonic`` counts."""
        self._launcher.tell(Request.LEASE, self.number, protocol.NANOSECONDS.pack(int(until * 1e9)))

    def give_up(self) -> None:
        """Destroy it, without waiting for the end."""
        self._launcher.tell(Request.DESTROY, self.number)

    async def destroy(self) -> None:
        """Destroy it and wait until nothing is left. Raises CleanupError, also if that takes too long."""
        try:
            with anyio.fail_after(self._timeouts.end):
                await self._launcher.ask(Request.DESTROY, self.number)
        except TimeoutError as error:
            seconds = self._timeouts.end
            raise CleanupError(
                f"sandbox {self._name} is not gone after {seconds:g} s: its processes have not ended",
                remedy="it is removed when they end, or when the substrate is closed",
            ) from error
        except LauncherError as error:
            raise CleanupError(f"sandbox {self._name} could not be removed: {error.message}") from error
