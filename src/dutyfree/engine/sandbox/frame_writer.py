"""Send frames to init through a socket, without blocking; some with a descriptor.

The kernel counts descriptors in transit (sent, and not received yet) for each user, and compares the count
with the sender's limit of open files. Without root all sandboxes and their owner are one user. Commands in
sandboxes have a lower limit than PID 1 and the owner, so they cannot stop these from sending.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import threading
from collections import deque
from collections.abc import Callable

FULL = "the user of this process has too many descriptors in transit"
REMEDY = "raise the hard limit of open files (ulimit -Hn, LimitNOFILE=): sandboxes get half of it"

_raised = threading.Lock()


class FrameWriter:
    """Sends frames in order, and queues those that the socket does not take yet."""

    def __init__(
        self, connected: socket.socket, on_drained: Callable[[], None], on_refused: Callable[[], None]
    ) -> None:
        """``on_drained``: the queue is empty again. ``on_refused``: the kernel refuses a descriptor."""
        self._loop = asyncio.get_running_loop()
        self._on_drained = on_drained
        self._on_refused = on_refused
        self._queue: deque[tuple[bytes | memoryview, int | None]] = deque()
        self._paused = False
        self.use(connected)

    def use(self, connected: socket.socket) -> None:
        """Send through this socket from now on. Only while paused."""
        self._socket = connected
        self._number = connected.fileno()

    @property
    def ready(self) -> bool:
        """Whether a frame would be sent at once."""
        return not self._queue and not self._paused

    @property
    def queued(self) -> int:
        """How many frames wait."""
        return len(self._queue)

    def send(self, data: bytes, descriptor: int | None) -> None:
        """Send data, with a descriptor that is closed here. The reader notices if the socket is closed."""
        if self._queue or self._paused:
            self._queue.append((data, descriptor))
            return
        try:
            sent = self._transmit(data, descriptor)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._failed(error)
            return
        else:
            descriptor = None
        if sent < len(data):
            self._queue.append((memoryview(data)[sent:], descriptor))
            self._loop.add_writer(self._number, self._flush)

    def pause(self) -> None:
        """Queue all frames until ``resume``."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        if self._queue:
            self._loop.add_writer(self._number, self._flush)
        else:
            self._on_drained()

    def close(self) -> None:
        """Drop the queue, and call nothing any more. Call it before the socket is closed."""
        if self._queue:
            self._loop.remove_writer(self._number)
        for _, descriptor in self._queue:
            if descriptor is not None:
                os.close(descriptor)
        self._queue.clear()
        # Without them it refers to no one, so that a closed channel is freed at once.
        self._on_drained = self._on_refused = _nothing

    def _flush(self) -> None:
        while self._queue:
            data, descriptor = self._queue[0]
            try:
                sent = self._transmit(data, descriptor)
            except BlockingIOError:
                return
            except OSError as error:
                self._queue.popleft()
                self._failed(error)
                break
            if sent < len(data):
                self._queue[0] = (data[sent:], None)
            else:
                self._queue.popleft()
        self._loop.remove_writer(self._number)
        self._on_drained()

    def _transmit(self, data: bytes | memoryview, descriptor: int | None) -> int:
        if descriptor is None:
            return self._socket.send(data)
        try:
            sent = _send(self._socket, data, descriptor)
        except BlockingIOError:
            raise  # the next try sends it
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return sent

    def _failed(self, error: OSError) -> None:
        if error.errno == errno.ETOOMANYREFS:
            self._on_refused()


def _nothing() -> None: ...


def _send(through: socket.socket, data: bytes | memoryview, descriptor: int) -> int:
    """Send data with a descriptor: above the soft limit too, up to the hard one. Raises OSError."""
    try:
        return socket.send_fds(through, [data], [descriptor])
    except OSError as error:
        if error.errno != errno.ETOOMANYREFS:
            raise
    with _raised:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            return socket.send_fds(through, [data], [descriptor])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
