"""A peer that is a server (``dutyfree serve``), asked with the client for registries. Blocks.

The server says which chains it has at ``/v1/layers``. Each layer is an artifact of the repository
``dutyfree/layers``, with its blobs, as ``distribution`` describes it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urlsplit

import msgspec

from dutyfree.contract.errors import CreateError, UsageError
from dutyfree.engine.exchange.chains import Blob, LayerChain
from dutyfree.engine.exchange.distribution import ARTIFACTS, NAMES_MAX, Offer, artifact_blobs, artifact_tag
from dutyfree.engine.images import credentials
from dutyfree.engine.images.credentials import Login
from dutyfree.engine.images.mirrors import pull_options
from dutyfree.engine.images.reference import Reference
from dutyfree.engine.images.streams import Readable
from dutyfree.engine.store.cancel import CancelToken

if TYPE_CHECKING:
    from dutyfree.engine.images.registry import RegistryClient

SCHEMES = ("http://", "https://")
TOKEN = "DUTYFREE_PEER_TOKEN"  # noqa: S105 (a variable's name)
TOKEN_FILE = "DUTYFREE_PEER_TOKEN_FILE"  # noqa: S105
PACK_SECONDS = 3600.0
"""How long a server may take to pack a layer. A node that asks its peers waits ``peer_seconds`` at most."""


def check(source: str) -> str:
    """The host of a server's address. Raises UsageError if the address is malformed."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(source)
        rest = (parts.username, parts.password, parts.path.strip("/"), parts.query, parts.fragment)
        if parts.hostname and not any(rest) and (parts.port is None or parts.port > 0):
            return parts.netloc
    raise UsageError(
        f"{source!r} is not the address of a server", remedy="write https://HOST:PORT, without a path"
    )


def find_login(host: str) -> Login | None:
    """The token for a server: where `docker login` stores it, or from the environment.

    Raises UsageError, CreateError.
    """
    if found := credentials.find(host):
        return found
    secret, path = os.environ.get(TOKEN, ""), os.environ.get(TOKEN_FILE, "")
    if path and not secret:
        try:
            secret = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"the token cannot be read: {error}", remedy=f"check {TOKEN_FILE}") from error
        if not secret.strip():
            raise UsageError(f"there is no token in {path}", remedy=f"check {TOKEN_FILE}")
    secret = secret.strip()
    if not secret.isascii() or not secret.isprintable():
        raise UsageError(f"what {TOKEN} or {TOKEN_FILE} gives is not a token")
    return Login("token", secret) if secret else None


@contextlib.contextmanager
def connect(source: str, cancel: CancelToken, *, unattended: bool) -> Iterator[HttpPeer]:
    """Talk to the server at a URL. If ``unattended``, a failure is not retried. Raises UsageError."""
    # Imported late: HTTP takes long to load, and most nodes have no peers.
    from dutyfree.engine.images.registry import ATTEMPTS, RegistryClient, bases

    host = check(source)
    base = source.rstrip("/")
    repository = Reference(host, ARTIFACTS, "latest")
    if base.startswith("http:") and base not in bases(repository, {}, pull_options().insecure):
        raise UsageError(
            f"{source} is not encrypted: others on the network could read the token, and change layers",
            remedy="use https://, or add HOST:PORT to DUTYFREE_INSECURE_REGISTRIES if you trust the network",
        )
    login = find_login(host)
    with RegistryClient(
        base,
        repository,
        login,
        cancel,
        attempts=1 if unattended else ATTEMPTS,
        manifest_seconds=PACK_SECONDS,
        authorization=f"Bearer {login.secret}" if login else "",
    ) as registry:
        yield HttpPeer(registry, cancel)


class HttpPeer:
    """One conversation with a server. Its methods raise CreateError and Cancelled."""

    def __init__(self, registry: RegistryClient, cancel: CancelToken) -> None:
        self._registry = registry
        self._cancel = cancel

    def offer(self, wanted: Sequence[str]) -> list[LayerChain]:
        found: list[LayerChain] = []
        for at in range(0, len(wanted), NAMES_MAX):
            query = urlencode([("name", name) for name in wanted[at : at + NAMES_MAX]])
            data = self._registry.document(f"/v1/layers?{query}")
            try:
                found += msgspec.json.decode(data, type=Offer).chains
            except (msgspec.DecodeError, RecursionError) as error:
                raise CreateError(f"{self._registry.base} is not a `dutyfree serve`: {error}") from error
        return found

    def pack(self, keys: Sequence[str]) -> dict[str, tuple[Blob, ...]]:
        return {key: artifact_blobs(self._registry.manifest(artifact_tag(key))[0]) for key in keys}

    @contextlib.contextmanager
    def open_blob(self, digest: str, position: int) -> Iterator[Readable]:
        pieces = self._pieces(digest, position)
        with contextlib.closing(pieces):
            yield _PieceReader(pieces)

    def _pieces(self, digest: str, at: int) -> Generator[bytes, None, None]:
        """The rest of a blob. Continues after an interruption, as often as the client allows."""
        from dutyfree.engine.images.registry import TransientError

        attempt = 0
        while True:
            try:
                with self._registry.blob(digest, at) as (start, pieces):
                    if start != at:
                        raise CreateError(f"{self._registry.base} does not continue interrupted transfers")
                    for piece in pieces:
                        attempt = 0
                        at += len(piece)
                        yield piece
                return
            except TransientError as error:
                attempt += 1
                self._registry.pause(attempt, error, self._cancel)


class _PieceReader:
    """Pieces of any size as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""

    def read(self, size: int, /) -> bytes:
        data = self._rest or next(self._pieces, b"")
        self._rest = data[size:]
        return data[:size]
