"""Images that lie on this machine: OCI layouts, what ``docker save`` writes, and tars of either."""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import tarfile
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from dutyfree.contract.errors import CreateError
from dutyfree.engine.images import manifest, streams, tar_reader
from dutyfree.engine.images.manifest import BlobDescriptor, Configuration
from dutyfree.engine.store.cancel import CancelToken

_IMAGE_MEMBER = re.compile(
    r"blobs(/.*)?|index\.json|oci-layout|manifest\.json|repositories|[0-9a-f]{64}(/.*|\.json|\.tar)?"
)
_REF_NAME = "org.opencontainers.image.ref.name"


class ImageFiles(Protocol):
    """Named pieces of an image."""

    def size(self, name: str) -> int | None:
        """Of the piece; None if there is none."""

    def open(self, name: str) -> FileSlice: ...


class LayoutDirectory:
    def __init__(self, root: Path) -> None:
        self._root = root

    def size(self, name: str) -> int | None:
        try:
            return (self._root / name).stat().st_size
        except OSError:
            return None

    def open(self, name: str) -> FileSlice:
        return FileSlice(self._root / name, 0, (self._root / name).stat().st_size)


class NotATar(CreateError):  # noqa: N818 (names the state)
    pass


class ImageTar:
    """A tar that is not compressed, read at any place of it. Raises NotATar."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._members: dict[str, tuple[int, int]] = {}
        links: dict[str, str] = {}
        try:
            with tarfile.open(path, "r:") as tar:
                for member in tar:
                    name = posixpath.normpath(member.name)
                    if member.isreg():
                        self._members[name] = (member.offset_data, member.size)
                    elif member.issym():  # older Dockers, for a layer that occurs twice
                        links[name] = posixpath.normpath(
                            posixpath.join(posixpath.dirname(name), member.linkname)
                        )
                    elif member.islnk():
                        links[name] = posixpath.normpath(member.linkname)
        except (tarfile.TarError, OSError, ValueError) as error:
            raise NotATar(f"{path} is no tar of an image: {error}") from error
        self._members |= {name: self._members[to] for name, to in links.items() if to in self._members}

    def size(self, name: str) -> int | None:
        found = self._members.get(posixpath.normpath(name))
        return found[1] if found else None

    def open(self, name: str) -> FileSlice:
        return FileSlice(self._path, *self._members[posixpath.normpath(name)])


class FileSlice:
    """A part of a file."""

    def __init__(self, path: Path, offset: int, size: int) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (it is what close closes)
        self._at, self._end = offset, offset + size

    @property
    def left(self) -> int:
        """Bytes that are still to be read."""
        return max(0, self._end - self._at)

    def skip(self, size: int) -> None:
        self._at += size

    def read(self, size: int, /) -> bytes:
        data = os.pread(self._file.fileno(), max(0, min(size, self._end - self._at)), self._at)
        self._at += len(data)
        return data

    def close(self) -> None:
        self._file.close()


class ArchiveLayer(NamedTuple):
    name: str
    """Of the piece that holds it."""
    size: int
    digest: str
    """Of it as it lies there, or "" where only the unpacked one is known."""


class ArchivedImage(NamedTuple):
    digest: str
    configuration: Configuration
    layers: tuple[ArchiveLayer, ...]


def holds_image(path: Path) -> bool:
    """Whether a tar, compressed or not, holds an image rather than a root file system. Raises CreateError."""
    try:
        with open(path, "rb") as file, contextlib.closing(streams.decompressed(file)) as pieces:
            stream = tar_reader.ForwardReader(pieces, 1 << 62, CancelToken())
            with tarfile.open(fileobj=stream, mode="r:") as tar:  # type: ignore[call-overload]
                first = tar.next()
                while first is not None and posixpath.normpath(first.name) == ".":
                    tar.members.clear()
                    first = tar.next()
    except (tarfile.TarError, streams.InvalidLayer, OSError, ValueError) as error:
        raise CreateError(
            f"{path} is no tar: {error}", remedy="name a tar of a root file system, or of `docker save`"
        ) from error
    return first is not None and _IMAGE_MEMBER.fullmatch(posixpath.normpath(first.name)) is not None


def is_compressed(path: Path) -> bool:
    try:
        with tarfile.open(path, "r:"):
            return False
    except tarfile.TarError:
        return True


def expand(path: Path, target: Path, cancel: CancelToken) -> None:
    """Decompress a tar. Raises OSError, InvalidLayer, Cancelled."""
    with open(path, "rb") as source, open(target, "wb") as file:
        for piece in streams.decompressed(source):
            cancel.check()
            file.write(piece)


def find(files: ImageFiles, what: str, tag: str = "") -> ArchivedImage:
    """The one image in there, or the one of that tag. Raises CreateError."""
    if files.size("manifest.json") is not None:
        return _docker(files, what, tag)
    if files.size("index.json") is not None:
        return _oci(files, what, tag)
    raise CreateError(f"{what} holds no image: neither index.json nor manifest.json is in it")


def _docker(files: ImageFiles, what: str, tag: str) -> ArchivedImage:
    try:
        listed = msgspec.json.decode(_document(files, "manifest.json"))
        fitting = [e for e in listed if not tag or any(tag in t for t in e.get("RepoTags") or ())]
        if len(fitting) != 1:
            tags = sorted(t for e in listed for t in e.get("RepoTags") or ())
            raise CreateError(
                f"{what} holds {len(fitting)} images that could be meant, of {', '.join(tags) or 'no name'}",
                remedy="save one image alone",
            )
        config = _document(files, str(fitting[0]["Config"]))
        names = [str(name) for name in fitting[0]["Layers"]]
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise CreateError(f"{what} is not as `docker save` writes it: {error!r}") from error
    layers = tuple(ArchiveLayer(name, _size(files, name, what), "") for name in names)
    return ArchivedImage(manifest.digest_of(config), manifest.configuration(config, len(layers)), layers)


def _oci(files: ImageFiles, what: str, tag: str) -> ArchivedImage:
    read = manifest.read(_document(files, "index.json"), manifest.INDEXES[0])
    assert isinstance(read, tuple)
    named = [e for e in read if not tag or (e.annotations or {}).get(_REF_NAME, "").endswith(tag)]
    if not named:
        raise CreateError(f"{what} holds no image with the tag {tag}")
    if len(named) > 1 and all(entry.platform is None for entry in named):
        raise CreateError(f"{what} holds {len(named)} images", remedy="say which: oci:PATH:TAG")
    found: manifest.Manifest | tuple[BlobDescriptor, ...] = tuple(named)
    for _ in range(4):
        if isinstance(found, manifest.Manifest):
            break
        entry = manifest.choose(found)
        found = manifest.read(_verified(files, entry), entry.media_type)
    if not isinstance(found, manifest.Manifest):
        raise CreateError(f"{what} holds indexes of indexes, and no image")
    config = _verified(files, found.config)
    layers = []
    for wanted in found.layers:
        if _size(files, _blob(wanted.digest), what) != wanted.size:
            raise CreateError(f"{what}: the layer {wanted.digest} has not the size that the manifest tells")
        layers.append(ArchiveLayer(_blob(wanted.digest), wanted.size, wanted.digest))
    return ArchivedImage(found.digest, manifest.configuration(config, len(layers)), tuple(layers))


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _verified(files: ImageFiles, wanted: BlobDescriptor) -> bytes:
    data = _document(files, _blob(wanted.digest))
    manifest.check(data, wanted.digest, _blob(wanted.digest))
    return data


def _size(files: ImageFiles, name: str, what: str) -> int:
    size = files.size(name)
    if size is None:
        raise CreateError(f"{what} is not whole: {name} is missing in it")
    return size


def _document(files: ImageFiles, name: str) -> bytes:
    size = files.size(name)
    if size is None or size > manifest.DOCUMENT_MAX:
        raise CreateError(f"{name} is missing, or larger than such a document can be")
    with contextlib.closing(files.open(name)) as source:
        return source.read(size)
