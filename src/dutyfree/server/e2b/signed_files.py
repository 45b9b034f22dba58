"""URLs of files that need no headers: the SDK signs them with the access token of the sandbox."""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import time
from collections.abc import Iterable

from starlette.requests import Request

from dutyfree.server.e2b.connect import RpcError
from dutyfree.server.sandboxes import Held

_OPERATIONS = {"GET": "read", "POST": "write"}
_SIGNATURE = re.compile(r"v1_([A-Za-z0-9+/]{43})")
"""That of a SHA-256 digest in base64, without its padding."""
_LONGEST = 4096
"""Characters of the path, and of the user."""


def signed(request: Request) -> bool:
    return request.url.path == "/files" and "signature" in request.query_params


def signer(request: Request, sandboxes: Iterable[Held]) -> Held:
    """The sandbox whose access token made the signature of a URL, which does not name it. Raises RpcError.

    Whoever may connect can ask, and every sandbox is looked at: so what they have in common is hashed once.
    """
    query = request.query_params
    path, user = query.get("path", ""), query.get("username", "")
    expiration = query.get("signature_expiration", "")
    signature = _SIGNATURE.fullmatch(query["signature"])
    if signature is None or max(map(len, (path, user, expiration))) > _LONGEST:
        raise RpcError("unauthenticated", "the signature is not valid")
    wanted = base64.b64decode(f"{signature[1]}=")
    begin = hashlib.sha256(f"{path}:{_OPERATIONS.get(request.method, '')}:{user}:".encode())
    end = f":{expiration}".encode() if expiration else b""
    for held in sandboxes:
        found = begin.copy()
        found.update(held.access_token.encode() + end)
        if secrets.compare_digest(found.digest(), wanted):
            break
    else:
        raise RpcError("unauthenticated", "the signature is not valid, or the sandbox has ended")
    if expiration and not (expiration.isdigit() and int(expiration) > time.time()):
        raise RpcError("unauthenticated", "signature is already expired")
    return held
