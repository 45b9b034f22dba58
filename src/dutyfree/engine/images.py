"""What a sandbox starts from: lists of layers, by the launcher's numbers.

``host`` is this machine's own ``/usr`` and what belongs to it, with an ``/etc`` made by a list of what is
harmless: no home, no variable data, no keys, nothing of ``/opt`` or ``/run``. A directory or a tar of a
root file system is an image too.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import stat
import subprocess
from pathlib import Path

import anyio
import anyio.to_thread

from dutyfree import paths
from dutyfree.engine.launcher import Launcher, LauncherError
from dutyfree.engine.protocol import Request, Tree
from dutyfree.errors import CreateError

WORKSPACE = "workspace"

DIRECTORIES = {
    "dev": 0o755,
    "etc": 0o755,
    "home": 0o755,
    "mnt": 0o755,
    "opt": 0o755,
    "proc": 0o555,
    "root": 0o700,
    "run": 0o755,
    "srv": 0o755,
    "sys": 0o555,
    "tmp": 0o1777,
    "usr": 0o755,
    "var": 0o755,
    "var/lib": 0o755,
    "var/log": 0o755,
    "var/tmp": 0o1777,  # noqa: S108 (a name in the image)
    WORKSPACE: 0o755,
}

SOFTWARE = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Links into ``usr`` on most systems, directories of their own on older ones."""

HARMLESS = (
    "alternatives",
    "bash.bashrc",
    "ca-certificates.conf",
    "debian_version",
    "host.conf",
    "inputrc",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "login.defs",
    "magic",
    "mime.types",
    "nsswitch.conf",
    "os-release",
    "perl",
    "profile",
    "protocols",
    "redhat-release",
    "services",
    "shells",
    "ssl/certs",
    "ssl/openssl.cnf",
    "pki/ca-trust",
    "pki/tls/certs",
    "terminfo",
    "timezone",
)
"""Of the host's ``/etc``; and ``python*``, where Debian keeps a part of Python itself."""

USERS = {"root": (0, 0, "/root"), "daemon": (1, 1, "/usr/sbin"), "nobody": (65534, 65534, "/nonexistent")}

FILES = {
    "etc/passwd": "".join(f"{name}:x:{u}:{g}::{home}:/bin/sh\n" for name, (u, g, home) in USERS.items()),
    "etc/group": "root:x:0:\ndaemon:x:1:\ntty:x:5:\nstaff:x:50:\nusers:x:100:\nnogroup:x:65534:\n",
    "etc/hostname": "sandbox\n",
    "etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost\n",
}

_LARGEST = 4 << 20
"""No file of configuration is larger."""


async def host(launcher: Launcher) -> tuple[Tree, ...]:
    """This machine's own software. Raises CreateError."""
    skeleton = await _scratch(launcher, _fill_host)
    trees: list[Tree] = [("", (skeleton,)), ("usr", (await _layer(launcher, Path("/usr")),))]
    for name in SOFTWARE:
        path = Path("/", name)
        if path.is_dir() and not path.is_symlink():
            trees.append((name, (await _layer(launcher, path),)))
    return tuple(trees)


async def directory(launcher: Launcher, root: Path) -> tuple[Tree, ...]:
    """A root file system that lies unpacked on this host. Raises CreateError."""
    if not await anyio.to_thread.run_sync((root / "bin").exists):
        raise CreateError(f"{root} is no root file system: it has no /bin")
    top = await _scratch(launcher, _fill_top)
    return (("", (top, await _layer(launcher, root))),)


async def archive(launcher: Launcher, tar: Path) -> tuple[Tree, ...]:
    """A root file system in a tar, unpacked into the cache once. Raises CreateError."""
    try:
        root = await anyio.to_thread.run_sync(_unpack, tar)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CreateError(f"the image {tar} cannot be unpacked: {error}") from error
    return await directory(launcher, root)


async def _layer(launcher: Launcher, path: Path) -> int:
    try:
        return (await launcher.ask(Request.LAYER, 0, os.fsencode(path) + b"\0")).value
    except LauncherError as error:
        raise CreateError(f"{path} cannot be a layer: {error.message}") from error


async def _scratch(launcher: Launcher, fill: object) -> int:
    try:
        reply = await launcher.ask(Request.SCRATCH)
    except LauncherError as error:
        raise CreateError(error.message) from error
    (descriptor,) = reply.descriptors
    try:
        with anyio.CancelScope(shield=True):
            await asyncio.get_running_loop().run_in_executor(None, fill, descriptor)  # type: ignore[arg-type]
    except OSError as error:
        raise CreateError(f"the image cannot be made: {error}") from error
    finally:
        os.close(descriptor)
    return reply.value


def _fill_host(root: int) -> None:
    for name, mode in DIRECTORIES.items():
        os.mkdir(name, dir_fd=root)
        os.chmod(name, mode, dir_fd=root)
    for name in SOFTWARE:
        path = Path("/", name)
        if path.is_symlink():
            os.symlink(os.readlink(path), name, dir_fd=root)
        elif path.is_dir():
            os.mkdir(name, dir_fd=root)
    os.symlink("/run/lock", "var/lock", dir_fd=root)
    os.symlink("/run", "var/run", dir_fd=root)
    for name in (*HARMLESS, *(path.name for path in Path("/etc").glob("python*"))):
        _copy(Path("/etc", name), f"etc/{name}", root)
    _fill_top(root)


def _fill_top(root: int) -> None:
    for name, text in FILES.items():
        _write(name, text.encode(), root)
    resolver = Path("/etc/resolv.conf")
    if resolver.is_file():
        _write("etc/resolv.conf", resolver.read_bytes()[:_LARGEST], root)
    for name in ("etc", WORKSPACE):
        os.makedirs(f"/proc/self/fd/{root}/{name}", exist_ok=True)


def _copy(source: Path, name: str, root: int) -> None:
    """A part of ``/etc``, as it is; links that stay within what a sandbox has are kept as links."""
    try:
        found = source.lstat()
    except OSError:
        return
    if stat.S_ISLNK(found.st_mode):
        target = os.readlink(source)
        resolved = os.path.normpath(os.path.join(source.parent, target))
        if resolved.startswith(("/usr/", "/etc/alternatives/", "/etc/ssl/certs/", "/etc/pki/")):
            os.makedirs(os.path.dirname(f"/proc/self/fd/{root}/{name}"), exist_ok=True)
            os.symlink(target, name, dir_fd=root)
            return
        if not source.is_file() or resolved.startswith(("/root", "/home", "/run", "/proc")):
            return
        found = source.stat()
    if stat.S_ISDIR(found.st_mode):
        os.makedirs(f"/proc/self/fd/{root}/{name}", exist_ok=True)
        for child in sorted(source.iterdir()):
            _copy(child, f"{name}/{child.name}", root)
    # What is not for everybody on the host is not for a sandbox.
    elif stat.S_ISREG(found.st_mode) and found.st_mode & 0o004 and found.st_size <= _LARGEST:
        _write(name, source.read_bytes(), root, stat.S_IMODE(found.st_mode) & 0o755)


def _write(name: str, data: bytes, root: int, mode: int = 0o644) -> None:
    os.makedirs(os.path.dirname(f"/proc/self/fd/{root}/{name}"), exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(name, flags, 0o600, dir_fd=root), "wb") as file:
        file.write(data)
        os.fchmod(file.fileno(), mode)


def _unpack(tar: Path) -> Path:
    """The directory in the cache that holds the tar's files."""
    found = tar.stat()
    identity = f"{tar.absolute()}:{found.st_size}:{found.st_mtime_ns}"
    target = paths.cache() / "rootfs" / hashlib.sha256(identity.encode()).hexdigest()[:32]
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f"{target.name}.{os.getpid()}")
    scratch.mkdir()
    try:
        command = ["tar", "--extract", "--numeric-owner", "--preserve-permissions", f"--file={tar}"]
        subprocess.run([*command, f"--directory={scratch}"], check=True, capture_output=True)
        try:
            scratch.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target
