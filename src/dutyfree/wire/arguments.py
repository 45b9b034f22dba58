"""The arguments of a call, as a client sends them: decoded within a bound of memory.

An empty map is one byte of MessagePack, and sixty bytes of memory. Contents of files and the input of
commands stay as large as they are. So what a call has besides these is bounded.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from dutyfree.wire import codec

T = TypeVar("T")

ARGUMENTS_MAX = 8 << 20
"""Bytes of the arguments of a call, besides contents of files and the input of commands."""
PLAIN_MAX = 1 << 20
"""Bytes of them that are decoded again without a type, because a text has surrogates."""
LARGEST_BATCH = 4096
"""Actions of one batch."""

_BYTES = (b"\xc4", b"\xc5", b"\xc6")
"""The first byte of a value of bytes."""


class _Contents(msgspec.Struct):
    """The fields of an action that may be large."""

    stdin: msgspec.Raw = msgspec.Raw()
    data: msgspec.Raw = msgspec.Raw()
    old: msgspec.Raw = msgspec.Raw()
    new: msgspec.Raw = msgspec.Raw()

    @property
    def size(self) -> int:
        """Bytes of those that are bytes."""
        fields = [memoryview(field) for field in (self.stdin, self.data, self.old, self.new)]
        return sum(field.nbytes for field in fields if field[:1].tobytes() in _BYTES)


class _Arguments(_Contents):
    """The same of a call, which may have actions."""

    action: _Contents | None = None
    actions: Annotated[tuple[_Contents, ...], msgspec.Meta(max_length=LARGEST_BATCH)] = ()


def decode_arguments(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Decode and validate. Raises msgspec.ValidationError or msgspec.DecodeError."""
    size = memoryview(data).nbytes
    if size > PLAIN_MAX:
        size -= _contents_size(data)
        if size > ARGUMENTS_MAX:
            raise msgspec.ValidationError(
                f"{size} bytes besides contents of files and input: a call may have {ARGUMENTS_MAX}"
            )
    return codec.decode(data, kind, plain=size <= PLAIN_MAX)


def _contents_size(data: bytes | msgspec.Raw) -> int:
    """Bytes of contents. Everything else is skipped, which takes no memory.

    Raises msgspec.ValidationError or msgspec.DecodeError for what is no call, or has too many actions.
    """
    found = codec.decode(data, _Arguments, plain=False)
    nested = found.actions if found.action is None else (found.action, *found.actions)
    return found.size + sum(action.size for action in nested)
