"""Open a peer by its address: a file, a directory, or the URL of a server."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from dutyfree.contract.errors import CreateError, UsageError
from dutyfree.engine.exchange import http_peer
from dutyfree.engine.exchange.layout import LayoutPeer
from dutyfree.engine.exchange.protocol import Peer, StorePeer
from dutyfree.engine.images import archives
from dutyfree.engine.images.streams import InvalidLayer
from dutyfree.engine.store.cancel import CancelToken
from dutyfree.engine.store.store import Store

STDIN = "-"
REMEDY = "name an archive, a directory, or the URL of a server: https://HOST:PORT (docs/layers.md)"

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:")


def check(source: str) -> None:
    """Check the form of a peer's address, not whether the peer exists. Raises UsageError."""
    if source.startswith(http_peer.SCHEMES):
        http_peer.check(source)
    elif _SCHEME.match(source) or source in ("", STDIN):
        raise UsageError(f"{source!r} is not a peer", remedy=REMEDY)


@contextlib.contextmanager
def open_peer(source: str, store: Store, cancel: CancelToken, *, unattended: bool = False) -> Iterator[Peer]:
    """Open a peer: an archive (``-`` is standard input), a layout, a cache, or the URL of a server.

    If ``unattended``, a request that fails is not repeated. Raises UsageError, CreateError.
    """
    if source.startswith(http_peer.SCHEMES):
        with http_peer.connect(source, cancel, unattended=unattended) as peer:
            yield peer
    elif source == STDIN:
        with store.scratch() as scratch:
            with open(scratch / "archive", "wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
            yield _open_archive(scratch / "archive", scratch, "standard input", cancel)
    elif Path(source).is_dir():
        yield _open_directory(Path(source).absolute(), cancel)
    elif Path(source).is_file():
        with store.scratch() as scratch:
            yield _open_archive(Path(source), scratch, source, cancel)
    else:
        raise UsageError(f"there is no {source}", remedy=REMEDY)


def _open_directory(path: Path, cancel: CancelToken) -> Peer:
    if (path / "index.json").is_file():
        return LayoutPeer(archives.LayoutDirectory(path), str(path))
    for root in (path, path / "layers", path / "dutyfree/layers"):
        if (root / "kept").is_dir():
            return StorePeer(Store(root), cancel)
    raise UsageError(
        f"{path} contains no layers",
        remedy="name a directory of `dutyfree layer export`, or a cache of dutyfree",
    )


def _open_archive(path: Path, scratch: Path, what: str, cancel: CancelToken) -> Peer:
    if archives.is_compressed(path):  # the archive itself, beyond its layers
        try:
            archives.expand(path, scratch / "expanded", cancel)
        except (InvalidLayer, OSError) as error:
            raise CreateError(f"{what} is not an archive: {error}") from error
        path = scratch / "expanded"
    try:
        return LayoutPeer(archives.ImageTar(path), what)
    except archives.NotATar as error:
        raise CreateError(f"{what} is not an archive of layers: {error.__cause__}", remedy=REMEDY) from error
