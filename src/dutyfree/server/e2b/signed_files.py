"""URLs of files that need no headers: the SDK signs them with the access token of the sandbox."""

from __future__ import annotations

import base64
import hashlib
import secrets
import time
from collections.abc import Iterable

from starlette.requests import Request

from dutyfree.server.e2b.connect import RpcError
from dutyfree.server.sandboxes import Held

_OPERATIONS = {"GET": "read", "POST": "write"}


def signed(request: Request) -> bool:
    return request.url.path == "/files" and "signature" in request.query_params


def signer(request: Request, sandboxes: Iterable[Held]) -> Held:
    """The sandbox whose access token made the signature of a URL, which does not name it. Raises RpcError."""
    query = request.query_params
    expiration = query.get("signature_expiration", "")
    operation = _OPERATIONS.get(request.method, "")
    for held in sandboxes:
        words = [query.get("path", ""), operation, query.get("username", ""), held.access_token]
        text = ":".join([*words, expiration] if expiration else words)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        if secrets.compare_digest(f"v1_{digest}".encode(), query["signature"].encode()):
            break
    else:
        raise RpcError("unauthenticated", "the signature is not valid, or the sandbox has ended")
    if expiration and not (expiration.isdigit() and int(expiration) > time.time()):
        raise RpcError("unauthenticated", "signature is already expired")
    return held
