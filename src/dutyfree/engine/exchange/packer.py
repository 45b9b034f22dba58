"""Pack layers of the store into blobs. They stay beside the layer for the next request."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec

from dutyfree.contract.errors import CreateError
from dutyfree.engine.exchange.chains import Blob
from dutyfree.engine.host.proc import boot_id
from dutyfree.engine.images.pack import pack
from dutyfree.engine.images.streams import InvalidLayer, hash_pieces, read_ahead, zstd
from dutyfree.engine.store import provenance
from dutyfree.engine.store.cancel import CancelToken
from dutyfree.engine.store.layer_lease import LayerLease
from dutyfree.engine.store.overlay import open_tree
from dutyfree.engine.store.store import Store

COMPRESSION_LEVEL = 3
"""Higher levels take longer than they save on a fast network."""

DISK_RESERVE = 256 << 20
"""Bytes of the disk that packing leaves free: it is done for other machines."""

_PACKED = "packed"
_LIST = "blobs"


def pack_layer(
    store: Store, key: str, cancel: CancelToken, limit: AbstractContextManager[Any] | None = None
) -> tuple[Blob, ...]:
    """The blobs of a layer. Packs it if that was not done recently; holds ``limit`` meanwhile.

    Raises CreateError, Cancelled, and OSError of the disk.
    """
    lease = store.lease(key)
    if lease is None:
        raise CreateError(f"the layer {key} was removed", remedy="list the layers: `dutyfree layer ls`")
    with lease:
        blobs = _read_packed(lease)
        if blobs is None:
            with limit or contextlib.nullcontext(), store.build_lock(f"{_PACKED} {key}", cancel):
                blobs = _read_packed(lease) or _pack(store, lease, cancel)
        return blobs


def blob_path(store: Store, key: str, digest: str) -> Path:
    """The file of a packed blob."""
    return store.path(key) / _PACKED / digest.removeprefix("sha256:")


class _Packed(msgspec.Struct, frozen=True):
    boot: str
    """Boot id at the time of packing. After a reboot the files may be incomplete."""
    blobs: tuple[Blob, ...]


def _read_packed(lease: LayerLease) -> tuple[Blob, ...] | None:
    directory = lease.path / _PACKED
    with contextlib.suppress(OSError, msgspec.DecodeError):
        found = msgspec.json.decode((directory / _LIST).read_bytes(), type=_Packed)
        os.utime(directory)
        sizes = [(directory / blob.digest.removeprefix("sha256:")).stat().st_size for blob in found.blobs]
        is_complete = found.boot == boot_id() and sizes == [blob.size for blob in found.blobs]
        return found.blobs if is_complete else None
    return None


def _pack(store: Store, lease: LayerLease, cancel: CancelToken) -> tuple[Blob, ...]:
    free = shutil.disk_usage(store.root).free
    if lease.info.size + DISK_RESERVE > free:
        raise CreateError(
            f"the disk has no space to pack {lease.key}: {free} bytes are free",
            remedy="run `dutyfree gc`, or use a larger disk",
        )
    with store.scratch() as scratch:
        target = scratch / _PACKED
        target.mkdir()
        try:
            blobs = tuple(_pack_tree(tree, target, cancel) for tree in _trees(lease.tree))
        except InvalidLayer as error:
            raise CreateError(f"the layer {lease.key} cannot be packed: {error}") from error
        (target / _LIST).write_bytes(msgspec.json.encode(_Packed(boot_id(), blobs)))
        shutil.rmtree(lease.path / _PACKED, ignore_errors=True)  # incomplete after a crash of the machine
        target.rename(lease.path / _PACKED)
    return blobs


def _trees(tree: Path) -> list[Path]:
    """The directories of a layer, one for each file system."""
    if (tree / "0").is_dir() and provenance.read(tree) is not None:
        return [tree / str(index) for index in range(sum(path.is_dir() for path in tree.iterdir()))]
    return [tree]


def _pack_tree(tree: Path, target: Path, cancel: CancelToken) -> Blob:
    compressor = zstd().ZstdCompressor(level=COMPRESSION_LEVEL)
    plain, compressed = hashlib.sha256(), hashlib.sha256()
    tar_size = 0
    scratch = target / "blob"
    with (
        open_tree(tree) as root,
        open(scratch, "wb") as file,
        read_ahead(hash_pieces(pack(root), plain), cancel) as pieces,
    ):
        for piece in pieces:
            cancel.check()
            tar_size += len(piece)
            data = compressor.compress(piece)
            compressed.update(data)
            file.write(data)
        data = compressor.flush()
        compressed.update(data)
        file.write(data)
        size = file.tell()
    scratch.rename(target / compressed.hexdigest())
    return Blob(f"sha256:{compressed.hexdigest()}", size, f"sha256:{plain.hexdigest()}", tar_size)
