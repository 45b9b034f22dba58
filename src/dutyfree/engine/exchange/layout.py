"""Chains in a directory or an archive: OCI layouts, which every tool that carries images carries too.

A chain with its image is a whole image to others: ``dutyfree image import`` takes it, and so do they. One
without (upon ``host``, say) is told as an artifact of its own kind, so that nobody takes it for one.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import secrets
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from dutyfree.contract.errors import CreateError
from dutyfree.engine.exchange import chains, packer
from dutyfree.engine.exchange.chains import FORM, RECIPE, Blob, LayerChain
from dutyfree.engine.exchange.protocol import BlobRequest, joined
from dutyfree.engine.images import manifest
from dutyfree.engine.images.archives import FileSlice, ImageFiles
from dutyfree.engine.images.manifest import DOCUMENT_MAX, digest_of
from dutyfree.engine.images.streams import Readable
from dutyfree.engine.store.cancel import CancelToken
from dutyfree.engine.store.locks import locked
from dutyfree.engine.store.records import ImageSettings
from dutyfree.engine.store.store import Store

ARTIFACT = "application/vnd.dutyfree.layers.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+zstd"
_NAME = "org.opencontainers.image.ref.name"
_OURS = "dutyfree"
_VERSION = b'{"imageLayoutVersion":"1.0.0"}'


# --- Reading -------------------------------------------------------------------------------------------


class LayoutPeer:
    """What lies in a layout. Every document is verified by its digest before it is believed."""

    def __init__(self, files: ImageFiles, what: str) -> None:
        self._files = files
        self._what = what
        self._chains = dict(self._read())
        self._blobs = {layer.key: layer.blobs for chain in self._chains.values() for layer in chain.layers}

    @property
    def digests(self) -> dict[str, str]:
        """Of each chain by its name: another content has another."""
        return {chain.name: digest for digest, chain in self._chains.items()}

    def offer(self, wanted: Sequence[str]) -> list[LayerChain]:
        """All of them, if nothing is said to be wanted; of a layer that others stand on, what leads to it."""
        whole = [chain for chain in self._chains.values() if not wanted or _names(chain) & set(wanted)]
        named = {chain.name: chain for chain in whole}
        for key in set(wanted) - named.keys():
            for chain in self._chains.values():
                if part := chains.upto(chain, key):
                    named[key] = part
        return list(named.values())

    def pack(self, keys: Sequence[str]) -> dict[str, tuple[Blob, ...]]:
        return {key: self._blobs[key] for key in keys if key in self._blobs}

    def send(self, blobs: Sequence[BlobRequest]) -> AbstractContextManager[Readable]:
        return joined(blobs, self._open)

    def _open(self, digest: str) -> FileSlice:
        if self._files.size(_blob(digest)) is None:
            raise CreateError(f"{self._what} is not whole: {digest} is missing in it")
        return self._files.open(_blob(digest))

    def _read(self) -> Iterator[tuple[str, LayerChain]]:
        listed = self._decoded("index.json")
        try:
            for entry in listed["manifests"]:
                found = self._decoded(_blob(entry["digest"]), entry["digest"])
                told = self._decoded(_blob(found["config"]["digest"]), found["config"]["digest"])
                if _OURS in told:
                    yield str(entry["digest"]), msgspec.convert(told[_OURS], LayerChain, strict=True)
        except (KeyError, TypeError, AttributeError, msgspec.ValidationError) as error:
            raise CreateError(f"{self._what} is no layout of layers: {error!r}") from error

    def _decoded(self, name: str, digest: str = "") -> dict[str, Any]:
        size = self._files.size(name)
        if size is None or size > DOCUMENT_MAX:
            raise CreateError(f"{self._what} holds no layers: {name} is missing in it, or too large")
        with contextlib.closing(self._files.open(name)) as file:
            data = file.read(size)
        if digest:
            manifest.check(data, digest, f"{self._what}: {name}")
        try:
            return msgspec.json.decode(data, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise CreateError(f"{self._what}: {name} is no JSON: {error}") from error


def _names(chain: LayerChain) -> set[str]:
    told = chain.upper[-1].made if chain.upper else None
    return {chain.name, *([RECIPE + told.recipe] if told and told.recipe else [])}


# --- Writing -------------------------------------------------------------------------------------------


class LayoutDocument(NamedTuple):
    data: bytes
    kind: str

    @property
    def descriptor(self) -> dict[str, Any]:
        return {"mediaType": self.kind, "digest": digest_of(self.data), "size": len(self.data)}


class LayoutContents(NamedTuple):
    """Of a layout."""

    manifests: list[dict[str, Any]]
    documents: list[LayoutDocument]
    blobs: dict[str, Path]
    """By their digests."""

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.blobs.values())


def contents(
    store: Store, several: Sequence[LayerChain], cancel: CancelToken, *, image: bool = True
) -> LayoutContents:
    """All that a layout of these chains holds, packed. Raises CreateError, Cancelled, OSError."""
    made = LayoutContents([], [], {})
    for chain in several:
        wanted = chain.layers if image else chain.upper
        blobs = {layer.key: packer.packed(store, layer.key, cancel) for layer in wanted}
        told = msgspec.structs.replace(
            chain, layers=tuple(msgspec.structs.replace(layer, blobs=blobs[layer.key]) for layer in wanted)
        )
        config, found = _documents(told)
        made.documents.extend((found, config))
        made.manifests.append({**found.descriptor, "annotations": {_NAME: chain.name}})
        for key, packed in blobs.items():
            made.blobs.update({blob.digest: packer.blob_path(store, key, blob.digest) for blob in packed})
    return made


def _documents(chain: LayerChain) -> tuple[LayoutDocument, LayoutDocument]:
    blobs = [blob for layer in chain.layers for blob in layer.blobs]
    whole = bool(chain.lower)
    here = manifest.here()
    config = {
        "architecture": here.architecture,
        "os": here.os,
        "config": _settings(chain),
        "rootfs": {"type": "layers", "diff_ids": [blob.diff_id for blob in blobs]},
        _OURS: chain,
    }
    about = LayoutDocument(msgspec.json.encode(config), manifest.CONFIGS[0] if whole else ARTIFACT)
    found = {
        "schemaVersion": 2,
        "mediaType": manifest.MANIFESTS[0],
        **({} if whole else {"artifactType": ARTIFACT}),
        "config": about.descriptor,
        "layers": [{"mediaType": LAYER, "digest": blob.digest, "size": blob.size} for blob in blobs],
    }
    return about, LayoutDocument(msgspec.json.encode(found), manifest.MANIFESTS[0])


def _settings(chain: LayerChain) -> dict[str, Any]:
    told = chain.upper[-1].made
    found = (
        told.settings if told and told.settings else chain.known.settings if chain.known else ImageSettings()
    )
    named = {
        "Env": [f"{name}={value}" for name, value in found.env.items()],
        "User": found.user,
        "WorkingDir": found.workdir,
        "Entrypoint": found.entrypoint,
        "Cmd": found.cmd,
    }
    return {name: value for name, value in named.items() if value}


def write_archive(made: LayoutContents, target: BinaryIO) -> None:
    """One tar, the same bytes for the same contents. Raises OSError."""
    with tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        documents = {"oci-layout": _VERSION, "index.json": _index(made.manifests)}
        documents |= {_blob(digest_of(one.data)): one.data for one in made.documents}
        for name, data in documents.items():
            tar.addfile(_member(name, len(data)), io.BytesIO(data))
        for digest, path in made.blobs.items():
            with open(path, "rb") as file:
                tar.addfile(_member(_blob(digest), os.fstat(file.fileno()).st_size), file)


def write_directory(made: LayoutContents, target: Path) -> int:
    """Add to a layout what is missing in it; bytes that were. Whoever reads it meanwhile sees it whole.

    Raises OSError, CreateError.
    """
    (target / "blobs/sha256").mkdir(parents=True, exist_ok=True)
    added = 0
    with locked(target / ".lock", fcntl.LOCK_EX):
        for digest, path in made.blobs.items():
            there = target / _blob(digest)
            if not there.exists() or there.stat().st_size != path.stat().st_size:
                with open(path, "rb") as source, renamed(there) as file:
                    shutil.copyfileobj(source, file, 1 << 20)
                added += path.stat().st_size
        for document in made.documents:
            with renamed(target / _blob(digest_of(document.data))) as file:
                file.write(document.data)
        with renamed(target / "oci-layout") as file:
            file.write(_VERSION)
        with renamed(target / "index.json") as file:
            file.write(_index(_merged(target, made.manifests)))
    return added


def _merged(target: Path, manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With those that are there already, unless others have their names now."""
    path = target / "index.json"
    if not path.exists():
        return manifests
    try:
        former = msgspec.json.decode(path.read_bytes())["manifests"]
        names = {entry["annotations"][_NAME] for entry in manifests}
        return [*[one for one in former if one.get("annotations", {}).get(_NAME) not in names], *manifests]
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise CreateError(f"{path} is no index that could be added to: {error!r}") from error


@contextlib.contextmanager
def renamed(path: Path) -> Iterator[BinaryIO]:
    """A file that has its name once it is whole. Until then it has none, and goes with whoever is killed."""
    scratch = path.with_name(f".part-{secrets.token_hex(8)}")
    try:
        descriptor = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError:  # there are file systems that have no files without a name
        descriptor = os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fchmod(descriptor, 0o644)
            if not os.fstat(descriptor).st_nlink:
                # A link to a file that is open is followed only for who names a directory too.
                os.link(f"/proc/self/fd/{descriptor}", scratch, src_dir_fd=descriptor)
        scratch.rename(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def _index(manifests: list[dict[str, Any]]) -> bytes:
    return msgspec.json.encode(
        {
            "schemaVersion": 2,
            "mediaType": manifest.INDEXES[0],
            "manifests": manifests,
            "annotations": {"dutyfree": str(FORM)},
        }
    )


def _blob(digest: str) -> str:
    """Where it lies. Raises CreateError for what is no digest: it may be meant as a path."""
    if not manifest.DIGEST.fullmatch(digest):
        raise CreateError(f"{digest[:100]!r} is no digest", remedy="the layout is broken or hostile")
    return f"blobs/{digest.replace(':', '/')}"


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member
