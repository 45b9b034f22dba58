"""JSON for people: bytes are text where they are valid UTF-8, and otherwise ``{"base64": "…"}``."""

from __future__ import annotations

import binascii
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response

from dutyfree import validation
from dutyfree.contract.errors import ArgumentError
from dutyfree.wire.arguments import ARGUMENTS_MAX

T = TypeVar("T")

VALUES_MAX = 2 << 20
"""Values of a large JSON text: each takes up to a hundred bytes of memory."""

_BYTES = ("stdin", "data", "old", "new")
"""The fields of requests that are bytes."""


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer whose protocol is somebody else's: plain JSON, in which bytes are base64."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def dump(value: object) -> bytes:
    """A value as JSON."""
    return msgspec.json.encode(_texts(msgspec.to_builtins(value, builtin_types=(bytes,))))


def _texts(value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"base64": binascii.b2a_base64(value, newline=False).decode()}
    if isinstance(value, str):
        return value.encode(errors="surrogateescape").decode(errors="replace")
    if isinstance(value, dict):
        return {name: _texts(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_texts(part) for part in value]
    return value


def decode(body: bytes, kind: type[T]) -> T:
    """A value from JSON. Raises msgspec.MsgspecError."""
    if len(body) > ARGUMENTS_MAX and _most_values(body) > VALUES_MAX:
        raise msgspec.ValidationError(
            f"more than {VALUES_MAX} values, or as many commas and brackets in texts: send these as base64"
        )
    try:
        return msgspec.json.decode(body, type=kind)
    except RecursionError as error:
        raise msgspec.ValidationError("the values are nested too deeply") from error


def _most_values(body: bytes) -> int:
    """The most values that a JSON text can have: each but the first follows a comma or a bracket."""
    return 1 + sum(body.count(mark) for mark in (b",", b"[", b"{"))


def load(body: bytes, kind: type[T]) -> T:
    """The arguments of a call from JSON. An empty body stands for no arguments. Raises ArgumentError."""
    plain: Any = None
    try:
        plain = decode(body or b"{}", object)
        if isinstance(plain, dict):
            plain = _with_bytes(plain)
            if isinstance(actions := plain.get("actions"), list):
                plain["actions"] = [_with_bytes(one) if isinstance(one, dict) else one for one in actions]
            if isinstance(action := plain.get("action"), dict):
                plain["action"] = _with_bytes(action)
        return msgspec.convert(plain, kind, builtin_types=(bytes,))
    except (msgspec.MsgspecError, ValueError) as error:
        said = str(error)
        if isinstance(error, msgspec.ValidationError) and said.startswith("Invalid enum value"):
            said = validation.explain(error, plain, kind).message  # which names the values that are valid
        raise ArgumentError(f"the body of the request is not valid: {said}") from error


def _with_bytes(table: dict[str, Any]) -> dict[str, Any]:
    return {name: _as_bytes(value) if name in _BYTES else value for name, value in table.items()}


def _as_bytes(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and list(value) == ["base64"]:
        return binascii.a2b_base64(str(value["base64"]), strict_mode=True)
    return value
