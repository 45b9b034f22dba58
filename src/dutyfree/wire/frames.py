"""The channel: one WebSocket on which many calls run at once, each with input and output streams of its own.

Every message is a frame: a byte that says its kind, the number of the call, and a payload. The client chooses
the numbers. A payload of more than ``PART`` bytes goes in several frames, of which all but the last have the
flag ``MORE``; frames of other calls may go between them.

::

    client → server   CALL    a Call: what to do, in which sandbox, with which arguments
                      ITEM    a piece of the call's input
                      END     there is no more input
                      CREDIT  how many further bytes of items may be sent
                      CANCEL  stop the call; its result or error still comes
    server → client   ITEM, CREDIT
                      RESULT  what the call returns; the last frame of the call
                      ERROR   a WireError, instead of a result

Items are sent as far as the other side has given credit, so a slow reader stops the sender and nothing piles
up.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum

import msgspec

PATH = "/v1/channel"
PROTOCOL = "dutyfree.v1"
"""The WebSocket subprotocol."""


class Kind(IntEnum):
    CALL = 0
    CANCEL = 1
    ITEM = 2
    END = 3
    CREDIT = 4
    RESULT = 5
    ERROR = 6


_KINDS = {int(kind): kind for kind in Kind}

MORE = 0x80
"""Flag of the kind: the payload goes on in the next frame of the call."""
HEAD = struct.Struct("<BI")
NUMBER = struct.Struct("<I")
PART = 256 << 10
"""The most bytes of a payload in one frame."""
WINDOW = 1 << 20
"""Bytes of items that may be sent before the first credit."""
FRAME_MAX = HEAD.size + PART
PIECE_COST = 256
"""Bytes that each piece of an unfinished message counts besides its own: an empty one takes memory too."""


class Call(msgspec.Struct, array_like=True, frozen=True, omit_defaults=True):
    """A request. ``arguments`` are those that ``calls`` has for the method."""

    method: str
    sandbox: str
    """The id of the sandbox; empty if the call is for none."""
    arguments: msgspec.Raw
    trace: str = ""
    """The client's place in a trace: the ``traceparent`` of W3C's Trace Context."""


def pack(kind: Kind, number: int, payload: bytes = b"") -> Iterable[bytes]:
    """The frames of one message."""
    if len(payload) <= PART:
        return (HEAD.pack(kind, number) + payload,)
    return _parts(kind, number, payload)


def _parts(kind: Kind, number: int, payload: bytes) -> Iterator[bytes]:
    view = memoryview(payload)
    for at in range(0, len(payload), PART):
        more = MORE if at + PART < len(payload) else 0
        yield HEAD.pack(kind | more, number) + view[at : at + PART]


class Assembler:
    """Puts the messages of many calls together from their frames."""

    def __init__(self, largest: int) -> None:
        """``largest``: the most bytes of one message, and of all that are incomplete."""
        self._largest = largest
        self._parts: dict[tuple[int, int], list[bytes]] = {}
        self.held = 0
        """Bytes of unfinished messages."""

    def add(self, frame: bytes) -> tuple[Kind, int, bytes] | None:
        """The message that this frame completes, if it does. Raises ValueError for what is no frame."""
        if len(frame) < HEAD.size or len(frame) > FRAME_MAX:
            raise ValueError(f"a frame of {len(frame)} bytes")
        flagged, number = HEAD.unpack_from(frame)
        kind = _KINDS.get(flagged & ~MORE)
        if kind is None:
            raise ValueError(f"there are no frames of kind {flagged & ~MORE}")
        payload = frame[HEAD.size :]
        parts = self._parts.get((kind, number)) if self._parts else None
        if parts is None and not flagged & MORE:
            return kind, number, payload
        self.held += len(payload) + PIECE_COST
        if self.held > self._largest:
            raise ValueError(f"more than {self._largest} bytes in unfinished messages")
        if parts is None:
            parts = self._parts[kind, number] = []
        parts.append(payload)
        if flagged & MORE:
            return None
        del self._parts[kind, number]
        whole = b"".join(parts)
        self.held -= len(whole) + PIECE_COST * len(parts)
        return kind, number, whole
