"""The kernel of the machines, and the initial RAM file system with our init.

The kernel is Debian's for clouds. ``apt-get download`` fetches its package, which is unpacked into the cache
and never installed. Its drivers are modules, so they are packed with init.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from dutyfree import paths
from dutyfree.contract.errors import Unavailable
from dutyfree.engine.launcher.client import BINARY
from dutyfree.engine.store.locks import locked

PACKAGE = "linux-image-cloud-amd64"

VIRTIO = ("virtio_ring", "virtio")
BUS = {
    "microvm": ("virtio_mmio",),
    "pc": ("virtio_pci_legacy_dev", "virtio_pci_modern_dev", "virtio_pci"),
}
ALWAYS = ("virtio_blk", "virtio_console", "overlay")
NETWORK = ("failover", "net_failover", "virtio_net")
MODULES = (*VIRTIO, *BUS["microvm"], *BUS["pc"], *ALWAYS, *NETWORK)

CONSOLE = (5, 1)
"""The device number of the only device: init's messages go there."""

LZ4 = b"\x02\x21\x4c\x18"
"""How the compressed kernel in a bzImage begins."""


class Kernel(NamedTuple):
    """An unpacked kernel in the cache."""

    directory: Path

    @property
    def version(self) -> str:
        return self.directory.name.removeprefix("linux-image-")

    @property
    def image(self) -> Path:
        return self.directory / "vmlinux"

    def initramfs(self) -> int:
        """Init and the modules, as a cpio archive in memory: its descriptor. Blocks. Raises Unavailable."""
        entries: list[tuple[str, int, bytes]] = [
            (name, 0o040755, b"") for name in ("dev", "modules", "proc", "root", "sys")
        ]
        entries.append(("dev/console", stat.S_IFCHR | 0o600, b""))
        try:
            entries.append(("init", 0o100755, BINARY.read_bytes()))
            entries += [
                (f"modules/{name}.ko", 0o100644, (self.directory / "modules" / f"{name}.ko").read_bytes())
                for name in MODULES
            ]
        except OSError as error:
            raise Unavailable(
                f"vm: {error.filename} cannot be read: {error.strerror}",
                remedy="install dutyfree with a C compiler, or remove this directory: it is made again",
            ) from error
        return _in_memory("dutyfree-initramfs", _cpio(entries))


def modules(machine: str, *, network: bool) -> tuple[str, ...]:
    """What init loads, in this order."""
    return (*VIRTIO, *BUS[machine], *ALWAYS, *(NETWORK if network else ()))


def folder() -> Path:
    return paths.cache() / "vm"


def found() -> Kernel | None:
    """The newest kernel in the cache."""
    kernels = sorted(folder().glob("linux-image-*/vmlinux"), key=lambda path: path.stat().st_mtime)
    return Kernel(kernels[-1].parent) if kernels else None


def fetch() -> Kernel:
    """The kernel in the cache, downloaded if there is none. Blocks. Raises Unavailable."""
    if kernel := found():
        return kernel
    try:
        folder().mkdir(parents=True, exist_ok=True)
        with locked(folder() / "lock", fcntl.LOCK_EX):
            for old in folder().glob("fetch-*"):
                shutil.rmtree(old, ignore_errors=True)
            return found() or _fetch(Path(tempfile.mkdtemp(prefix="fetch-", dir=folder())))
    except OSError as error:
        raise Unavailable(
            f"vm: the kernel cannot be written to {folder()}: {error.strerror or error}",
            remedy="free some space there, or set DUTYFREE_CACHE to another directory",
        ) from error


def _fetch(scratch: Path) -> Kernel:
    try:
        depends = _run("apt-cache", "depends", "--important", PACKAGE, at=scratch)
        name = next(
            (
                line.split()[1]
                for line in depends.decode().splitlines()
                if line.strip().startswith("Depends:")
            ),
            "",
        )
        if not name:
            raise Unavailable(f"vm: apt does not know {PACKAGE}", remedy="apt-get update")
        _run("apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", name, at=scratch)
        _run("dpkg-deb", "-x", str(next(scratch.glob("*.deb"))), str(scratch / "files"), at=scratch)
        made = scratch / "made"
        (made / "modules").mkdir(parents=True)
        for module in MODULES:
            source = next((scratch / "files").rglob(f"{module}.ko*"), None)
            if source is None:
                raise Unavailable(f"vm: the package {name} has no module {module}")
            target = made / "modules" / source.name
            shutil.copy(source, target)
            if target.suffix == ".xz":
                _run("xz", "-d", str(target), at=scratch)
        packed = next((scratch / "files/boot").glob("vmlinuz-*")).read_bytes()
        (scratch / "packed").write_bytes(packed[max(0, packed.find(LZ4)) :])
        # What follows the compressed kernel is not lz4's, so its exit code says nothing.
        (made / "vmlinux").write_bytes(_run("lz4", "-dc", "packed", at=scratch, checked=False))
        (made / "vmlinux").chmod(0o644)  # QEMU, with another user id, opens it again by its descriptor
        if (made / "vmlinux").read_bytes()[:4] != b"\x7fELF":
            raise Unavailable(f"vm: the kernel of {name} could not be unpacked")
        target = folder() / name
        made.rename(target)
        return Kernel(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run(*command: str, at: Path, checked: bool = True) -> bytes:
    """Raises Unavailable."""
    try:
        done = subprocess.run(command, cwd=at, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise Unavailable(
            f"vm: there is no {command[0]}, which unpacks the kernel",
            remedy="on Debian as root: apt-get install lz4 xz-utils",
        ) from error
    if checked and done.returncode:
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise Unavailable(
            f"vm: {' '.join(command)} failed: {said}", remedy="check that apt reaches its mirror"
        )
    return done.stdout


def _cpio(entries: Iterable[tuple[str, int, bytes]]) -> bytes:
    """An archive in the format "newc" that the kernel reads: names, modes, contents."""
    made = bytearray()
    for number, (name, mode, data) in enumerate((*entries, ("TRAILER!!!", 0, b"")), 1):
        device = CONSOLE if stat.S_ISCHR(mode) else (0, 0)
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(name) + 1, 0)
        made += b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
        made += b"\0" * (-len(made) % 4) + data
        made += b"\0" * (-len(made) % 4)
    return bytes(made)


def _in_memory(name: str, data: bytes) -> int:
    """A file without a name, as a descriptor. No process can change it."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    seal(descriptor)
    return descriptor


def seal(descriptor: int) -> None:
    """From now on no process can change the file in memory."""
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
