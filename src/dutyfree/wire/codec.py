"""MessagePack for values of the contract.

A text may hold bytes that are no valid UTF-8, as names of files do (Python's surrogate escapes). MessagePack
has no such texts, so they travel as an extension type. Only values that have one pay for this.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_TEXT = 1
"""The extension type of a text with surrogates."""

_encode = msgspec.msgpack.Encoder().encode
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def encode(value: object) -> bytes:
    """Encode a value that consists of structs, numbers, texts, bytes and collections of them."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return _encode(_escaped(msgspec.to_builtins(value, builtin_types=(bytes,))))


def decode(data: bytes | memoryview | msgspec.Raw, kind: type[T], *, plain: bool = True) -> T:
    """Decode and validate. Raises msgspec.ValidationError or msgspec.DecodeError.

    ``plain``: what does not fit its type is decoded again without one, since a text may have surrogates. That
    can take a hundred times as much memory as the message has bytes.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        try:
            found: T = decoder.decode(data)
        except msgspec.ValidationError:
            if not plain:
                raise
            untyped = msgspec.msgpack.decode(data, ext_hook=_unescaped)
            found = msgspec.convert(untyped, kind, builtin_types=(bytes,))
    except RecursionError as error:
        raise msgspec.ValidationError("the values are nested too deeply") from error
    return found


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return msgspec.msgpack.Ext(_TEXT, value.encode(errors="surrogatepass"))
        return value
    if isinstance(value, dict):
        return {_escaped(name): _escaped(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(part) for part in value]
    return value


def _unescaped(code: int, data: memoryview) -> str:
    """Raises msgspec.ValidationError."""
    if code != _TEXT:
        raise msgspec.ValidationError(f"there is no extension type {code}")
    try:
        return bytes(data).decode(errors="surrogatepass")
    except UnicodeDecodeError as error:
        raise msgspec.ValidationError(f"a text is not valid: {error}") from error
