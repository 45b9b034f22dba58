"""A registry over HTTP: manifests and blobs, with its tokens, its mirrors and its moods.

Blocking; to be used from threads, of which several may share one ``RegistryClient``.
"""

from __future__ import annotations

import contextlib
import random
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn
from urllib.parse import urlencode, urlsplit

import msgspec

from dutyfree.contract.errors import CreateError
from dutyfree.engine.images import credentials, http, manifest
from dutyfree.engine.images.manifest import BlobDescriptor
from dutyfree.engine.images.reference import Reference
from dutyfree.engine.store.cancel import CancelToken

ATTEMPTS = 6
FIRST_WAIT = 0.25
LONGEST_WAIT = 30.0
TOKENS = 3
"""That one request may ask for: they end with time, or are used up by other threads."""
AGENT = "dutyfree"

_ACCEPTED = ", ".join((*manifest.INDEXES, *manifest.MANIFESTS))
_WORDS = 64 << 10
"""Of a registry about an error."""
_RETRIED = (408, 425, 429, 500, 502, 503, 504)
_PAIRS = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"|(\w+)=([^\s",]+)')
_LOOPBACK = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?")


class TransientError(Exception):
    """It may work in a moment."""

    def __init__(self, reason: str, wait: float = 0.0, *, reached: bool = True) -> None:
        super().__init__(reason)
        self.wait = wait
        self.reached = reached


class RangeError(TransientError):
    """What is there of the blob already is no part of what the registry has."""

    def __init__(self) -> None:
        super().__init__("the registry knows no such range")


class RegistryClient:
    """One repository at one host. Use as a context manager."""

    def __init__(
        self, base: str, reference: Reference, login: credentials.Login | None, cancel: CancelToken
    ) -> None:
        self.base = base
        self._reference = reference
        self._login = login
        self._cancel = cancel
        self._authorization = ""
        self._lock = threading.Lock()
        # As it was pushed: what the transport would unpack fits no digest.
        headers = {"User-Agent": AGENT, "Accept-Encoding": "identity"}
        self._client = http.HttpClient(headers, self._refuse_downgrade)

    def __enter__(self) -> RegistryClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def manifest(self, wanted: str) -> tuple[bytes, str]:
        """A manifest or index by tag or digest, and its media type. Raises CreateError."""
        data, kind = self._document(f"manifests/{wanted}", {"Accept": _ACCEPTED})
        if wanted.startswith("sha256:"):
            manifest.check(data, wanted, "the manifest")
        return data, kind

    def config(self, wanted: BlobDescriptor) -> bytes:
        """An image's configuration, verified. Raises CreateError."""
        data, _ = self._document(f"blobs/{wanted.digest}", {})
        manifest.check(data, wanted.digest, "the image's configuration")
        return data

    @contextlib.contextmanager
    def blob(self, digest: str, offset: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        """A blob's bytes from the offset on, or from 0 if the registry knows no ranges; one attempt.

        Raises CreateError, or TransientError for what is worth another attempt.
        """
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        with self._once(f"blobs/{digest}", headers) as response:
            ranged = response.status == 206
            if ranged and not response.headers.get("content-range", "").startswith(f"bytes {offset}-"):
                raise TransientError("the registry answered with another range than it was asked for")
            yield offset if ranged else 0, _passing(response)

    # --- Requests -----------------------------------------------------------------------------------

    def _document(self, path: str, headers: Mapping[str, str]) -> tuple[bytes, str]:
        attempt = 0
        while True:
            try:
                with self._once(path, headers) as response:
                    data = _whole(response, manifest.DOCUMENT_MAX)
                    return data, response.headers.get("content-type", "")
            except TransientError as passing:
                attempt += 1
                self.pause(attempt, passing, self._cancel)

    def pause(self, attempt: int, passing: TransientError, cancel: CancelToken) -> None:
        """Wait before the next attempt. Raises CreateError after the last, Cancelled when nobody waits."""
        # A host that does not even answer is given up sooner.
        if attempt >= (ATTEMPTS if passing.reached else ATTEMPTS // 2):
            raise CreateError(
                f"{self.base} cannot be reached: {passing}"
                if not passing.reached
                else f"{self.base} does not give {self._reference}: {passing}",
                remedy="check its name, the network and the proxy; or name a mirror (DUTYFREE_MIRRORS)",
            ) from passing
        wait = min(LONGEST_WAIT, FIRST_WAIT * 2**attempt) * random.uniform(0.5, 1.0)  # noqa: S311
        cancel.wait(min(LONGEST_WAIT, max(wait, passing.wait)))

    @contextlib.contextmanager
    def _once(self, path: str, headers: Mapping[str, str]) -> Iterator[http.HttpResponse]:
        self._cancel.check()
        url = f"{self.base}/v2/{self._reference.repository}/{path}"
        try:
            for renewals in range(TOKENS + 1):
                used = self._authorization
                own = {**headers, "Authorization": used} if used else headers
                with self._client.ask(url, own) as response:
                    if response.status == 401 and renewals < TOKENS:
                        said = _whole(response, _WORDS)
                        if self._authorize(response.headers.get_all("www-authenticate", []), used):
                            continue
                        self._refuse(response, said)
                    self._check(response)
                    yield response
                    return
        except http.ConnectionLost as error:
            raise TransientError(str(error), reached=error.reached) from error
        except http.BadResponse as error:
            raise CreateError(f"{self.base} answers with nonsense: {error}") from error

    def _check(self, response: http.HttpResponse) -> None:
        if response.status not in (200, 206):
            self._refuse(response, _whole(response, _WORDS))

    def _refuse(self, response: http.HttpResponse, body: bytes) -> NoReturn:
        status = response.status
        said = _said(body) or f"status {status}"
        if status in _RETRIED:
            wait = response.headers.get("retry-after", "")
            raise TransientError(said, float(wait) if wait.isdigit() else 0.0)
        if status == 416:
            raise RangeError
        if status in (401, 403):
            known = f"as {self._login.name}" if self._login else "without a login"
            raise CreateError(
                f"{self._reference.registry} refuses {self._reference} {known}: {said}",
                remedy=f"`docker login {self._reference.registry}`; or the image does not exist",
            )
        if status == 404:
            raise CreateError(
                f"{self._reference.registry} has no {self._reference}: {said}",
                remedy="check the name and the tag",
            )
        raise CreateError(f"{self.base} does not give {self._reference}: {said}")

    # --- Who we are ---------------------------------------------------------------------------------

    def _authorize(self, challenges: list[str], used: str) -> bool:
        """Answer a challenge; whether that can help. Raises CreateError, TransientError."""
        with self._lock:
            if used != self._authorization:
                return True  # another thread was quicker
            for challenge in challenges:
                scheme, _, rest = challenge.partition(" ")
                fields = {a or c: b or d for a, b, c, d in _PAIRS.findall(rest)}
                if scheme.lower() == "bearer" and "realm" in fields:
                    self._authorization = f"Bearer {self._token(fields)}"
                    break
                if scheme.lower() == "basic" and self._login:
                    self._authorization = _basic(self._login)
                    break
            return used != self._authorization

    def _token(self, fields: dict[str, str]) -> str:
        realm = fields["realm"]
        where = urlsplit(realm)
        if where.scheme != "https" and not (where.scheme == "http" and self.base.startswith("http:")):
            raise CreateError(f"{self.base} wants a login at {realm}, where anybody could listen")
        query = {"scope": fields.get("scope") or f"repository:{self._reference.repository}:pull"}
        if "service" in fields:
            query["service"] = fields["service"]
        headers, form = {}, None
        if self._login and self._login.token:
            given = {"grant_type": "refresh_token", "client_id": AGENT, "refresh_token": self._login.secret}
            form = urlencode({**query, **given}).encode()
        else:
            realm += f"{'&' if where.query else '?'}{urlencode(query)}"
            headers = {"Authorization": _basic(self._login)} if self._login else {}
        with self._client.ask(realm, headers, form) as response:
            self._check(response)
            data = _whole(response, manifest.DOCUMENT_MAX)
        try:
            answer = msgspec.json.decode(data)
            return str(answer.get("token") or answer["access_token"])
        except (msgspec.DecodeError, RecursionError, KeyError, AttributeError) as error:
            raise CreateError(f"{fields['realm']} gives no token: {error!r}") from error

    def _refuse_downgrade(self, url: str) -> None:
        if self.base.startswith("https:") and not url.startswith("https:"):
            raise CreateError(f"{self.base} leads to {url}, where anybody could change what comes")


def bases(
    reference: Reference, mirrors: Mapping[str, tuple[str, ...]], insecure: tuple[str, ...]
) -> list[str]:
    """Where a reference can be had: its mirrors, then its own registry. Plain HTTP only where told."""
    found = [
        mirror.rstrip("/") if "://" in mirror else _base(mirror, insecure)
        for mirror in mirrors.get(reference.registry, ())
    ]
    return [*found, _base(reference.origin, insecure)]


def _base(host: str, insecure: tuple[str, ...]) -> str:
    plain = _LOOPBACK.fullmatch(host) or host in insecure
    return f"{'http' if plain else 'https'}://{host}"


def _basic(login: credentials.Login) -> str:
    import base64

    return "Basic " + base64.b64encode(f"{login.name}:{login.secret}".encode()).decode()


def _whole(response: http.HttpResponse, limit: int) -> bytes:
    """A small document. Raises CreateError if it is none, TransientError."""
    data = bytearray()
    for piece in _passing(response):
        data += piece
        if len(data) > limit:
            raise CreateError(f"{response.url} gives more than {limit} bytes, where a small document belongs")
    return bytes(data)


def _passing(response: http.HttpResponse) -> Iterator[bytes]:
    try:
        yield from response.pieces()  # as it comes: what a cut leaves of a piece would be lost
    except http.ConnectionLost as error:
        raise TransientError(str(error)) from error


def _said(body: bytes) -> str:
    """The registry's own words about an error."""
    with contextlib.suppress(msgspec.DecodeError, RecursionError, LookupError, TypeError, AttributeError):
        document: Any = msgspec.json.decode(body)
        if "errors" in document:
            return "; ".join(str(entry.get("message") or entry.get("code")) for entry in document["errors"])
        return str(document.get("details") or document.get("message") or "")
    return ""
