"""What travels between server and client arrives as it was sent, or is refused."""

from __future__ import annotations

import errno
import inspect
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dutyfree.contract import Entry, Exec, Found, Match, Observation, Recipe, Span, Stage, Write, errors
from dutyfree.contract.errors import DutyfreeError, RecipeError
from dutyfree.wire import codec, frames
from dutyfree.wire.arguments import ARGUMENTS_MAX, LARGEST_BATCH, PLAIN_MAX, decode_arguments
from dutyfree.wire.calls import CALLS, Batch, Stream
from dutyfree.wire.errors import CLASSES, WireError, code_of, describe, restore, retry_headers, status_of
from dutyfree.wire.frames import Assembler, Kind
from dutyfree.wire.recipes import from_wire, to_wire

ANY_TEXT = st.text(st.characters(codec=None), max_size=20)
"""Also with surrogates, as names of files have them."""


@given(ANY_TEXT, st.binary(max_size=20))
def test_any_text_arrives(text: str, data: bytes) -> None:
    sent = Exec((text, "x"), text, {text: text}, data, 1.5, text)
    assert codec.decode(codec.encode(sent), Exec) == sent
    entries = (Entry(text, "file", 1, 0o644),)
    assert codec.decode(codec.encode(entries), tuple[Entry, ...]) == entries
    found = Found((Match(text, 1, data),), truncated=True)
    assert codec.decode(codec.encode(found), Found) == found


def test_what_has_a_wrong_type_is_refused() -> None:
    for wrong in ({"type": "exec", "command": 5}, {"type": "exec"}, "text", [1]):
        with pytest.raises(msgspec.ValidationError):
            codec.decode(codec.encode(wrong), Exec)
    for wrong_text in (b"\xd4\x05x", b"\xd4\x01\xff"):  # of an unknown extension, and no UTF-8
        with pytest.raises(msgspec.ValidationError):
            codec.decode(wrong_text, str)


def test_contents_may_be_large_and_everything_else_is_bounded() -> None:
    """A byte of it can become a hundred bytes of memory."""
    data = bytes(ARGUMENTS_MAX + 1)
    write = Write("\udcff", data)  # a text with surrogates is decoded a second time
    assert decode_arguments(codec.encode(write), Write) == write
    batch = Batch((Write("a", data), Write("b", data)))
    assert decode_arguments(codec.encode(batch), Batch) == batch
    stream = Stream(Exec("cat", stdin=data))
    assert decode_arguments(codec.encode(stream), Stream) == stream
    maps = b"\xdd" + len(data).to_bytes(4, "big") + b"\x80" * len(data)
    for head in (b"\x81\xa7command", b"\x81\xa4data", b"\x81\xa7unknown"):
        with pytest.raises(msgspec.ValidationError, match="besides contents"):
            decode_arguments(head + maps, Exec)
    with pytest.raises(msgspec.ValidationError, match=rf"length <= {LARGEST_BATCH} - at `\$.actions`"):
        decode_arguments(b"\x81\xa7actions" + maps, Batch)
    with pytest.raises(msgspec.DecodeError, match="truncated"):
        decode_arguments(b"\x81\xa7command" + maps[:-1], Exec)
    with pytest.raises(msgspec.ValidationError, match="ext"):
        decode_arguments(codec.encode(Exec("\udcff" + "x" * PLAIN_MAX)), Exec)


@given(st.lists(st.tuples(st.sampled_from(Kind), st.integers(0, 3), st.binary(max_size=40)), max_size=8))
def test_messages_are_put_together_again(messages: list[tuple[Kind, int, bytes]]) -> None:
    assembler = Assembler(1 << 20)
    sent_frames = [
        frame
        for kind, number, payload in messages
        for frame in frames.pack(kind, number, payload * 20_000 if payload[:1] == b"\0" else payload)
    ]
    got = [message for frame in sent_frames if (message := assembler.add(frame)) is not None]
    assert [(kind, number) for kind, number, _ in got] == [(kind, number) for kind, number, _ in messages]
    for (_, _, payload), (_, _, sent) in zip(got, messages, strict=True):
        assert payload == (sent * 20_000 if sent[:1] == b"\0" else sent)


def test_frames_of_two_calls_may_be_mixed() -> None:
    one, two = (list(frames.pack(Kind.ITEM, number, bytes([number]) * 600_000)) for number in (1, 2))
    assembler = Assembler(2 << 20)
    got = [assembler.add(frame) for pair in zip(one, two, strict=True) for frame in pair]
    assert [message[:2] for message in got if message] == [(Kind.ITEM, 1), (Kind.ITEM, 2)]


def test_unfinished_messages_are_bounded() -> None:
    assembler = Assembler(1 << 20)
    part = frames.HEAD.pack(Kind.CALL | frames.MORE, 1) + bytes(frames.PART)
    for _ in range((1 << 20) // frames.PART - 1):
        assert assembler.add(part) is None
    with pytest.raises(ValueError, match="unfinished"):
        assembler.add(part)


EXAMPLES: dict[str, DutyfreeError] = {
    "path_not_found": errors.PathNotFound(errno.ENOENT, "/a"),
    "file": errors.FileError(errno.ENOSPC, "/a"),
    "special_file": errors.SpecialFile("/a"),
    "edit": errors.EditError("f", 2, (1, 5)),
    "exhausted": errors.Exhausted("full", remedy="wait", numbers={"sandboxes": 3, "retry_after": 2.2}),
    "stage": errors.StageError("failed", number=2, command="make", output="oops"),
    "quarantined": errors.Quarantined("x", stage="setup", command="c", output="o", retry_in=3.0),
    "unknown_process": errors.UnknownProcess("p"),
    "port_closed": errors.PortClosed(80),
    "sandbox_gone": errors.SandboxGone("gone"),
    "action": errors.ActionError("no", kind="no_memory"),
}


@pytest.mark.parametrize("code", EXAMPLES)
def test_errors_arrive_as_they_were(code: str) -> None:
    error = EXAMPLES[code]
    sent = codec.decode(codec.encode(describe(error)), WireError)
    got = restore(sent)
    assert sent.code == code
    assert (type(got), str(got), got.args) == (type(error), str(error), error.args)
    assert {name: getattr(got, name) for name in vars(error)} == vars(error)
    if isinstance(error, OSError):
        assert isinstance(got, OSError)
        assert (got.errno, got.filename) == (error.errno, error.filename)


def test_every_error_of_the_contract_has_a_code_and_a_status() -> None:
    ours = [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, DutyfreeError) and kind.__module__ == errors.__name__
    ]
    assert {code_of(kind) for kind in ours} == set(CLASSES)
    assert len(CLASSES) == len(ours)
    for code in CLASSES:
        for who in ("task", "infrastructure", "program"):
            found = WireError(code, "", who, retryable=False)
            assert 400 <= status_of(found) < 600


def test_a_subclass_is_sent_as_what_the_contract_knows() -> None:
    class OwnError(errors.CreateError):
        pass

    assert describe(OwnError("x")).code == "create"


def test_an_unexpected_error_tells_nothing_about_the_host() -> None:
    found = describe(RuntimeError("/root/secret"))
    assert (found.code, found.verdict) == ("internal", "infrastructure")
    assert "secret" not in found.message


def test_when_to_come_back() -> None:
    assert retry_headers(EXAMPLES["exhausted"]) == {"Retry-After": "3"}
    assert retry_headers(EXAMPLES["stage"]) == {}


def test_recipes_leave_their_files_behind(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    recipe = Recipe(
        "debian:12", (Stage("files", files={"a": tmp_path}), Stage("setup", ("make",))), env={"A": "b"}
    )
    wire, files = to_wire(recipe)
    assert str(tmp_path).encode() not in codec.encode(wire)
    assert from_wire(codec.decode(codec.encode(wire), type(wire)), files.__getitem__) == recipe
    with pytest.raises(RecipeError, match="secrets"):
        to_wire(Recipe(stages=(Stage("setup", ("x",), secrets=("TOKEN",)),)))


@pytest.mark.parametrize("name", CALLS)
def test_results_can_be_decoded(name: str) -> None:
    """Every type of the table is one that the codec knows."""
    call = CALLS[name]
    for kind in (call.arguments, call.result, call.received, call.sent):
        if kind is not None:
            msgspec.msgpack.Decoder(kind)


def test_an_observation_keeps_its_spans() -> None:
    seen: Any = Observation(exit_code=3, stdout=b"\xff", spans=(Span("run", 0.1, 0.2),), seconds=0.4)
    assert codec.decode(codec.encode(seen), Observation) == seen
