"""Read images from local files: OCI layouts, archives of ``docker save``, and tars of either."""

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
from dutyfree.engine.images.reference import DIGEST
from dutyfree.engine.store.cancel import CancelToken

_IMAGE_MEMBER = re.compile(
    r"blobs(/.*)?|index\.json|oci-layout|manifest\.json|repositories|[0-9a-f]{64}(/.*|\.json|\.tar)?"
)
REF_NAME = "org.opencontainers.image.ref.name"


class ImageFiles(Protocol):
    """The files of an image's layout, by name."""

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if it is missing."""

    def open(self, name: str) -> FileSlice: ...


class LayoutDirectory:
    """A layout in a directory."""

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
    """The file is not an uncompressed tar."""


class ImageTar:
    """A layout in an uncompressed tar, with random access. Raises NotATar."""

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
                    elif member.issym():  # old Docker versions link a layer that occurs twice
                        links[name] = posixpath.normpath(
                            posixpath.join(posixpath.dirname(name), member.linkname)
                        )
                    elif member.islnk():
                        links[name] = posixpath.normpath(member.linkname)
        except (tarfile.TarError, OSError, ValueError) as error:
            raise NotATar(f"{path} is not a tar: {error}") from error
        self._members |= {name: self._members[to] for name, to in links.items() if to in self._members}

    def size(self, name: str) -> int | None:
        found = self._members.get(posixpath.normpath(name))
        return found[1] if found else None

    def open(self, name: str) -> FileSlice:
        return FileSlice(self._path, *self._members[posixpath.normpath(name)])


class FileSlice:
    """A range of bytes in a file."""

    def __init__(self, path: Path, offset: int, size: int) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (it is what close closes)
        self._at, self._end = offset, offset + size

    @property
    def left(self) -> int:
        """Bytes that were not read yet."""
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
    """A layer in a layout."""

    name: str
    """Name of its file."""
    size: int
    digest: str
    """Digest of the file; empty if only the digest of the unpacked tar is known."""


class ArchivedImage(NamedTuple):
    """An image in a layout."""

    digest: str
    configuration: Configuration
    layers: tuple[ArchiveLayer, ...]


def holds_image(path: Path) -> bool:
    """Whether a tar, compressed or not, contains an image's layout, and not files. Raises CreateError."""
    try:
        with open(path, "rb") as file, contextlib.closing(streams.decompress(file)) as pieces:
            stream = tar_reader.ForwardReader(pieces, 1 << 62, CancelToken())
            with tarfile.open(fileobj=stream, mode="r:") as tar:  # type: ignore[call-overload]
                first = tar.next()
                while first is not None and posixpath.normpath(first.name) == ".":
                    tar.members.clear()
                    first = tar.next()
    except (tarfile.TarError, streams.InvalidLayer, OSError, ValueError) as error:
        raise CreateError(
            f"{path} is not a tar: {error}", remedy="use a tar of a root file system, or of `docker save`"
        ) from error
    return first is not None and _IMAGE_MEMBER.fullmatch(posixpath.normpath(first.name)) is not None


def is_compressed(path: Path) -> bool:
    try:
        with tarfile.open(path, "r:"):
            return False
    except tarfile.TarError:
        return True


def expand(path: Path, target: Path, cancel: CancelToken) -> None:
    """Decompress a tar into a file. Raises OSError, InvalidLayer, Cancelled."""
    with open(path, "rb") as source, open(target, "wb") as file:
        for piece in streams.decompress(source):
            cancel.check()
            file.write(piece)


def find(files: ImageFiles, what: str, tag: str = "") -> ArchivedImage:
    """Find the only image in a layout, or the one with the tag. ``what`` names the layout in errors.

    Raises CreateError.
    """
    if files.size("manifest.json") is not None:
        return _docker(files, what, tag)
    if files.size("index.json") is not None:
        return _oci(files, what, tag)
    raise CreateError(f"{what} contains no image: it has neither index.json nor manifest.json")


def _docker(files: ImageFiles, what: str, tag: str) -> ArchivedImage:
    try:
        listed = msgspec.json.decode(_document(files, "manifest.json"))
        fitting = [e for e in listed if not tag or any(tag in t for t in e.get("RepoTags") or ())]
        if len(fitting) != 1:
            tags = sorted(t for e in listed for t in e.get("RepoTags") or ())
            raise CreateError(
                f"{what} contains {len(fitting)} matching images; its tags are: {', '.join(tags) or 'none'}",
                remedy="save a single image",
            )
        config = _document(files, str(fitting[0]["Config"]))
        names = [str(name) for name in fitting[0]["Layers"]]
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise CreateError(f"{what} is not an archive of `docker save`: {error!r}") from error
    layers = tuple(ArchiveLayer(name, _size(files, name, what), "") for name in names)
    return ArchivedImage(manifest.digest_of(config), manifest.configuration(config, len(layers)), layers)


def _oci(files: ImageFiles, what: str, tag: str) -> ArchivedImage:
    read = manifest.read(_document(files, "index.json"), manifest.INDEXES[0])
    assert isinstance(read, tuple)
    named = [e for e in read if not tag or (e.annotations or {}).get(REF_NAME, "").endswith(tag)]
    if not named:
        raise CreateError(f"{what} contains no image with the tag {tag}")
    if len(named) > 1 and all(entry.platform is None for entry in named):
        raise CreateError(f"{what} contains {len(named)} images", remedy="name one: oci:PATH:TAG")
    found: manifest.Manifest | tuple[BlobDescriptor, ...] = tuple(named)
    for _ in range(4):
        if isinstance(found, manifest.Manifest):
            break
        entry = manifest.choose(found)
        found = manifest.read(_verified(files, entry), entry.media_type)
    if not isinstance(found, manifest.Manifest):
        raise CreateError(f"{what} contains nested indexes, but no image")
    config = _verified(files, found.config)
    layers = []
    for wanted in found.layers:
        if _size(files, blob_name(wanted.digest), what) != wanted.size:
            raise CreateError(f"{what}: the size of the layer {wanted.digest} differs from the manifest")
        layers.append(ArchiveLayer(blob_name(wanted.digest), wanted.size, wanted.digest))
    return ArchivedImage(found.digest, manifest.configuration(config, len(layers)), tuple(layers))


def blob_name(digest: str) -> str:
    """The name of a blob's file in a layout. Raises CreateError unless it is a digest: it may be a path."""
    if not DIGEST.fullmatch(digest):
        raise CreateError(f"{digest[:100]!r} is not a digest", remedy="the layout is broken or hostile")
    return f"blobs/{digest.replace(':', '/')}"


def _verified(files: ImageFiles, wanted: BlobDescriptor) -> bytes:
    data = _document(files, blob_name(wanted.digest))
    manifest.check(data, wanted.digest, blob_name(wanted.digest))
    return data


def _size(files: ImageFiles, name: str, what: str) -> int:
    size = files.size(name)
    if size is None:
        raise CreateError(f"{what} is incomplete: {name} is missing")
    return size


def _document(files: ImageFiles, name: str) -> bytes:
    size = files.size(name)
    if size is None or size > manifest.DOCUMENT_MAX:
        raise CreateError(f"{name} is missing, or too large")
    with contextlib.closing(files.open(name)) as source:
        return source.read(size)
