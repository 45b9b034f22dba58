"""The collector of output: head and tail kept, the middle counted."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dutyfree.contract.output import Collector


def collected(limit: int, *chunks: bytes) -> tuple[bytes, int]:
    collector = Collector(limit)
    for chunk in chunks:
        collector.add(chunk)
    return collector.value(), collector.cut


@pytest.mark.parametrize(
    ("limit", "chunks", "value", "cut"),
    [
        (10, (), b"", 0),
        (10, (b"0123456789",), b"0123456789", 0),
        (10, (b"0123456789a",), b"012346789a", 1),
        (10, (b"01234", b"5" * 100, b"abcde"), b"01234abcde", 100),
        (3, (b"abcdef",), b"aef", 3),
        (1, (b"abc",), b"c", 2),
        (0, (b"abc", b"d"), b"", 4),
    ],
)
def test_keeps_head_and_tail(limit: int, chunks: tuple[bytes, ...], value: bytes, cut: int) -> None:
    assert collected(limit, *chunks) == (value, cut)


@given(limit=st.integers(0, 40), chunks=st.lists(st.binary(max_size=30)))
def test_agrees_with_slicing_the_whole(limit: int, chunks: list[bytes]) -> None:
    whole = b"".join(chunks)
    head = limit // 2
    tail = limit - head
    expected = whole if len(whole) <= limit else whole[:head] + whole[len(whole) - tail :]
    assert collected(limit, *chunks) == (expected, len(whole) - len(expected))


@given(limit=st.integers(0, 40), chunks=st.lists(st.binary(max_size=30)))
def test_takes_views_and_can_be_read_at_any_time(limit: int, chunks: list[bytes]) -> None:
    collector = Collector(limit)
    for count, chunk in enumerate(chunks, 1):
        collector.add(memoryview(chunk))
        assert collector.total == len(b"".join(chunks[:count]))
        assert len(collector.value()) + collector.cut == collector.total


def test_memory_is_bounded() -> None:
    collector = Collector(1 << 20)
    chunk = bytes(32 << 10)
    tracemalloc.start()
    try:
        for _ in range(4096):
            collector.add(chunk)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert collector.cut == (128 << 20) - (1 << 20)
    assert peak < 3 << 20
