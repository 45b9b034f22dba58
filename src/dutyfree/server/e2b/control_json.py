"""JSON of E2B's control API: bodies of requests, times, the version that clients see."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request

from dutyfree.contract.errors import UsageError
from dutyfree.server import json_form

ENVD_VERSION = "0.6.1"
"""The version of E2B's own program in a sandbox whose calls are served here."""


async def body_of(request: Request, kind: Any) -> Any:
    """The body of a request; an empty one stands for no fields. Raises UsageError."""
    try:
        return json_form.decode(await request.body() or b"{}", kind)
    except msgspec.MsgspecError as error:
        raise UsageError(f"the body of the request is not valid: {error}") from error


def time_text(seconds: float) -> str:
    """A Unix time as E2B writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
