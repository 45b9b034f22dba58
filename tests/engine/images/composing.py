"""Compose images by hand: tars, layers, OCI layouts, and a registry to push them to."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import io
import json
import re
import shutil
import socket
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from backports import zstd

from dutyfree.engine.images import manifest

OCI = "application/vnd.oci.image."
DOCKER = "application/vnd.docker."


def member(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    info.mode = 0o644
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def directory(name: str, mode: int = 0o755, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=tarfile.DIRTYPE, mode=mode, **fields)


def link(name: str, target: str, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=tarfile.SYMTYPE, linkname=target, **fields)


def hard(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=tarfile.LNKTYPE, linkname=target)


def tar(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def busybox() -> bytes:
    """A layer with a shell and a few tools."""
    program = shutil.which("busybox")
    if program is None or b"interpreter" in Path(program).read_bytes()[:4096]:
        pytest.skip("busybox is missing; to enable it: apt-get install busybox-static")
    names = "sh cat id ls true echo stat find env pwd rm mkdir sort test"
    tools = names.split()
    return tar(
        directory("bin"),
        directory("etc"),
        member("bin/busybox", Path(program).read_bytes(), mode=0o755),
        *[link(f"bin/{tool}", "busybox") for tool in tools],
        member("etc/passwd", b"root:x:0:0::/root:/bin/sh\napp:x:1000:1001::/home/app:/bin/sh\n"),
        member("etc/group", b"root:x:0:\napp:x:1001:\nstaff:x:50:\n"),
    )


class Image:
    """An image: its blobs by digest, and its manifest."""

    def __init__(
        self,
        layers: list[bytes],
        config: dict[str, Any] | None = None,
        *,
        compression: str = "gzip",
        docker: bool = False,
        architecture: str = "",
    ) -> None:
        self.blobs: dict[str, bytes] = {}
        pack = {"gzip": lambda d: gzip.compress(d, 1, mtime=0), "zstd": zstd.compress, "": bytes}[compression]
        suffix = f"+{compression}" if compression else ""
        kind = f"{OCI}layer.v1.tar{suffix}"
        if docker:
            kind = f"{DOCKER}image.rootfs.diff.tar.gzip"
        self.layers = [self._blob(pack(layer), kind) for layer in layers]
        self.config: dict[str, Any] = {
            "architecture": architecture or manifest.this_platform().architecture,
            "os": "linux",
            "created": "2024-02-03T04:05:06Z",
            "config": config or {},
            "rootfs": {"type": "layers", "diff_ids": [digest(layer) for layer in layers]},
        }
        self.media_type = MANIFEST if not docker else f"{DOCKER}distribution.manifest.v2+json"
        self.config_type = f"{OCI}config.v1+json" if not docker else f"{DOCKER}container.image.v1+json"

    def _blob(self, data: bytes, kind: str) -> dict[str, Any]:
        self.blobs[digest(data)] = data
        return {"mediaType": kind, "digest": digest(data), "size": len(data)}

    def manifest(self) -> bytes:
        config = self._blob(json.dumps(self.config).encode(), self.config_type)
        return json.dumps(
            {"schemaVersion": 2, "mediaType": self.media_type, "config": config, "layers": self.layers}
        ).encode()


MANIFEST = f"{OCI}manifest.v1+json"
INDEX = f"{OCI}index.v1+json"


def index(*images: tuple[str, Image]) -> bytes:
    """An index of images by architecture, with attestations such as BuildKit adds."""
    entries: list[dict[str, Any]] = [
        {
            "mediaType": MANIFEST,
            "digest": digest(b"attestation"),
            "size": 11,
            "platform": {"os": "unknown", "architecture": "unknown"},
        }
    ]
    for architecture, image in images:
        data = image.manifest()
        entries.append(
            {
                "mediaType": image.media_type,
                "digest": digest(data),
                "size": len(data),
                "platform": {"os": "linux", "architecture": architecture},
            }
        )
    return json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}).encode()


def layout(root: Path, image: Image, tag: str = "latest") -> Path:
    """An OCI layout directory."""
    data = image.manifest()
    blobs = root / "blobs/sha256"
    blobs.mkdir(parents=True)
    for name, blob in {**image.blobs, digest(data): data}.items():
        (blobs / name.removeprefix("sha256:")).write_bytes(blob)
    entry = {
        "mediaType": image.media_type,
        "digest": digest(data),
        "size": len(data),
        "annotations": {"org.opencontainers.image.ref.name": tag},
    }
    (root / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (root / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return root


@contextlib.contextmanager
def nobody() -> Iterator[str]:
    """A loopback address that is reserved, but has no server."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@contextlib.contextmanager
def registry(root: Path, *more: str) -> Iterator[str]:
    """Run Debian's registry on the loopback. Yields its address."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("no registry; to enable it: apt-get install docker-registry")
    root.mkdir(parents=True, exist_ok=True)
    config = root / "config.yml"
    lines = [
        "version: 0.1",
        "log: {level: info}",
        f"storage: {{filesystem: {{rootdirectory: {root}/data}}, delete: {{enabled: true}}}}",
        "http: {addr: 127.0.0.1:0}",
        *more,
    ]
    config.write_text("\n".join(lines) + "\n")
    with open(root / "log", "wb") as log:
        process = subprocess.Popen([program, "serve", str(config)], stdout=log, stderr=log)
    try:
        yield _listening(process, root / "log")
    finally:
        process.kill()
        process.wait()


def _listening(process: subprocess.Popen[bytes], log: Path) -> str:
    """The address at which the registry says that it listens."""
    deadline = time.monotonic() + 60
    while not (said := re.search(r"listening on (127\.0\.0\.1:\d+)", log.read_text())):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    return said[1]


def push(host: str, repository: str, tag: str, image: Image, headers: dict[str, str] | None = None) -> str:
    """Push an image with the registry's API. Returns the manifest's digest."""
    data = image.manifest()
    for name, blob in image.blobs.items():
        push_blob(host, repository, name, blob, headers or {})
    return push_manifest(host, repository, tag, data, image.media_type, headers)


def push_blob(host: str, repository: str, name: str, blob: bytes, headers: dict[str, str]) -> None:
    status, answered, _ = request(host, "POST", f"/v2/{repository}/blobs/uploads/", b"", headers)
    assert status == 202, status
    where = answered["location"].partition(host)[2] or answered["location"]
    url = f"{where}{'&' if '?' in where else '?'}digest={name}"
    status, _, body = request(host, "PUT", url, blob, {**headers, "Content-Type": "application/octet-stream"})
    assert status == 201, body


def push_manifest(
    host: str, repository: str, tag: str, data: bytes, kind: str, headers: dict[str, str] | None = None
) -> str:
    url = f"/v2/{repository}/manifests/{tag}"
    status, _, body = request(host, "PUT", url, data, {**(headers or {}), "Content-Type": kind})
    assert status == 201, body
    return digest(data)


def request(
    host: str, method: str, url: str, body: bytes, headers: dict[str, str]
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(host, timeout=60)
    try:
        connection.request(method, url, body, headers)
        response = connection.getresponse()
        data = response.read()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, data
    finally:
        connection.close()


def unpacked_file(root: Path, image: Image) -> Path:
    """The file in which the registry stores an image's first layer."""
    name = str(image.layers[0]["digest"]).removeprefix("sha256:")
    return root / "data/docker/registry/v2/blobs/sha256" / name[:2] / name / "data"
