"""Binary messages of a WebSocket, packed and found without a state machine.

A call and its answer are one short message each, for which the parser of ``websockets`` takes a large part of
the time of a call. So whole binary messages go past it. It gets everything else: the handshake, pings, the
end, and what is wrong.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable

from websockets.frames import apply_mask  # type: ignore[attr-defined]  # not listed, but its own

_WHOLE_BINARY = 0x82
"""The first byte of a message of bytes in one frame."""
_MASKED = 0x80
_SHORT, _MEDIUM, _LONG = struct.Struct("!BB"), struct.Struct("!BBH"), struct.Struct("!BBQ")
_SIZE_16, _SIZE_64 = struct.Struct("!H"), struct.Struct("!Q")


def _head(size: int, flag: int) -> bytes:
    if size < 126:
        return _SHORT.pack(_WHOLE_BINARY, flag | size)
    if size < 1 << 16:
        return _MEDIUM.pack(_WHOLE_BINARY, flag | 126, size)
    return _LONG.pack(_WHOLE_BINARY, flag | 127, size)


def pack(message: bytes) -> bytes:
    """A message as a server sends it."""
    return _head(len(message), 0) + message


def pack_masked(message: bytes) -> bytes:
    """A message as a client sends it."""
    mask = os.urandom(4)
    return _head(len(message), _MASKED) + mask + apply_mask(message, mask)


class MessageFinder:
    """Splits what arrives into whole binary messages, for ``on_message``, and other frames, for ``on_other``.

    A message that is too large, or masked by the wrong side, is another frame: the parser refuses it.
    """

    def __init__(
        self,
        largest: int,
        on_message: Callable[[bytes], None],
        on_other: Callable[[bytes], None],
        *,
        masked: bool,
    ) -> None:
        self._largest = largest
        self._on_message = on_message
        self._on_other = on_other
        self._masked = masked
        self._flag = _MASKED if masked else 0
        self._rest = bytearray()
        self._wanted = 0
        self._given_up = False

    def feed(self, data: bytes) -> None:
        """Take what has arrived."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return
            data, self._rest = bytes(self._rest), bytearray()
        at, end = 0, len(data)
        while at < end and not self._given_up:
            size = self._size(data, at, end)
            if size == 0 or at + size > end:
                self._wanted = size
                self._rest += data[at:]
                return
            if size < 0:
                break
            self._take(data, at, at + size)
            at += size
        if at < end:  # the parser refuses it, and so ends the connection
            self._given_up = True
            self._on_other(data[at:])

    def _size(self, data: bytes, at: int, end: int) -> int:
        """Bytes of the frame that begins here; 0 if it is not known yet, and -1 if it is too large."""
        if end - at < 2:
            return 0
        second = data[at + 1]
        size, head = second & 0x7F, 2 + (4 if second & _MASKED else 0)
        if size == 126:
            if end - at < 4:
                return 0
            size, head = _SIZE_16.unpack_from(data, at + 2)[0], head + 2
        elif size == 127:
            if end - at < 10:
                return 0
            size, head = _SIZE_64.unpack_from(data, at + 2)[0], head + 8
        return -1 if size > self._largest else head + size

    def _take(self, data: bytes, at: int, end: int) -> None:
        second = data[at + 1]
        if data[at] != _WHOLE_BINARY or second & _MASKED != self._flag:
            self._on_other(data[at:end])
            return
        size = second & 0x7F
        begin = at + (2 if size < 126 else 4 if size == 126 else 10)
        if self._masked:
            mask = data[begin : begin + 4]
            self._on_message(apply_mask(data[begin + 4 : end], mask))
        else:
            self._on_message(data[begin:end])
