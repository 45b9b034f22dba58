"""Read and write chains of layers as OCI layouts, in a directory or an archive.

A chain with its image is a complete image, which ``dutyfree image import`` and other tools can read. A chain
without its image, such as one on ``host``, is an OCI artifact of its own type.
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
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from dutyfree.contract.errors import CreateError
from dutyfree.engine.exchange import chains, packer
from dutyfree.engine.exchange.chains import FORMAT_VERSION, RECIPE, Blob, LayerChain
from dutyfree.engine.images import manifest
from dutyfree.engine.images.archives import REF_NAME, ImageFiles, blob_name
from dutyfree.engine.images.manifest import DOCUMENT_MAX, digest_of
from dutyfree.engine.images.streams import Readable
from dutyfree.engine.store.cancel import CancelToken
from dutyfree.engine.store.locks import locked
from dutyfree.engine.store.records import ImageSettings
from dutyfree.engine.store.store import Store

ARTIFACT = "application/vnd.dutyfree.layers.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+zstd"
_OURS = "dutyfree"
_VERSION = b'{"imageLayoutVersion":"1.0.0"}'


# --- Reading -------------------------------------------------------------------------------------------


class LayoutPeer:
    """The chains in a layout. Verifies every document by its digest."""

    def __init__(self, files: ImageFiles, what: str) -> None:
        self._files = files
        self._what = what
        self._chains = dict(self._read())
        self._blobs = {layer.key: layer.blobs for chain in self._chains.values() for layer in chain.layers}

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the manifests, by the names of their chains."""
        return {chain.name: digest for digest, chain in self._chains.items()}

    def offer(self, wanted: Sequence[str]) -> list[LayerChain]:
        """The wanted chains, and parts of chains up to a wanted layer. All chains if nothing is wanted."""
        whole = [chain for chain in self._chains.values() if not wanted or _names(chain) & set(wanted)]
        named = {chain.name: chain for chain in whole}
        for key in set(wanted) - named.keys():
            for chain in self._chains.values():
                if part := chains.shorten(chain, key):
                    named[key] = part
        return list(named.values())

    def pack(self, keys: Sequence[str]) -> dict[str, tuple[Blob, ...]]:
        return {key: self._blobs[key] for key in keys if key in self._blobs}

    @contextlib.contextmanager
    def open_blob(self, digest: str, position: int) -> Iterator[Readable]:
        if self._files.size(blob_name(digest)) is None:
            raise CreateError(f"{self._what} is incomplete: {digest} is missing")
        with contextlib.closing(self._files.open(blob_name(digest))) as blob:
            blob.skip(position)
            yield blob

    def _read(self) -> Iterator[tuple[str, LayerChain]]:
        listed = self._decode("index.json")
        try:
            for entry in listed["manifests"]:
                found = self._decode(blob_name(entry["digest"]), entry["digest"])
                config = self._decode(blob_name(found["config"]["digest"]), found["config"]["digest"])
                if _OURS in config:
                    yield str(entry["digest"]), msgspec.convert(config[_OURS], LayerChain, strict=True)
        except (KeyError, TypeError, AttributeError, msgspec.ValidationError) as error:
            raise CreateError(f"{self._what} is not a layout of layers: {error!r}") from error

    def _decode(self, name: str, digest: str = "") -> dict[str, Any]:
        size = self._files.size(name)
        if size is None or size > DOCUMENT_MAX:
            raise CreateError(f"{self._what} contains no layers: {name} is missing or too large")
        with contextlib.closing(self._files.open(name)) as file:
            data = file.read(size)
        if digest:
            manifest.check(data, digest, f"{self._what}: {name}")
        try:
            return msgspec.json.decode(data, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise CreateError(f"{self._what}: {name} is not JSON: {error}") from error


def _names(chain: LayerChain) -> set[str]:
    top = chain.upper[-1].provenance if chain.upper else None
    return {chain.name, *([RECIPE + top.recipe] if top and top.recipe else [])}


# --- Writing -------------------------------------------------------------------------------------------


class LayoutDocument(NamedTuple):
    data: bytes
    kind: str

    @property
    def descriptor(self) -> dict[str, Any]:
        return {"mediaType": self.kind, "digest": digest_of(self.data), "size": len(self.data)}


class LayoutContents(NamedTuple):
    """What is written into a layout."""

    manifests: list[dict[str, Any]]
    documents: list[LayoutDocument]
    blobs: dict[str, Path]
    """Files of the blobs, by digest."""

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.blobs.values())


def pack_chains(
    store: Store, several: Sequence[LayerChain], cancel: CancelToken, *, image: bool = True
) -> LayoutContents:
    """Pack chains for a layout. Raises CreateError, Cancelled, OSError."""
    result = LayoutContents([], [], {})
    for chain in several:
        wanted = chain.layers if image else chain.upper
        blobs = {layer.key: packer.pack_layer(store, layer.key, cancel) for layer in wanted}
        described = msgspec.structs.replace(
            chain, layers=tuple(msgspec.structs.replace(layer, blobs=blobs[layer.key]) for layer in wanted)
        )
        config, found = chain_documents(described)
        result.documents.extend((found, config))
        result.manifests.append({**found.descriptor, "annotations": {REF_NAME: chain.name}})
        for key, packed in blobs.items():
            result.blobs.update({blob.digest: packer.blob_path(store, key, blob.digest) for blob in packed})
    return result


def chain_documents(chain: LayerChain) -> tuple[LayoutDocument, LayoutDocument]:
    """The configuration and the manifest of a chain, or of an image alone."""
    blobs = [blob for layer in chain.layers for blob in layer.blobs]
    is_image = bool(chain.lower)
    here = manifest.this_platform()
    config = {
        "architecture": here.architecture,
        "os": here.os,
        "config": _settings(chain),
        "rootfs": {"type": "layers", "diff_ids": [blob.diff_id for blob in blobs]},
        **({_OURS: chain} if chain.upper else {}),
    }
    about = LayoutDocument(msgspec.json.encode(config), manifest.CONFIGS[0] if is_image else ARTIFACT)
    found = {
        "schemaVersion": 2,
        "mediaType": manifest.MANIFESTS[0],
        **({} if is_image else {"artifactType": ARTIFACT}),
        "config": about.descriptor,
        "layers": [{"mediaType": LAYER, "digest": blob.digest, "size": blob.size} for blob in blobs],
    }
    return about, LayoutDocument(msgspec.json.encode(found), manifest.MANIFESTS[0])


def _settings(chain: LayerChain) -> dict[str, Any]:
    top = chain.upper[-1].provenance if chain.upper else None
    found = ImageSettings()
    if top and top.settings:
        found = top.settings
    elif chain.stored_image:
        found = chain.stored_image.settings
    named = {
        "Env": [f"{name}={value}" for name, value in found.env.items()],
        "User": found.user,
        "WorkingDir": found.workdir,
        "Entrypoint": found.entrypoint,
        "Cmd": found.cmd,
    }
    return {name: value for name, value in named.items() if value}


def write_archive(contents: LayoutContents, target: BinaryIO) -> None:
    """Write a layout as one tar. The same contents give the same bytes. Raises OSError."""
    with tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        documents = {"oci-layout": _VERSION, "index.json": index(contents.manifests)}
        documents |= {blob_name(digest_of(one.data)): one.data for one in contents.documents}
        for name, data in documents.items():
            tar.addfile(_member(name, len(data)), io.BytesIO(data))
        for digest, path in contents.blobs.items():
            with open(path, "rb") as file:
                tar.addfile(_member(blob_name(digest), os.fstat(file.fileno()).st_size), file)


def write_directory(contents: LayoutContents, target: Path) -> int:
    """Add what is missing to a layout in a directory. Returns the bytes that were written.

    Other machines may read the layout meanwhile. Raises OSError, CreateError.
    """
    (target / "blobs/sha256").mkdir(parents=True, exist_ok=True)
    added = 0
    with locked(target / ".lock", fcntl.LOCK_EX):
        for digest, path in contents.blobs.items():
            there = target / blob_name(digest)
            if not there.exists() or there.stat().st_size != path.stat().st_size:
                with open(path, "rb") as source, replace_file(there) as file:
                    shutil.copyfileobj(source, file, 1 << 20)
                added += path.stat().st_size
        for document in contents.documents:
            with replace_file(target / blob_name(digest_of(document.data))) as file:
                file.write(document.data)
        with replace_file(target / "oci-layout") as file:
            file.write(_VERSION)
        with replace_file(target / "index.json") as file:
            file.write(index(_merge_manifests(target, contents.manifests)))
    return added


def _merge_manifests(target: Path, manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The existing manifests and the new ones. A new one replaces one of the same name."""
    path = target / "index.json"
    if not path.exists():
        return manifests
    try:
        existing = msgspec.json.decode(path.read_bytes())["manifests"]
        names = {entry["annotations"][REF_NAME] for entry in manifests}
        return [
            *[one for one in existing if one.get("annotations", {}).get(REF_NAME) not in names],
            *manifests,
        ]
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise CreateError(f"{path} is not an index that can be extended: {error!r}") from error


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file that gets its name when it is complete. If the process is killed, nothing is left."""
    scratch = path.with_name(f".part-{secrets.token_hex(8)}")
    try:
        descriptor = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError:  # not all file systems support O_TMPFILE
        descriptor = os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fchmod(descriptor, 0o644)
            if not os.fstat(descriptor).st_nlink:
                # With src_dir_fd, os.link follows the symbolic link in /proc.
                os.link(f"/proc/self/fd/{descriptor}", scratch, src_dir_fd=descriptor)
        scratch.rename(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def index(manifests: list[dict[str, Any]]) -> bytes:
    """The contents of ``index.json``."""
    return msgspec.json.encode(
        {
            "schemaVersion": 2,
            "mediaType": manifest.INDEXES[0],
            "manifests": manifests,
            "annotations": {"dutyfree": str(FORMAT_VERSION)},
        }
    )


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member
