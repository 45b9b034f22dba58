"""JSON messages over a stream of bytes, one per line, authenticated if both ends have a token.

The token is never sent. Each end proves that it knows it with an HMAC of two random numbers. After that every
line carries an HMAC of its number and its contents. An attacker between the ends can read and cut the stream,
but not change it. Blobs, which are no lines, are verified by digests that came in lines.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import select
from pathlib import Path
from time import monotonic
from typing import Annotated, Protocol, TypeVar

import msgspec

from dutyfree.contract.errors import CreateError, UsageError
from dutyfree.engine.images.manifest import DOCUMENT_MAX
from dutyfree.engine.images.streams import CHUNK
from dutyfree.engine.store.cancel import POLL_SECONDS, CancelToken

TOKEN = "DUTYFREE_PEER_TOKEN"  # noqa: S105 (a variable's name)
TOKEN_FILE = "DUTYFREE_PEER_TOKEN_FILE"  # noqa: S105
HANDSHAKE_MAX = 4096
"""Limit for the bytes of a line before the peer is authenticated."""
TOKEN_LENGTH_MIN = 16

Nonce = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")]

T = TypeVar("T")


class ByteReader(Protocol):
    def read(self, size: int, /) -> bytes: ...

    def readline(self, size: int, /) -> bytes: ...


class ByteWriter(Protocol):
    def write(self, data: bytes, /) -> object: ...

    def flush(self) -> None: ...


class CancellableReader:
    """Reads a pipe or a socket. Raises Cancelled, and TimeoutError after ``timeout`` seconds of silence."""

    def __init__(self, descriptor: int, cancel: CancelToken, timeout: float = float("inf")) -> None:
        self._descriptor = descriptor
        self._cancel = cancel
        self.timeout = timeout
        self._rest = b""

    def read(self, size: int, /) -> bytes:
        if not self._rest:
            self._rest = self._more()
        data, self._rest = self._rest[:size], self._rest[size:]
        return data

    def readline(self, size: int, /) -> bytes:
        pieces, length = [self._rest], len(self._rest)
        while b"\n" not in pieces[-1] and length < size and (more := self._more()):
            pieces.append(more)
            length += len(more)
        self._rest = b"".join(pieces)
        end = self._rest.find(b"\n") + 1 or size
        data, self._rest = self._rest[:end], self._rest[end:]
        return data

    def _more(self) -> bytes:
        until = monotonic() + self.timeout
        waiting = select.poll()  # select(2) cannot handle descriptors above 1023
        waiting.register(self._descriptor, select.POLLIN)
        while not waiting.poll(POLL_SECONDS * 1000):
            self._cancel.check()
            if monotonic() > until:
                raise TimeoutError(f"nothing was received for {self.timeout:g} s")
        return os.read(self._descriptor, CHUNK)


class MessageAuthenticator:
    """Signs and verifies the lines of one connection. Each direction has its own counter."""

    def __init__(self, key: bytes, ours: bytes, theirs: bytes) -> None:
        self._key = key
        self._ours, self._theirs = ours, theirs
        self._sent = self._received = 0

    def sign(self, message: bytes) -> bytes:
        self._sent += 1
        return _hmac(self._key, self._ours, str(self._sent).encode(), message)

    def verify(self, signature: bytes, message: bytes) -> bool:
        self._received += 1
        expected = _hmac(self._key, self._theirs, str(self._received).encode(), message)
        return hmac.compare_digest(signature, expected)


class MessageStream:
    """Sends and receives messages."""

    def __init__(
        self, reader: ByteReader, writer: ByteWriter, authenticator: MessageAuthenticator | None = None
    ) -> None:
        self.reader = reader
        self.writer = writer
        self._authenticator = authenticator

    def send(self, message: msgspec.Struct) -> None:
        """Raises OSError."""
        data = msgspec.json.encode(message)
        signature = self._authenticator.sign(data) + b" " if self._authenticator else b""
        self.writer.write(signature + data + b"\n")
        self.writer.flush()

    def receive(self, size_max: int = DOCUMENT_MAX) -> bytes | None:
        """The next message; None after the other end has closed the stream. Raises OSError, CreateError."""
        line = self.reader.readline(size_max)
        if not line.endswith(b"\n"):
            return None
        if self._authenticator is None:
            return line[:-1]
        signature, _, message = line[:-1].partition(b" ")
        if not self._authenticator.verify(signature, message):
            raise CreateError(
                "a message of the peer has a wrong signature: an attacker may sit between the two machines"
            )
        return message


# --- Handshake -----------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True):
    """The first message, from the server."""

    dutyfree: int = 1
    nonce: Nonce = ""
    """Empty if no token is needed."""
    error: str = ""


class Proof(msgspec.Struct, frozen=True):
    """Proof that the sender knows the token."""

    proof: str
    nonce: Nonce = ""
    error: str = ""


def read_token() -> bytes:
    """The token from the environment, or an empty string. Blocks. Raises UsageError."""
    found, path = os.environ.get(TOKEN, ""), os.environ.get(TOKEN_FILE, "")
    if path and not found:
        try:
            found = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"the token cannot be read: {error}", remedy=f"check {TOKEN_FILE}") from error
        if not found.strip():
            raise UsageError(f"there is no token in {path}", remedy=f"check {TOKEN_FILE}")
    found = found.strip()
    if found and len(found) < TOKEN_LENGTH_MIN:
        raise UsageError(
            f"the token has {len(found)} characters, and can be guessed",
            remedy=f"use at least {TOKEN_LENGTH_MIN}, for example from: openssl rand -hex 32",
        )
    return found.encode()


def server_handshake(stream: MessageStream, token: bytes) -> MessageStream:
    """Authenticate a client, and return the stream to talk to it. Raises CreateError, OSError."""
    ours = secrets.token_hex(32) if token else ""
    stream.send(Hello(nonce=ours))
    if not token:
        return stream
    reply = _receive(stream, Proof)
    if not hmac.compare_digest(_proof(token, b"asking", ours, reply.nonce), reply.proof.encode()):
        stream.send(Proof("", error="the token is wrong"))
        raise CreateError("a client without the right token was refused")
    stream.send(Proof(_proof(token, b"asked", ours, reply.nonce).decode()))
    key = _hmac(token, b"seals", ours.encode(), reply.nonce.encode())
    return MessageStream(stream.reader, stream.writer, MessageAuthenticator(key, b"asked", b"asking"))


def client_handshake(stream: MessageStream, token: bytes) -> MessageStream:
    """Authenticate a server if we have a token, and return the stream to talk to it. Raises CreateError."""
    hello = _receive(stream, Hello)
    if hello.error:
        raise CreateError(f"the peer reports: {hello.error}")
    theirs = hello.nonce
    if bool(theirs) != bool(token):
        raise CreateError(
            "the peer requires a token" if theirs else "the peer has no token, so it may be another machine",
            remedy=f"set {TOKEN} or {TOKEN_FILE} at both ends",
        )
    if not token:
        return stream
    ours = secrets.token_hex(32)
    stream.send(Proof(_proof(token, b"asking", theirs, ours).decode(), ours))
    reply = _receive(stream, Proof)
    if reply.error:
        raise CreateError(f"the peer reports: {reply.error}", remedy=f"check {TOKEN} and {TOKEN_FILE}")
    if not hmac.compare_digest(_proof(token, b"asked", theirs, ours), reply.proof.encode()):
        raise CreateError("the peer does not know the token, so it may be another machine")
    key = _hmac(token, b"seals", theirs.encode(), ours.encode())
    return MessageStream(stream.reader, stream.writer, MessageAuthenticator(key, b"asking", b"asked"))


def _receive(stream: MessageStream, kind: type[T]) -> T:
    line = stream.receive(HANDSHAKE_MAX)
    if line is None:
        raise CreateError("the peer closed the connection", remedy="check the peer's output, and try again")
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CreateError(f"the peer is not a `dutyfree layer serve`: {error}") from error


def _proof(token: bytes, role: bytes, *nonces: str) -> bytes:
    return _hmac(token, role, *(nonce.encode() for nonce in nonces))


def _hmac(key: bytes, *parts: bytes) -> bytes:
    """The HMAC of several parts. Only the last may contain a line break, so the parts are unambiguous."""
    return hmac.new(key, b"\n".join(parts), hashlib.sha256).hexdigest().encode()
