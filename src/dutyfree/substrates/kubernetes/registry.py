"""Push images to a registry from which the cluster pulls: the study's, and those of recipes on it.

An image has the files of ``study_image``, our init, and the layers of a recipe's stages. Each layer is pushed
once; the name of the image is the digest of its manifest.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import os
import tarfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple
from urllib.parse import urlsplit

import msgspec

from dutyfree import study_image as study
from dutyfree.contract.errors import CreateError
from dutyfree.engine.exchange import packer
from dutyfree.engine.images.http import CONNECT_SECONDS
from dutyfree.engine.images.manifest import this_platform
from dutyfree.engine.launcher.client import BINARY
from dutyfree.engine.layers.command_defaults import ENVIRONMENT, WORKDIR
from dutyfree.engine.store.cancel import CancelToken
from dutyfree.engine.store.store import Store
from dutyfree.substrates.kubernetes.api import Api, ApiError, ApiLost

REPOSITORY = "dutyfree/study"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
COMPRESSED = f"{LAYER}+zstd"
PUSH_SECONDS = 300.0

_UNNAMED = (403, 404)
"""The cluster names no registry, or not to this account."""


class Blob(NamedTuple):
    """What a registry keeps under its digest."""

    media: str
    digest: str
    size: int
    open: Callable[[], IO[bytes]]
    diff_id: str
    """Of a layer: the digest of its tar, which may be compressed here."""

    @property
    def descriptor(self) -> dict[str, object]:
        return {"mediaType": self.media, "digest": self.digest, "size": self.size}


async def announced(api: Api) -> str:
    """The registry that the cluster names for images of its users, HOST[:PORT]; "" if it names none.

    Raises CreateError.
    """
    try:
        path = "/api/v1/namespaces/kube-public/configmaps/local-registry-hosting"
        data = (await api.request("GET", path)).get("data") or {}
    except ApiError as error:
        if error.status in _UNNAMED:
            return ""
        raise CreateError(f"the cluster does not say which registry it has: {error}") from error
    except ApiLost as error:
        raise CreateError(str(error)) from error
    for line in str(data.get("localRegistryHosting.v1", "")).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "host":
            return value.strip().strip("\"'")
    return ""


def push(host: str, image: study.StudyImage, store: Store, keys: Sequence[str] = ()) -> str:
    """Push the study's image with these layers of the store, unless the registry has it. Blocks.

    Returns its reference. Raises CreateError, Cancelled.
    """
    try:
        layers = (
            Blob(LAYER, image.digest, image.size, lambda: image.tar.open("rb"), image.digest),
            _blob(LAYER, _init_layer(BINARY)),
            *(blob for key in keys for blob in _packed(store, key)),
        )
        config = _blob(CONFIG, _config(layers))
        manifest = msgspec.json.encode(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": config.descriptor,
                "layers": [layer.descriptor for layer in layers],
            }
        )
        digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
        with _Registry(host) as registry:
            if not registry.has(f"manifests/{digest}"):
                for blob in (*layers, config):
                    registry.push(blob)
                registry.put(f"manifests/{digest}", MANIFEST, manifest)
    except (OSError, http.client.HTTPException) as error:
        raise CreateError(
            f"an image could not be packed and pushed to the registry {host}: {error}",
            remedy="check the disk and the option registry=, or name an image of the cluster's with image=",
        ) from error
    return f"{host}/{REPOSITORY}@{digest}"


def _blob(media: str, data: bytes) -> Blob:
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    return Blob(media, digest, len(data), lambda: io.BytesIO(data), digest)


def _packed(store: Store, key: str) -> list[Blob]:
    """A layer of the store, as it is sent to other machines."""
    blobs = packer.pack_layer(store, key, CancelToken())
    paths = [packer.blob_path(store, key, blob.digest) for blob in blobs]
    return [
        Blob(COMPRESSED, blob.digest, blob.size, partial(_open, path), blob.diff_id)
        for blob, path in zip(blobs, paths, strict=True)
    ]


def _open(path: Path) -> IO[bytes]:
    return path.open("rb")


def _init_layer(program: Path) -> bytes:
    """The same bytes for the same program."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        directory = tarfile.TarInfo(".dutyfree")
        directory.type, directory.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(directory)
        member = tarfile.TarInfo(".dutyfree/init")
        member.size, member.mode = program.stat().st_size, 0o555
        with program.open("rb") as file:
            tar.addfile(member, file)
    return made.getvalue()


def _config(layers: tuple[Blob, ...]) -> bytes:
    platform = this_platform()
    environment = {"PATH": ENVIRONMENT["PATH"], **study.ENVIRONMENT}
    return msgspec.json.encode(
        {
            "architecture": platform.architecture,
            "os": "linux",
            "config": {
                "Env": [f"{name}={value}" for name, value in environment.items()],
                "WorkingDir": WORKDIR,
                "Cmd": ["/bin/bash"],
            },
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        }
    )


class _Registry:
    """One repository of a registry, without a login: over plain HTTP on this machine, else over TLS."""

    def __init__(self, host: str) -> None:
        name = urlsplit(f"//{host}").hostname or ""
        secure = name != "localhost" and not name.startswith("127.")
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._connection = kind(host, timeout=CONNECT_SECONDS)

    def __enter__(self) -> _Registry:
        self._connection.connect()
        assert self._connection.sock is not None
        self._connection.sock.settimeout(PUSH_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def has(self, path: str) -> bool:
        return self._ask("HEAD", f"/v2/{REPOSITORY}/{path}", {"Accept": MANIFEST}).status == 200

    def put(self, path: str, media: str, data: bytes) -> None:
        self._expect(self._ask("PUT", f"/v2/{REPOSITORY}/{path}", {"Content-Type": media}, data), 201)

    def push(self, blob: Blob) -> None:
        if self.has(f"blobs/{blob.digest}"):
            return
        begun = self._ask("POST", f"/v2/{REPOSITORY}/blobs/uploads/", {"Content-Length": "0"})
        self._expect(begun, 202)
        place = urlsplit(begun.headers["Location"])
        target = f"{place.path}?{place.query}&digest={blob.digest}".replace("?&", "?")
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(blob.size)}
        with blob.open() as content:
            self._expect(self._ask("PUT", target, headers, content), 201)

    def _ask(
        self, method: str, target: str, headers: dict[str, str], body: bytes | IO[bytes] | None = None
    ) -> http.client.HTTPResponse:
        self._connection.request(method, target, body, headers)
        response = self._connection.getresponse()
        self._said = response.read()
        return response

    def _expect(self, response: http.client.HTTPResponse, status: int) -> None:
        if response.status != status:
            said = self._said[:200].decode(errors="replace").strip()
            raise OSError(f"status {response.status}: {os.linesep.join(said.splitlines())}")
