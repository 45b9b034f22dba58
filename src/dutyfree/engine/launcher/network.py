"""The network of one sandbox, from its owner's side: what it may reach, and its own ports."""

from __future__ import annotations

import asyncio
import errno
import socket

import anyio
from anyio.abc import SocketStream

from dutyfree.contract.errors import ActionError, ActionTimeout, DispatchError, PortClosed
from dutyfree.engine.host import limits
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.client import Launcher, LauncherError
from dutyfree.engine.launcher.protocol import Request
from dutyfree.engine.sandbox.pending import PATIENCE


class SandboxNetwork:
    """Follows a sandbox through its resets: ``number`` is the launcher's for what stands now."""

    def __init__(self, launcher: Launcher, policy: bytes) -> None:
        self.number = 0
        self._launcher = launcher
        self.policy = policy
        """What it may reach, as the launcher is told."""
        self._changing = anyio.Lock()

    async def enter(self, number: int) -> None:
        """The sandbox has this number now, and its policy applies. Raises LauncherError."""
        if self.policy:
            await self._launcher.ask(Request.NETWORK, number, self.policy)
        self.number = number

    async def change(self, policy: bytes) -> None:
        """Another policy; what was connected is cut. Raises ActionError, DispatchError: nothing changed."""
        async with self._changing:
            # A request that was sent is carried out, also if nobody waits for its end any more.
            before, self.policy = self.policy, policy
            try:
                await self._launcher.ask(Request.NETWORK, self.number, policy)
            except LauncherError as error:
                self.policy = before
                if error.number == errno.EADDRINUSE:
                    raise ActionError(
                        "the network could not be changed: a process in the sandbox holds UDP port 53",
                        remedy="end that process",
                    ) from error
                raise DispatchError(f"the network could not be changed: {error.message}") from error

    async def connect(self, port: int) -> SocketStream:
        """To a server in the sandbox. Raises PortClosed if there is none, ActionTimeout, DispatchError."""
        for ipv6 in (0, 1):
            try:
                reply = await self._launcher.ask(Request.CONNECT, self.number, protocol.PORT.pack(port, ipv6))
            except LauncherError as error:
                if error.number in (errno.ECONNREFUSED, errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    continue
                raise DispatchError(f"no connection to port {port}: {error.message}") from error
            if not reply.descriptors:  # the kernel drops what we have no room for
                raise DispatchError(
                    f"no connection to port {port}: this process has too many open files",
                    remedy=limits.OWN_FILES,
                )
            connected = socket.socket(fileno=reply.descriptors[0])
            try:
                with anyio.fail_after(PATIENCE):
                    established = await _established(connected)
            except TimeoutError:
                reason = f"the server on port {port} of the sandbox accepted no connection in {PATIENCE:g} s"
                raise ActionTimeout(reason) from None
            if not established:
                connected.close()
                continue
            return await SocketStream.from_socket(connected)
        raise PortClosed(port)


async def _established(connected: socket.socket) -> bool:
    """Whether it came about. On a loopback that is known at once, unless the server's queue is full."""
    loop, decided = asyncio.get_running_loop(), asyncio.Event()
    loop.add_writer(connected, decided.set)
    try:
        await decided.wait()
    except BaseException:
        # Not closed before: the loop would take the next descriptor of this number for it.
        loop.remove_writer(connected)
        connected.close()
        raise
    loop.remove_writer(connected)
    return connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
