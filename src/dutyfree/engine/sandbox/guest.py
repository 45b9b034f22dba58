"""``Guest``: an init behind a byte stream, in a container, a pod or a machine that another runtime made.

A transport gives the connected socket and a ``GuestControl``; this module makes a sandbox of them.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import anyio

from dutyfree.contract import Limits
from dutyfree.contract.errors import CreateError, SandboxGone, SubstrateError
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.protocol import Frame
from dutyfree.engine.layers.command_defaults import CommandDefaults
from dutyfree.engine.sandbox.init_sandbox import InitSandbox
from dutyfree.engine.sandbox.lifecycle import Lifecycle, SandboxControl
from dutyfree.engine.sandbox.stream_channel import StreamChannel

READY_SECONDS = 60.0
"""How long init may take to answer after its start."""


class GuestControl(SandboxControl, Protocol):
    """What a transport does besides carrying bytes."""

    async def responds(self) -> bool:
        """Whether the runtime behind the sandbox answers soon."""

    def give_up(self) -> None:
        """Destroy the sandbox, without waiting for the end."""


class Guest:
    """The owner's end of one init."""

    def __init__(
        self,
        name: str,
        connected: socket.socket,
        control: GuestControl,
        *,
        explain: Callable[[], Awaitable[Exception]],
        decode: Callable[[bytes], bytes] = bytes,
        is_protected: bool = True,
    ) -> None:
        """``explain``, ``decode`` and ``is_protected``: see StreamChannel. The guest closes the socket."""
        self._name = name
        self._control = control
        self._channel = StreamChannel(
            connected,
            name,
            control.give_up,
            decode=decode,
            explain=explain,
            responds=control.responds,
            is_protected=is_protected,
        )

    async def wait_ready(self, seconds: float = READY_SECONDS) -> None:
        """Wait until init answers. Raises CreateError."""
        try:
            with anyio.fail_after(seconds):
                await self._channel.wait_ready()
        except TimeoutError as error:
            raise CreateError(f"init in {self._name} does not answer") from error
        except CreateError:
            raise
        except (SubstrateError, SandboxGone) as error:
            raise CreateError(f"init in {self._name} did not start: {error}") from error

    async def ping(self) -> bool:
        """Whether init answers. Raises SubstrateError, SandboxGone."""
        answer = await self._channel.ask(Frame.PING, b"", timeout=0.0)
        return answer.done.result() == 0

    async def ran_out_of_memory(self) -> bool:
        """Whether a memory limit has killed a process that no answer has told. Raises SubstrateError."""
        answer = await self._channel.ask(Frame.PING, b"", timeout=0.0)
        return b"".join(answer.data) != bytes(protocol.NUMBER.size)

    def sandbox(self, known: CommandDefaults, limits: Limits) -> InitSandbox:
        lifecycle = Lifecycle(self._name, self._channel, self._control)
        return InitSandbox(self._name, lifecycle, known, limits.output)

    def give_up(self) -> None:
        """Destroy the sandbox, without waiting for the end."""
        self._control.give_up()

    def close(self) -> None:
        self._channel.close()


def with_variables(known: CommandDefaults, variables: Mapping[str, str]) -> CommandDefaults:
    """Add a recipe's variables."""
    merged = {**known.environment, **variables}
    packed = b"".join(
        f"{name}={value}".encode(errors="surrogateescape") + b"\0" for name, value in merged.items()
    )
    return known._replace(environment=merged, packed=packed)
