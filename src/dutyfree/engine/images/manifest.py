"""Parse manifests, indexes and configurations of images, in OCI's and Docker's formats."""

from __future__ import annotations

import hashlib
import platform
from typing import Any

import msgspec

from dutyfree.contract.errors import CreateError
from dutyfree.engine.images.reference import DIGEST
from dutyfree.engine.store.records import ImageSettings

INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
LAYERS = {
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
    "application/vnd.docker.image.rootfs.diff.tar.zstd",
}
CONFIGS = (
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
)

DOCUMENT_MAX = 4 << 20
"""Limit for the bytes of a manifest or configuration. Registries refuse larger ones too."""
LAYERS_PER_IMAGE = 512

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


class Platform(msgspec.Struct, frozen=True):
    """An operating system and a processor architecture."""

    os: str = ""
    architecture: str = ""
    variant: str = ""


class BlobDescriptor(msgspec.Struct, frozen=True, rename={"media_type": "mediaType"}):
    """Digest, size and type of a blob in a registry or a layout."""

    digest: str
    size: int
    media_type: str = ""
    platform: Platform | None = None
    annotations: dict[str, str] | None = None


class Manifest(msgspec.Struct, frozen=True):
    """An image for one platform: its configuration and its layers."""

    digest: str
    config: BlobDescriptor
    layers: tuple[BlobDescriptor, ...]
    """The lowest first."""


class Configuration(msgspec.Struct, frozen=True):
    """What an image's configuration says."""

    settings: ImageSettings
    diff_ids: tuple[str, ...]
    created: str


def this_platform() -> Platform:
    """The platform of this machine."""
    machine = platform.machine()
    return Platform("linux", _MACHINES.get(machine, machine))


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def check(data: bytes, digest: str, what: str) -> None:
    """Verify the digest of ``data``. Raises CreateError."""
    found = digest_of(data)
    if found != digest:
        raise CreateError(
            f"{what} does not match its digest: expected {digest}, got {found}",
            remedy="the registry or a proxy is broken or hostile: use another one, or a mirror",
        )


def read(data: bytes, media_type: str) -> Manifest | tuple[BlobDescriptor, ...]:
    """Parse a manifest; or an index, and return the manifests that it lists. Raises CreateError."""
    document = _decode(data)
    kind = str(document.get("mediaType") or media_type.partition(";")[0].strip())
    try:
        if kind in INDEXES or (kind not in MANIFESTS and "manifests" in document):
            return tuple(_descriptor(entry) for entry in document["manifests"])
        if kind not in MANIFESTS and "layers" not in document:
            raise CreateError(
                f"a manifest of the type {kind or 'unknown'} is not supported",
                remedy="push the image again with a recent Docker, Podman or BuildKit",
            )
        config = _descriptor(document["config"])
        layers = tuple(_descriptor(entry) for entry in document["layers"])
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise CreateError(f"the image's manifest is malformed: {error}") from error
    if config.media_type not in ("", *CONFIGS):
        raise CreateError(f"its configuration is {config.media_type}: it is no image of a root file system")
    if len(layers) > LAYERS_PER_IMAGE:
        raise CreateError(f"the image has {len(layers)} layers; the limit is {LAYERS_PER_IMAGE}")
    for layer in layers:
        if layer.media_type not in LAYERS and layer.media_type:
            foreign = " (a foreign layer, which is stored elsewhere)" if "foreign" in layer.media_type else ""
            raise CreateError(
                f"the image has a layer of the kind {layer.media_type}{foreign}, which is not supported"
            )
    return Manifest(digest_of(data), config, layers)


def choose(listed: tuple[BlobDescriptor, ...], wanted: Platform | None = None) -> BlobDescriptor:
    """Select the entry of an index for this platform. Raises CreateError."""
    wanted = wanted or this_platform()
    if len(listed) == 1 and listed[0].platform is None:
        return listed[0]
    known = [entry for entry in listed if entry.platform and entry.platform.os not in ("", "unknown")]
    for entry in known:
        found = entry.platform
        assert found is not None
        if (found.os, found.architecture) == (wanted.os, wanted.architecture):
            return entry
    names = sorted({f"{e.platform.os}/{e.platform.architecture}" for e in known if e.platform})
    raise CreateError(
        f"the image is not made for {wanted.os}/{wanted.architecture}, but for {', '.join(names) or 'none'}",
        remedy="choose another image, or build it for this platform",
    )


def configuration(data: bytes, layers: int) -> Configuration:
    """Parse an image's configuration, and check it against the number of layers. Raises CreateError."""
    document = _decode(data)
    wanted = this_platform()
    try:
        found = Platform(str(document.get("os", "linux")), str(document.get("architecture", "")))
        if (found.os, found.architecture or wanted.architecture) != (wanted.os, wanted.architecture):
            raise CreateError(
                f"the image is made for {found.os}/{found.architecture}, "
                f"and this machine is {wanted.os}/{wanted.architecture}"
            )
        diff_ids = tuple(str(identity) for identity in document["rootfs"]["diff_ids"])
        settings = _settings(document.get("config") or {})
    except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise CreateError(f"the image's configuration is malformed: {error!r}") from error
    if not all(DIGEST.fullmatch(identity) for identity in diff_ids) or len(diff_ids) != layers:
        raise CreateError("the image's configuration does not match its layers")
    return Configuration(settings, diff_ids, str(document.get("created") or ""))


def _settings(config: dict[str, Any]) -> ImageSettings:
    pairs = [str(entry).partition("=") for entry in config.get("Env") or ()]
    settings = ImageSettings(
        env={name: value for name, _, value in pairs if name},
        user=str(config.get("User") or ""),
        workdir=str(config.get("WorkingDir") or ""),
        entrypoint=_words(config.get("Entrypoint")),
        cmd=_words(config.get("Cmd")),
    )
    if any("\0" in text for text in (*settings.env, *settings.env.values(), settings.user, settings.workdir)):
        raise ValueError("a null byte")
    return settings


def _words(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return ("/bin/sh", "-c", value)
    return tuple(str(word) for word in value or ())


def _decode(data: bytes) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CreateError(f"the document is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CreateError("the document is not a manifest or a configuration: it is not a JSON object")
    return document


def _descriptor(entry: Any) -> BlobDescriptor:
    found = msgspec.convert(entry, BlobDescriptor)
    if not DIGEST.fullmatch(found.digest) or found.size < 0:
        raise CreateError(
            f"the manifest has an invalid descriptor: digest {found.digest!r}, {found.size} bytes"
        )
    return found
