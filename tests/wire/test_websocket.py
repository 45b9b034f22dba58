"""Messages of a WebSocket, however their bytes arrive, against the parser of the package websockets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode

from dutyfree.wire import websocket
from dutyfree.wire.websocket import MessageFinder

LARGEST = 70_000


def unexpected(data: bytes) -> None:
    pytest.fail(f"{data[:20]!r}")


MESSAGES = st.lists(
    st.one_of(
        st.tuples(st.just(Opcode.BINARY), st.binary(max_size=300)),
        st.tuples(st.just(Opcode.BINARY), st.integers(65_000, LARGEST).map(bytes)),
        st.tuples(st.sampled_from([Opcode.PING, Opcode.PONG, Opcode.TEXT]), st.binary(max_size=100)),
    ),
    max_size=6,
)


@given(messages=MESSAGES, cuts=st.lists(st.integers(1, 5000), min_size=1, max_size=8), masked=st.booleans())
def test_messages_are_found_however_their_bytes_arrive(
    messages: list[tuple[Opcode, bytes]], cuts: list[int], masked: bool
) -> None:
    sent = b"".join(Frame(opcode, data).serialize(mask=masked) for opcode, data in messages)
    found: list[bytes] = []
    others: list[bytes] = []
    finder = MessageFinder(LARGEST, found.append, others.append, masked=masked)
    at = number = 0
    while at < len(sent):
        size = cuts[number % len(cuts)]
        finder.feed(sent[at : at + size])
        at, number = at + size, number + 1
    assert found == [data for opcode, data in messages if opcode is Opcode.BINARY]
    assert [other[0] & 0x0F for other in others] == [
        opcode for opcode, _ in messages if opcode is not Opcode.BINARY
    ]


@given(st.one_of(st.binary(max_size=300), st.integers(60_000, 70_000).map(bytes)))
def test_what_is_packed_is_what_the_standard_says(message: bytes) -> None:
    assert websocket.pack(message) == Frame(Opcode.BINARY, message).serialize(mask=False)
    found: list[bytes] = []
    finder = MessageFinder(LARGEST, found.append, unexpected, masked=True)
    finder.feed(websocket.pack_masked(message))
    assert found == [message]


@pytest.mark.parametrize(
    "wrong",
    [
        Frame(Opcode.BINARY, bytes(LARGEST + 1)).serialize(mask=True),
        b"\x82\xff\xff\xff\xff\xff\xff\xff\xff\xff",
    ],
    ids=["large", "huge"],
)
def test_what_is_too_large_goes_to_the_parser_at_once(wrong: bytes) -> None:
    """Before it has arrived, so that nothing is kept for it."""
    others: list[bytes] = []
    finder = MessageFinder(LARGEST, unexpected, others.append, masked=True)
    finder.feed(wrong[:12])
    assert others == [wrong[:12]]
    finder.feed(b"more")
    assert others[1:] == [b"more"]
    assert not finder._rest


def test_the_wrong_side_masks() -> None:
    for masked in (True, False):
        others: list[bytes] = []
        frame = Frame(Opcode.BINARY, b"x").serialize(mask=not masked)
        MessageFinder(LARGEST, unexpected, others.append, masked=masked).feed(frame)
        assert others == [frame]


@given(st.binary(max_size=200))
def test_no_bytes_break_it(data: bytes) -> None:
    MessageFinder(LARGEST, lambda _: None, lambda _: None, masked=True).feed(data)
