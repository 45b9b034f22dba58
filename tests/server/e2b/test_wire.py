"""The wire of E2B: signed URLs, and messages of a stream."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import time
from collections import deque
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import pytest
from starlette.requests import Request

from dutyfree.server.e2b import connect, signed_files
from dutyfree.server.e2b.connect import ENVELOPE, RpcError

SANDBOXES: Any = [SimpleNamespace(access_token=f"token-{number}") for number in range(3)]


def asked(**query: str) -> Request:
    text = urlencode(query).encode()
    return Request({"type": "http", "method": "GET", "query_string": text, "headers": []})


def signature(*words: str) -> str:
    digest = hashlib.sha256(":".join(words).encode()).digest()
    return f"v1_{base64.b64encode(digest).decode().rstrip('=')}"


def test_a_signature_is_that_of_one_sandbox() -> None:
    made = signature("a", "read", "user", "token-1")
    request = asked(path="a", username="user", signature=made)
    assert signed_files.signer(request, SANDBOXES) is SANDBOXES[1]
    later = str(int(time.time()) + 100)
    made = signature("a", "read", "", "token-2", later)
    request = asked(path="a", signature=made, signature_expiration=later)
    assert signed_files.signer(request, SANDBOXES) is SANDBOXES[2]


@pytest.mark.parametrize(
    ("path", "made"),
    [
        ("b", signature("a", "read", "", "token-1")),
        ("a", signature("a", "write", "", "token-1")),
        ("a", "v1_"),
        ("a", ""),
        ("a", "v1_" + "\u00e9" * 43),
        ("x" * 5000, signature("x" * 5000, "read", "", "token-1")),
    ],
)
def test_other_signatures_are_refused(path: str, made: str) -> None:
    with pytest.raises(RpcError, match="not valid"):
        signed_files.signer(asked(path=path, signature=made), SANDBOXES)


@pytest.mark.parametrize("size", [1, 3, 100, 10_000])
async def test_messages_are_found_however_they_arrive(size: int) -> None:
    sent = [{"number": number, "text": "x" * number} for number in range(20)]
    packed = [json.dumps(one).encode() for one in sent]
    data = b"".join(ENVELOPE.pack(0, len(one)) + one for one in packed)
    data += ENVELOPE.pack(connect.LAST, 2) + b"{}"
    parts = deque(data[at : at + size] for at in range(0, len(data), size))

    async def receive() -> dict[str, Any]:
        part = parts.popleft()
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    assert [one async for one in connect.messages(request)] == sent


def test_gzip_is_what_it_says() -> None:
    data = gzip.compress(bytes(100_000))
    assert connect.unzipped(data, connect.unzipped_size(data)) == bytes(100_000)
    with pytest.raises(RpcError, match="more than its 10 bytes"):
        connect.unzipped(data, 10)
    with pytest.raises(RpcError, match="more than"):
        connect.unzipped_size(data[:-4] + b"\xff\xff\xff\xff")
