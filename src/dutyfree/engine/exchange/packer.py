"""Layers of the store as blobs: packed once, and kept beside the layer for whoever wants it next."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path

import msgspec

from dutyfree.contract.errors import CreateError
from dutyfree.engine.exchange.chains import Blob
from dutyfree.engine.images.pack import pack
from dutyfree.engine.images.streams import InvalidLayer, hash_pieces, read_ahead, zstd
from dutyfree.engine.store import provenance
from dutyfree.engine.store.cancel import CancelToken
from dutyfree.engine.store.layer_lease import LayerLease, boot_id
from dutyfree.engine.store.store import Store

LEVEL = 3
"""Of the compression: more takes longer than a network of this century."""

RESERVE = 256 << 20
"""Bytes of the disk that packing leaves to others: it is done for strangers."""

_PACKED = "packed"
_LIST = "blobs"


def parts(tree: Path) -> list[Path]:
    """The directories of a layer, one for each file system."""
    if (tree / "0").is_dir() and provenance.read(tree) is not None:
        return [tree / str(index) for index in range(sum(path.is_dir() for path in tree.iterdir()))]
    return [tree]


def packed(store: Store, key: str, cancel: CancelToken) -> tuple[Blob, ...]:
    """The layer's blobs, packed if need be. Raises CreateError, Cancelled, and OSError of the disk."""
    lease = store.lease(key)
    if lease is None:
        raise CreateError(f"the layer {key} is gone", remedy="see `dutyfree layer ls`")
    with lease:
        known = _known(lease)
        if known is None:
            with store.build_lock(f"{_PACKED} {key}", cancel):
                known = _known(lease) or _pack(store, lease, cancel)
        return known


def blob_path(store: Store, key: str, digest: str) -> Path:
    """Where a packed blob lies."""
    return store.path(key) / _PACKED / digest.removeprefix("sha256:")


class _Packed(msgspec.Struct, frozen=True):
    boot: str
    """Of the kernel under which it was packed: after a crash nobody knows what of it reached the disk."""
    blobs: tuple[Blob, ...]


def _known(lease: LayerLease) -> tuple[Blob, ...] | None:
    directory = lease.path / _PACKED
    with contextlib.suppress(OSError, msgspec.DecodeError):
        found = msgspec.json.decode((directory / _LIST).read_bytes(), type=_Packed)
        os.utime(directory)
        sizes = [(directory / blob.digest.removeprefix("sha256:")).stat().st_size for blob in found.blobs]
        is_whole = found.boot == boot_id() and sizes == [blob.size for blob in found.blobs]
        return found.blobs if is_whole else None
    return None


def _pack(store: Store, lease: LayerLease, cancel: CancelToken) -> tuple[Blob, ...]:
    free = shutil.disk_usage(store.root).free
    if lease.info.size + RESERVE > free:
        raise CreateError(
            f"there is no room to pack {lease.key}: {free} bytes are free",
            remedy="dutyfree gc, or a larger disk",
        )
    with store.scratch() as scratch:
        target = scratch / _PACKED
        target.mkdir()
        try:
            blobs = tuple(_blob(part, target, cancel) for part in parts(lease.tree))
        except InvalidLayer as error:
            raise CreateError(f"the layer {lease.key} cannot travel: {error}") from error
        (target / _LIST).write_bytes(msgspec.json.encode(_Packed(boot_id(), blobs)))
        shutil.rmtree(lease.path / _PACKED, ignore_errors=True)  # one that a crash of the machine tore
        target.rename(lease.path / _PACKED)
    return blobs


def _blob(part: Path, target: Path, cancel: CancelToken) -> Blob:
    compressor = zstd().ZstdCompressor(level=LEVEL)
    plain, compressed = hashlib.sha256(), hashlib.sha256()
    whole = 0
    root = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    scratch = target / "blob"
    try:
        with open(scratch, "wb") as file, read_ahead(hash_pieces(pack(root), plain), cancel) as pieces:
            for piece in pieces:
                cancel.check()
                whole += len(piece)
                data = compressor.compress(piece)
                compressed.update(data)
                file.write(data)
            data = compressor.flush()
            compressed.update(data)
            file.write(data)
            size = file.tell()
    finally:
        os.close(root)
    scratch.rename(target / compressed.hexdigest())
    return Blob(f"sha256:{compressed.hexdigest()}", size, f"sha256:{plain.hexdigest()}", whole)
