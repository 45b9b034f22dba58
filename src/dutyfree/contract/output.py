"""Keep the head and the tail of an output stream of any length."""

from __future__ import annotations


class Collector:
    """Keeps the first and the last ``limit / 2`` bytes of a stream; counts and drops the middle.

    It uses less than 1.5 times the limit plus the last chunk, for chunks of any size. It copies each byte at
    most twice.
    """

    __slots__ = ("_head", "_head_limit", "_tail", "_tail_limit", "_total")

    def __init__(self, limit: int) -> None:
        self._head_limit = max(limit, 0) // 2
        self._tail_limit = max(limit, 0) - self._head_limit
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    def add(self, data: bytes | bytearray | memoryview) -> None:
        self._total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if len(data) > self._tail_limit:
            self._tail.clear()
            data = data[len(data) - self._tail_limit :]
        self._tail += data
        # Trim only at twice the limit, so that each byte moves once and not once per chunk.
        if len(self._tail) > 2 * self._tail_limit:
            del self._tail[: len(self._tail) - self._tail_limit]

    def value(self) -> bytes:
        """The head followed by the tail: the whole stream if nothing was cut."""
        return bytes(self._head + self._tail[max(0, len(self._tail) - self._tail_limit) :])

    @property
    def total(self) -> int:
        """How many bytes the stream had."""
        return self._total

    @property
    def cut(self) -> int:
        """How many bytes were dropped from the middle."""
        kept = len(self._head) + min(len(self._tail), self._tail_limit)
        return self._total - kept
