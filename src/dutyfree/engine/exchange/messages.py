"""Documents over a stream of bytes: one a line, sealed where both ends know a token.

The token itself is never sent. Each end proves to know it by what it makes of two random numbers; after that
every line carries a seal of its place and its contents. Whoever sits between can listen and cut, but not
speak in the name of an end; what is not lines is verified by digests that are.
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
from dutyfree.engine.store.cancel import CancelToken

PATIENCE = 0.1
"""Seconds between two looks whether anybody still wants what is waited for."""

TOKEN = "DUTYFREE_PEER_TOKEN"  # noqa: S105 (a variable's name)
TOKEN_FILE = "DUTYFREE_PEER_TOKEN_FILE"  # noqa: S105
GREETING_MAX = 4096
"""Bytes that one may say of whom nothing is known yet."""
SHORTEST = 16
"""Bytes of a token that nobody guesses."""

Nonce = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")]

T = TypeVar("T")


class ByteReader(Protocol):
    """A file as far as it is needed here: nothing is read of it twice."""

    def read(self, size: int, /) -> bytes: ...

    def readline(self, size: int, /) -> bytes: ...


class ByteWriter(Protocol):
    def write(self, data: bytes, /) -> object: ...

    def flush(self) -> None: ...


class CancellableReader:
    """A pipe or a socket that may be silent for long: whoever reads it can be halted meanwhile."""

    def __init__(self, descriptor: int, cancel: CancelToken, silence: float = float("inf")) -> None:
        self._descriptor = descriptor
        self._cancel = cancel
        self.silence = silence
        """Seconds after which TimeoutError is raised."""
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
        until = monotonic() + self.silence
        waiting = select.poll()  # select(2) knows no descriptor above 1023
        waiting.register(self._descriptor, select.POLLIN)
        while not waiting.poll(PATIENCE * 1000):
            self._cancel.check()
            if monotonic() > until:
                raise TimeoutError(f"nothing was said for {self.silence:g} s")
        return os.read(self._descriptor, CHUNK)


class MessageAuthenticator:
    """Of the lines of one conversation, each way counted."""

    def __init__(self, key: bytes, ours: bytes, theirs: bytes) -> None:
        self._key = key
        self._ours, self._theirs = ours, theirs
        self._sent = self._came = 0

    def seal(self, document: bytes) -> bytes:
        self._sent += 1
        return _code(self._key, self._ours, str(self._sent).encode(), document)

    def fits(self, seal: bytes, document: bytes) -> bool:
        self._came += 1
        return hmac.compare_digest(seal, _code(self._key, self._theirs, str(self._came).encode(), document))


class MessageStream:
    """Both ways of a conversation."""

    def __init__(
        self, reader: ByteReader, writer: ByteWriter, seals: MessageAuthenticator | None = None
    ) -> None:
        self.reader = reader
        self.writer = writer
        self._seals = seals

    def put(self, document: msgspec.Struct) -> None:
        """Raises OSError."""
        data = msgspec.json.encode(document)
        seal = self._seals.seal(data) + b" " if self._seals else b""
        self.writer.write(seal + data + b"\n")
        self.writer.flush()

    def get(self, most: int = DOCUMENT_MAX) -> bytes | None:
        """What the other end says next; None once it has hung up. Raises OSError, CreateError."""
        line = self.reader.readline(most)
        if not line.endswith(b"\n"):
            return None
        if self._seals is None:
            return line[:-1]
        seal, _, document = line[:-1].partition(b" ")
        if not self._seals.fits(seal, document):
            raise CreateError("a line is not sealed by who knows the token: somebody sits between")
        return document


# --- Tokens --------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True):
    """The first word of who is called."""

    dutyfree: int = 1
    nonce: Nonce = ""
    """Empty where no token is wanted."""
    error: str = ""


class Proof(msgspec.Struct, frozen=True):
    proof: str
    nonce: Nonce = ""
    error: str = ""


def token() -> bytes:
    """Of this machine's environment; empty where there is none. Blocks. Raises UsageError."""
    found, path = os.environ.get(TOKEN, ""), os.environ.get(TOKEN_FILE, "")
    if path and not found:
        try:
            found = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"the token cannot be read: {error}", remedy=f"see {TOKEN_FILE}") from error
        if not found.strip():
            raise UsageError(f"there is no token in {path}", remedy=f"see {TOKEN_FILE}")
    found = found.strip()
    if found and len(found) < SHORTEST:
        raise UsageError(
            f"the token has {len(found)} characters, which can be guessed",
            remedy=f"take {SHORTEST} or more, such as those of: openssl rand -hex 32",
        )
    return found.encode()


def received(lines: MessageStream, token: bytes) -> MessageStream:
    """As who is called: the conversation with one who knows the token. Raises CreateError, OSError."""
    ours = secrets.token_hex(32) if token else ""
    lines.put(Hello(nonce=ours))
    if not token:
        return lines
    said = _heard(lines, Proof)
    if not hmac.compare_digest(_proof(token, b"asking", ours, said.nonce), said.proof.encode()):
        lines.put(Proof("", error="that is not its token"))
        raise CreateError("somebody without the token was turned away")
    lines.put(Proof(_proof(token, b"asked", ours, said.nonce).decode()))
    key = _code(token, b"seals", ours.encode(), said.nonce.encode())
    return MessageStream(lines.reader, lines.writer, MessageAuthenticator(key, b"asked", b"asking"))


def greeted(lines: MessageStream, token: bytes) -> MessageStream:
    """As who calls: the conversation with one who knows the token, if we have one. Raises CreateError."""
    hello = _heard(lines, Hello)
    if hello.error:
        raise CreateError(f"the peer says: {hello.error}")
    theirs = hello.nonce
    if bool(theirs) != bool(token):
        raise CreateError(
            "the peer wants a token" if theirs else "the peer has no token: it may be somebody else",
            remedy=f"set {TOKEN} or {TOKEN_FILE} at both ends",
        )
    if not token:
        return lines
    ours = secrets.token_hex(32)
    lines.put(Proof(_proof(token, b"asking", theirs, ours).decode(), ours))
    said = _heard(lines, Proof)
    if said.error:
        raise CreateError(f"the peer says: {said.error}", remedy=f"see {TOKEN} and {TOKEN_FILE}")
    if not hmac.compare_digest(_proof(token, b"asked", theirs, ours), said.proof.encode()):
        raise CreateError("the peer does not know the token: it may be somebody else")
    key = _code(token, b"seals", theirs.encode(), ours.encode())
    return MessageStream(lines.reader, lines.writer, MessageAuthenticator(key, b"asking", b"asked"))


def _heard(lines: MessageStream, kind: type[T]) -> T:
    line = lines.get(GREETING_MAX)
    if line is None:
        raise CreateError("the peer has hung up", remedy="see what it printed, and try again")
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CreateError(f"the peer is no `dutyfree layer serve`: {error}") from error


def _proof(token: bytes, who: bytes, *nonces: str) -> bytes:
    return _code(token, who, *(nonce.encode() for nonce in nonces))


def _code(key: bytes, *parts: bytes) -> bytes:
    """One code for these parts and no others: none but the last can hold a line's end."""
    return hmac.new(key, b"\n".join(parts), hashlib.sha256).hexdigest().encode()
