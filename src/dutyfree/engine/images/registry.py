"""Client of a registry: manifests and blobs, with retries. Blocks."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import msgspec

from dutyfree.contract.errors import CreateError
from dutyfree.engine.images import http, manifest
from dutyfree.engine.images.authentication import AGENT, Authentication
from dutyfree.engine.images.credentials import Login
from dutyfree.engine.images.manifest import BlobDescriptor
from dutyfree.engine.images.reference import Reference
from dutyfree.engine.store.cancel import CancelToken

ATTEMPTS = 6
WAIT_MAX = 30.0
TOKENS_MAX = 3
"""Tokens that one request may obtain: a token may expire, or another thread may replace it."""

_ACCEPTED = ", ".join((*manifest.INDEXES, *manifest.MANIFESTS))
_ERROR_MAX = 64 << 10
"""Limit for the body of an error response."""
_RETRIED = (408, 425, 429, 500, 502, 503, 504)
_LOOPBACK = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?")


class TransientError(Exception):
    """A failure that may not happen again: retry."""

    def __init__(self, reason: str, wait: float = 0.0, *, reached: bool = True) -> None:
        super().__init__(reason)
        self.wait = wait
        self.reached = reached


class RangeError(TransientError):
    """The registry refuses the range: the partial download is not a part of its blob."""

    def __init__(self) -> None:
        super().__init__("the registry does not have the requested range")


class RegistryClient:
    """One repository at one host, used as a context manager. Threads may share it.

    ``first_wait`` is the pause before the first retry, in seconds. It doubles with each further one.
    ``manifest_seconds`` is how long the server may prepare a manifest. ``authorization`` is a header that
    needs no challenge.
    """

    def __init__(
        self,
        base: str,
        reference: Reference,
        login: Login | None,
        cancel: CancelToken,
        *,
        first_wait: float = 0.25,
        attempts: int = ATTEMPTS,
        manifest_seconds: float = http.READ_SECONDS,
        authorization: str = "",
    ) -> None:
        self.base = base
        self._attempts = attempts
        self._manifest_seconds = manifest_seconds
        self._first_wait = first_wait
        self._reference = reference
        self._login = login
        self._cancel = cancel
        self._authentication = Authentication(base, reference.repository, login, self._fetch)
        self._authentication.header = authorization
        # No transport compression: digests are of the stored bytes.
        headers = {"User-Agent": AGENT, "Accept-Encoding": "identity"}
        self._client = http.HttpClient(headers, self._check_downgrade, cancel)

    def __enter__(self) -> RegistryClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def manifest(self, wanted: str) -> tuple[bytes, str]:
        """Fetch a manifest or index by tag or digest. Returns it with its media type. Raises CreateError."""
        path = self._path(f"manifests/{wanted}")
        data, kind = self._document(path, {"Accept": _ACCEPTED}, self._manifest_seconds)
        if wanted.startswith("sha256:"):
            manifest.check(data, wanted, "the manifest")
        return data, kind

    def document(self, path: str) -> bytes:
        """Fetch a document of the host that is not one of the repository. Raises CreateError."""
        return self._document(path, {})[0]

    def config(self, wanted: BlobDescriptor) -> bytes:
        """Fetch and verify an image's configuration. Raises CreateError."""
        data, _ = self._document(self._path(f"blobs/{wanted.digest}"), {})
        manifest.check(data, wanted.digest, "the image's configuration")
        return data

    @contextlib.contextmanager
    def blob(self, digest: str, offset: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Request a blob once. Yields the offset at which it starts, and its pieces.

        Starts at 0 if the registry does not support ranges. Raises CreateError, or TransientError if a retry
        may help.
        """
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        with self._once(self._path(f"blobs/{digest}"), headers) as response:
            ranged = response.status == 206
            if ranged and not response.headers.get("content-range", "").startswith(f"bytes {offset}-"):
                raise TransientError("the registry sent another range than requested")
            yield offset if ranged else 0, _pieces(response)

    # --- Requests -----------------------------------------------------------------------------------

    def _path(self, rest: str) -> str:
        return f"/v2/{self._reference.repository}/{rest}"

    def _document(
        self, path: str, headers: Mapping[str, str], read_seconds: float = http.READ_SECONDS
    ) -> tuple[bytes, str]:
        attempt = 0
        while True:
            try:
                with self._once(path, headers, read_seconds) as response:
                    data = _body(response, manifest.DOCUMENT_MAX)
                    return data, response.headers.get("content-type", "")
            except TransientError as error:
                attempt += 1
                self.pause(attempt, error, self._cancel)

    def pause(self, attempt: int, error: TransientError, cancel: CancelToken) -> None:
        """Wait before the next attempt. Raises CreateError after the last one, and Cancelled."""
        cancel.check()  # it cuts the connection
        # Give up sooner on a host that does not answer at all.
        if attempt >= (self._attempts if error.reached else self._attempts // 2):
            raise CreateError(
                f"{self.base} cannot be reached: {error}"
                if not error.reached
                else f"{self._reference} cannot be fetched from {self.base}: {error}",
                remedy="check the host's name, the network and the proxy, or use a mirror (DUTYFREE_MIRRORS)",
            ) from error
        wait = min(WAIT_MAX, self._first_wait * 2**attempt) * random.uniform(0.5, 1.0)  # noqa: S311
        cancel.wait(min(WAIT_MAX, max(wait, error.wait)))

    @contextlib.contextmanager
    def _once(
        self, path: str, headers: Mapping[str, str], read_seconds: float = http.READ_SECONDS
    ) -> Iterator[http.HttpResponse]:
        self._cancel.check()
        url = self.base + path
        try:
            for renewals in range(TOKENS_MAX + 1):
                used = self._authentication.header
                own = {**headers, "Authorization": used} if used else headers
                with self._client.request(url, own, read_seconds=read_seconds) as response:
                    if response.status == 401 and renewals < TOKENS_MAX:
                        said = _body(response, _ERROR_MAX)
                        if self._authentication.renew(response.headers.get_all("www-authenticate", []), used):
                            continue
                        self._refuse(response, said)
                    self._check(response)
                    yield response
                    return
        except http.ConnectionLost as error:
            raise TransientError(str(error), reached=error.reached) from error
        except http.BadResponse as error:
            raise CreateError(f"{self.base} sent an invalid response: {error}") from error

    def _fetch(self, url: str, headers: Mapping[str, str], form: bytes | None) -> bytes:
        with self._client.request(url, headers, form) as response:
            self._check(response)
            return _body(response, manifest.DOCUMENT_MAX)

    def _check(self, response: http.HttpResponse) -> None:
        if response.status not in (200, 206):
            self._refuse(response, _body(response, _ERROR_MAX))

    def _refuse(self, response: http.HttpResponse, body: bytes) -> NoReturn:
        status = response.status
        said = _error_text(body) or f"status {status}"
        if status in _RETRIED:
            wait = response.headers.get("retry-after", "")
            raise TransientError(said, float(wait) if wait.isdigit() else 0.0)
        if status == 416:
            raise RangeError
        if status in (401, 403):
            known = f"as {self._login.name}" if self._login else "without a login"
            raise CreateError(
                f"{self._reference.registry} refuses {self._reference} {known}: {said}",
                remedy=f"run `docker login {self._reference.registry}`; or the image does not exist",
            )
        if status == 404:
            raise CreateError(
                f"{self._reference.registry} has no {self._reference}: {said}",
                remedy="check the name and the tag",
            )
        raise CreateError(f"{self._reference} cannot be fetched from {self.base}: {said}")

    def _check_downgrade(self, url: str) -> None:
        if self.base.startswith("https:") and not url.startswith("https:"):
            raise CreateError(f"{self.base} redirects to {url}, which is not encrypted")


def bases(
    reference: Reference, mirrors: Mapping[str, tuple[str, ...]], insecure: tuple[str, ...]
) -> list[str]:
    """Base URLs for a reference: its mirrors, then its registry. Plain HTTP for loopback and ``insecure``."""
    found = [
        mirror.rstrip("/") if "://" in mirror else _base(mirror, insecure)
        for mirror in mirrors.get(reference.registry, ())
    ]
    return [*found, _base(reference.origin, insecure)]


def _base(host: str, insecure: tuple[str, ...]) -> str:
    plain = _LOOPBACK.fullmatch(host) or host in insecure
    return f"{'http' if plain else 'https'}://{host}"


def _body(response: http.HttpResponse, limit: int) -> bytes:
    """The body of a response. Raises CreateError if it exceeds the limit, and TransientError."""
    data = bytearray()
    for piece in _pieces(response):
        data += piece
        if len(data) > limit:
            raise CreateError(f"{response.url} sent more than {limit} bytes instead of a small document")
    return bytes(data)


def _pieces(response: http.HttpResponse) -> Iterator[bytes]:
    try:
        yield from response.pieces()
    except http.ConnectionLost as error:
        raise TransientError(str(error)) from error


def _error_text(body: bytes) -> str:
    """The registry's or our server's own description of an error, or an empty string."""
    with contextlib.suppress(msgspec.DecodeError, RecursionError, LookupError, TypeError, AttributeError):
        document: Any = msgspec.json.decode(body)
        if "errors" in document:
            return "; ".join(str(entry.get("message") or entry.get("code")) for entry in document["errors"])
        ours = document.get("error")
        if isinstance(ours, dict):
            return str(ours.get("message") or "")
        return str(document.get("details") or document.get("message") or "")
    return ""
