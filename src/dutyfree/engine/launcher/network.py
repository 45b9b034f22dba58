"""The network of one sandbox: change its policy, and connect to its ports."""

from __future__ import annotations

import asyncio
import errno
import socket

import anyio
from anyio.abc import SocketStream

from dutyfree.contract.errors import ActionError, ActionTimeout, DispatchError, PortClosed
from dutyfree.engine.host import capacity
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.client import Launcher, LauncherError
from dutyfree.engine.launcher.protocol import Request
from dutyfree.engine.launcher.timeouts import DEFAULT_TIMEOUTS, Timeouts


class SandboxNetwork:
    """The policy of one sandbox, kept across resets. ``number`` is the launcher's current number for it."""

    def __init__(
        self,
        launcher: Launcher,
        policy: bytes,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        self.number = 0
        self._launcher = launcher
        self.policy = policy
        """The body of a Request.NETWORK; empty if the network is off."""
        self._timeouts = timeouts
        self._changing = anyio.Lock()

    async def enter(self, number: int) -> None:
        """Apply the policy to the sandbox with this number. Raises LauncherError."""
        if self.policy:
            await self._launcher.ask(Request.NETWORK, number, self.policy)
        self.number = number

    async def change(self, policy: bytes) -> None:
        """Apply another policy, and cut open connections.

        Raises ActionError and DispatchError; then the policy has not changed.
        """
        async with self._changing:
            # The launcher carries out a request that was sent, even if we are cancelled meanwhile.
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
        """Connect to a server in the sandbox. Raises PortClosed, ActionTimeout, DispatchError."""
        for ipv6 in (0, 1):
            try:
                reply = await self._launcher.ask(Request.CONNECT, self.number, protocol.PORT.pack(port, ipv6))
            except LauncherError as error:
                if error.number in (errno.ECONNREFUSED, errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    continue
                raise DispatchError(f"no connection to port {port}: {error.message}") from error
            if not reply.descriptors:  # the kernel drops descriptors above our limit
                raise DispatchError(
                    f"no connection to port {port}: this process has too many open files",
                    remedy=capacity.RAISE_OPEN_FILES,
                )
            connected = socket.socket(fileno=reply.descriptors[0])
            seconds = self._timeouts.connect
            try:
                with anyio.fail_after(seconds):
                    established = await _established(connected)
            except TimeoutError:
                reason = f"the server on port {port} of the sandbox accepted no connection in {seconds:g} s"
                raise ActionTimeout(reason) from None
            if not established:
                connected.close()
                continue
            return await SocketStream.from_socket(connected)
        raise PortClosed(port)


async def _established(connected: socket.socket) -> bool:
    """Whether the connection succeeds. On a loopback that takes time only if the server's queue is full."""
    loop, decided = asyncio.get_running_loop(), asyncio.Event()
    loop.add_writer(connected, decided.set)
    try:
        await decided.wait()
    except BaseException:
        # Close it after that only: else the loop confuses it with the next descriptor of this number.
        loop.remove_writer(connected)
        connected.close()
        raise
    loop.remove_writer(connected)
    return connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
