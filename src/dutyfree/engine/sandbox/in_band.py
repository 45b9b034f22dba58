"""What travels as a descriptor on a Unix socket, as frames on a byte stream.

The callers still give and take descriptors. Here these are read into INPUT frames, and filled from OUTPUT
frames, no faster than the other side takes the data.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable

from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.protocol import Frame

_CHUNK = 1 << 16


class InputPump:
    """Sends what a descriptor has as INPUT frames of one request, as far as init takes them.

    Init is not trusted: it may say that it took what it never read.
    """

    def __init__(
        self, identity: int, descriptor: int, send: Callable[[bytes], None], can_send: Callable[[], bool]
    ) -> None:
        """``descriptor`` is a file in memory, or the read end of a pipe. It is closed here.

        ``can_send`` says whether the stream takes frames now. If not, call ``go_on`` when it does.
        """
        os.set_blocking(descriptor, False)
        self._loop = asyncio.get_running_loop()
        self._identity = identity
        self._descriptor = descriptor
        self._send = send
        self._can_send = can_send
        self._room = protocol.INPUT_WINDOW
        self._reports = 1
        """How often init may still say what it took: twice for each frame, and once that nobody reads."""
        self._is_watched = False

    def read(self) -> bytes:
        """The frames that can be sent now."""
        frames: list[bytes] = []
        while self._room and self._descriptor >= 0:
            try:
                data = os.read(self._descriptor, min(self._room, _CHUNK))
            except BlockingIOError:
                self._watch(True)
                return b"".join(frames)
            except OSError:
                data = b""
            frames.append(protocol.frame(Frame.INPUT, self._identity, data))
            self._room -= len(data)
            self._reports += 2
            if not data:
                self.close()
        self._watch(False)
        return b"".join(frames)

    def _readable(self) -> None:
        if not self._can_send():
            self._watch(False)
        elif frames := self.read():
            self._send(frames)

    def go_on(self) -> None:
        """Send what can be sent now: init took some, or the stream takes frames again."""
        if not self._is_watched:
            self._readable()

    def _watch(self, wanted: bool) -> None:
        if wanted != self._is_watched and self._descriptor >= 0:
            self._is_watched = wanted
            if wanted:
                self._loop.add_reader(self._descriptor, self._readable)
            else:
                self._loop.remove_reader(self._descriptor)

    def taken(self, size: int) -> bool:
        """Init took ``size`` bytes; 0 says that nobody reads any more. False if that cannot be."""
        self._reports -= 1
        if self._reports < 0 or size > protocol.INPUT_WINDOW - self._room:
            return False
        self._room += size
        if size == 0:
            self._reports = 0
            self.close()
        elif self._room >= _CHUNK:  # small reports would make small frames; init has more to report
            self.go_on()
        return True

    def close(self) -> None:
        """Stop. Whoever writes into the pipe gets EPIPE."""
        self._watch(False)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class OutputSink:
    """Writes the OUTPUT frames of one request into a pipe."""

    def __init__(self, descriptor: int, credit: Callable[[int], None], stop: Callable[[], object]) -> None:
        """``descriptor`` is closed here. ``credit`` lets init send more; ``stop`` ends the request."""
        os.set_blocking(descriptor, False)
        self._loop = asyncio.get_running_loop()
        self._descriptor = descriptor
        self._credit = credit
        self._stop = stop
        self._queue: deque[tuple[memoryview, int]] = deque()
        self._is_watched = False
        self._ended = False
        self.broken = False
        """Whether the reader closed the pipe before the end."""

    def add(self, data: bytes) -> None:
        if self._descriptor >= 0:
            self._queue.append((memoryview(data), len(data)))
            if not self._is_watched:
                self._flush()

    def _flush(self) -> None:
        while self._queue:
            rest, size = self._queue[0]
            try:
                written = os.write(self._descriptor, rest)
            except BlockingIOError:
                self._watch(True)
                return
            except OSError:
                self.broken = True
                self.close()
                self._stop()
                return
            if written < len(rest):
                self._queue[0] = (rest[written:], size)
                continue
            self._queue.popleft()
            self._credit(size + protocol.FRAME_COST)
        self._watch(False)
        if self._ended:
            self.close()

    def _watch(self, wanted: bool) -> None:
        if wanted != self._is_watched:
            self._is_watched = wanted
            if wanted:
                self._loop.add_writer(self._descriptor, self._flush)
            else:
                self._loop.remove_writer(self._descriptor)

    def end(self) -> None:
        """No more comes: close the pipe when the rest is written."""
        self._ended = True
        if not self._queue:
            self.close()

    def close(self) -> None:
        if self._descriptor < 0:
            return
        self._watch(False)
        self._queue.clear()
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        self._descriptor = -1
