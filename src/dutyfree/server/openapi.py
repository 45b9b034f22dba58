"""The OpenAPI document of the server, made from the table of calls."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

import dutyfree
from dutyfree.engine.exchange.distribution import NAMES_MAX, Offer
from dutyfree.server.requests import CreateRequest
from dutyfree.wire.calls import CALLS, SandboxInfo
from dutyfree.wire.errors import WireError

NODE_CALLS = ("keep_alive", "prepare", "prefetch", "facts", "missing", "forget")
"""The calls that are for the whole server. All others are for one sandbox."""

_NAMES = {
    "name": "name",
    "in": "query",
    "required": True,
    "schema": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": NAMES_MAX},
}
"""The names of chains."""

_SCHEMAS = "#/components/schemas/{name}"


class SandboxPage(msgspec.Struct):
    """A page of sandboxes."""

    sandboxes: tuple[SandboxInfo, ...]
    next: str | None
    """The ``after`` of the next page; null on the last one."""


class Failure(msgspec.Struct):
    """The body of an answer with an error."""

    error: WireError


def plain_calls() -> list[str]:
    """The calls that can be made over plain HTTP: those without items, and not ``create`` and ``release``."""
    listed = [name for name, kind in CALLS.items() if kind.received is None and kind.sent is None]
    return [name for name in listed if name not in ("create", "release", "sandboxes")]


@cache
def document() -> bytes:
    """The document as JSON."""
    calls = plain_calls()
    kinds = [CreateRequest, SandboxInfo, SandboxPage, Failure, Offer]
    kinds += [kind for name in calls for kind in (CALLS[name].arguments, CALLS[name].result) if kind]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_SCHEMAS)
    known = dict(zip(map(repr, kinds), schemas, strict=True))

    def schema(kind: Any) -> Any:
        return known[repr(kind)]

    def operation(summary: str, body: Any = None, result: Any = None, status: str = "200") -> dict[str, Any]:
        answer: dict[str, Any] = {"description": "done"}
        if result is not None:
            answer["content"] = {"application/json": {"schema": schema(result)}}
        failure = {"application/json": {"schema": schema(Failure)}}
        found: dict[str, Any] = {
            "summary": summary,
            "responses": {status: answer, "default": {"description": "an error", "content": failure}},
        }
        if body is not None:
            required = any(field.required for field in msgspec.structs.fields(body))
            content = {"application/json": {"schema": schema(body)}}
            found["requestBody"] = {"content": content, "required": required}
        return found

    one = "/v1/sandboxes/{sandbox}"
    paths: dict[str, dict[str, Any]] = {
        "/v1/sandboxes": {
            "post": operation("Create a sandbox", CreateRequest, SandboxInfo, "201"),
            "get": operation("List your sandboxes", None, SandboxPage),
        },
        one: {
            "get": operation("Show a sandbox", None, SandboxInfo),
            "delete": operation("End a sandbox", status="204"),
        },
        "/v1/layers": {
            "get": operation("Which of these chains of layers there are", None, Offer),
            "parameters": [_NAMES],
        },
    }
    for name in calls:
        path = f"/v1/{name}" if name in NODE_CALLS else f"{one}/{name}"
        call = CALLS[name]
        paths[path] = {"post": operation(f"The call {name}", call.arguments, call.result)}
    parameter = {"name": "sandbox", "in": "path", "required": True, "schema": {"type": "string"}}
    for path, operations in paths.items():
        if "{sandbox}" in path:
            operations["parameters"] = [parameter]
    found = {
        "openapi": "3.1.0",
        "info": {"title": "dutyfree", "version": dutyfree.__version__},
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }
    return msgspec.json.encode(_as_served(found))


def _as_served(value: Any) -> Any:
    """Bytes are a text, or an object with their base64 (``json_form``)."""
    if isinstance(value, dict):
        if value.get("contentEncoding") == "base64":
            encoded = {
                "type": "object",
                "properties": {"base64": {"type": "string"}},
                "required": ["base64"],
                "additionalProperties": False,
            }
            return {"anyOf": [{"type": "string"}, encoded]}
        return {name: _as_served(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_as_served(part) for part in value]
    return value
