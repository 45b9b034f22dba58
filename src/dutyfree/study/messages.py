"""Messages between a study and its workers: requests and replies as msgpack, each after its length."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from dutyfree.contract import Limits
from dutyfree.contract.errors import CreateError, DutyfreeError, OptionError, Unavailable, UsageError
from dutyfree.study.plan import Batch
from dutyfree.study.records import Trial
from dutyfree.workloads.workload import Workload

# --- Requests, from the study to a worker -----------------------------------------------------------------


class Open(msgspec.Struct, frozen=True, tag=True):
    """Open a substrate. The answer is Opened."""

    use: str
    options: dict[str, Any]
    path: list[str]
    """``sys.path`` of the study, so that both import the same modules."""


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Prepare the substrate for these workloads. The answer is Prepared."""

    workloads: list[Workload]
    limits: Limits | None


class RunBatch(msgspec.Struct, frozen=True, tag=True):
    """Run the trials of a batch in parallel. The answer is Ended."""

    batch: Batch
    timeout: float


class Close(msgspec.Struct, frozen=True, tag=True):
    """Close the substrate. The answer is Closed. Without this request, the worker cancels what it does."""


Request = Open | Prepare | RunBatch | Close

# --- Replies, from a worker to the study ------------------------------------------------------------------


class Opened(msgspec.Struct, frozen=True, tag=True):
    host_address: str | None


class Prepared(msgspec.Struct, frozen=True, tag=True):
    facts: dict[str, str]


class Ended(msgspec.Struct, frozen=True, tag=True):
    trials: list[Trial]


class Closed(msgspec.Struct, frozen=True, tag=True):
    """The substrate is closed, and the worker ends."""


class Logged(msgspec.Struct, frozen=True, tag=True):
    """A line of the worker's log. It may come before any answer."""

    name: str
    level: int
    text: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The answer to a request that failed."""

    kind: str
    message: str
    remedy: str

    @classmethod
    def of(cls, error: Exception) -> Failed:
        if not isinstance(error, DutyfreeError):
            return cls(DutyfreeError.__name__, f"{type(error).__name__}: {error}", "")
        kind = next(kind.__name__ for kind in _ERRORS if isinstance(error, kind))
        return cls(kind, error.message, error.remedy)

    def error(self) -> DutyfreeError:
        kind = next(kind for kind in _ERRORS if kind.__name__ == self.kind)
        return kind(self.message, remedy=self.remedy)


_ERRORS = (Unavailable, OptionError, UsageError, CreateError, DutyfreeError)
"""Errors that keep their type between the processes. Others arrive as the first of these that they are."""

Reply = Opened | Prepared | Ended | Closed | Logged | Failed

# --- The connection ---------------------------------------------------------------------------------------

_LENGTH = struct.Struct("!Q")
_MESSAGE_MAX = 1 << 30

Received = TypeVar("Received")


class Connection(Generic[Received]):
    """One end of a socket that carries messages."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: msgspec.msgpack.Decoder[Received],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder

    @classmethod
    async def on(cls, end: socket.socket, received: Any) -> Connection[Received]:
        """Take over one end of a socket pair. ``received`` is the type of the messages that arrive."""
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return cls(reader, writer, msgspec.msgpack.Decoder(received, dec_hook=_decoded))

    def write(self, message: Request | Reply) -> None:
        """Send a message in the background."""
        data = _encoder.encode(message)
        self._writer.write(_LENGTH.pack(len(data)) + data)

    async def send(self, message: Request | Reply) -> None:
        """Send a message. Raises ConnectionError if the other end is closed."""
        self.write(message)
        await self._writer.drain()

    async def receive(self) -> Received | None:
        """The next message; None if the other end is closed, or sends what is no message."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > _MESSAGE_MAX:
                return None
            return self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError):
            return None

    async def close(self) -> None:
        """Close after everything is sent."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    def abort(self) -> None:
        """Close at once."""
        self._writer.transport.abort()


def _encoded(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be part of a message")


def _decoded(wanted: type, value: Any) -> Any:
    if issubclass(wanted, Path):
        return wanted(value)
    raise NotImplementedError(f"{wanted.__name__} cannot be part of a message")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encoded)
