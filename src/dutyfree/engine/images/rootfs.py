"""Hand layers to the launcher: of this machine, of a directory, of an image in the store.

The image ``host`` is this machine's own ``/usr``, with an ``/etc`` that contains only a list of harmless
files: no home directories, no variable data, no keys, nothing of ``/opt`` or ``/run``. Every other image is
used as it is, except for three files in ``/etc`` that depend on where it runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from dutyfree.contract.errors import CreateError
from dutyfree.engine.launcher import network_policy
from dutyfree.engine.launcher.client import Launcher, LauncherError
from dutyfree.engine.launcher.protocol import Request, Tree
from dutyfree.engine.store.overlay import OPAQUE, REDIRECT, WHITEOUT_DEVICE, OverlayEntry, lookup

WORKSPACE = "workspace"

DIRECTORIES = {
    "dev": 0o755,
    "etc": 0o755,
    "etc/skel": 0o755,
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
    "var/tmp": 0o1777,
    WORKSPACE: 0o755,
}

SOFTWARE = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Links into ``/usr`` on most systems, directories on older ones."""

ETC_FILES = (
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
"""What ``host`` has of the machine's ``/etc``; and ``python*``, which Debian's Python needs."""

LINK_TARGETS = ("/usr/", "/etc/alternatives/", "/etc/ssl/certs/", "/etc/pki/")
"""Where symbolic links in it may point."""

USERS = {"root": (0, 0, "/root"), "daemon": (1, 1, "/usr/sbin"), "nobody": (65534, 65534, "/nonexistent")}

ACCOUNTS = {
    "etc/passwd": "".join(f"{name}:x:{u}:{g}::{home}:/bin/sh\n" for name, (u, g, home) in USERS.items()),
    "etc/group": "root:x:0:\ndaemon:x:1:\ntty:x:5:\nstaff:x:50:\nusers:x:100:\nnogroup:x:65534:\n",
}

HOST_FILES = {
    "etc/hostname": "sandbox\n",
    "etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost\n",
}
"""Files that depend on where an image runs; and ``resolv.conf``, which is made from the host's."""

PAM = "".join(f"{kind} required pam_permit.so\n" for kind in ("auth", "account", "password", "session"))
"""Lets su, adduser and others work: a sandbox has no passwords to check."""

USR = Path("/usr")
WHOLE = "trusted.dutyfree.whole"
"""Marks the directory that shows the whole layer below it by redirects, for ``init/setup/place.c``."""

_CONFIG_MAX = 4 << 20
"""Limit for the bytes of a file from ``/etc``."""


async def host(launcher: Launcher, *, rootless: bool = False) -> tuple[Tree, ...]:
    """The layers of the image ``host``. Raises CreateError.

    If all software is in ``/usr``, one overlay is enough. Without root this does not work: such overlays
    ignore redirects. There the host's files have no owner in the sandbox, so a layer of empty directories,
    which the sandbox owns, lies above them: files in these can be added, replaced and removed.
    """
    if not rootless and await anyio.to_thread.run_sync(host_trees) == 1:
        return (("", (await _scratch(launcher, fill_above_usr), await layer(launcher, USR))),)
    trees: list[Tree] = [("", (await _scratch(launcher, _fill_host),))]
    for name in await anyio.to_thread.run_sync(_directories):
        source = Path("/", name)
        above = (await _scratch(launcher, partial(_copy_directories, source)),) if rootless else ()
        trees.append((name, (*above, await layer(launcher, source))))
    return tuple(trees)


def host_identity() -> str:
    """Changes whenever software is installed, removed or changed on this machine. Blocks."""
    digest = hashlib.sha256(f"{os.uname().machine} {host_trees()}".encode())
    for listed in (
        "etc/os-release",
        "var/lib/dpkg/status",
        "var/lib/rpm/rpmdb.sqlite",
        "lib/apk/db/installed",
    ):
        _hash_file(digest, Path("/", listed))
    for root in (Path("/", name) for name in _directories()):
        for path in (root, *sorted(root.glob("*/")), *sorted(root.glob("local/*/"))):
            _hash_file(digest, path)
    return f"host {digest.hexdigest()}"


def host_trees() -> int:
    """The number of overlays of a sandbox on the image ``host``, with root. Blocks."""
    directories = _directories()
    return 1 if directories == [USR.name] else 1 + len(directories)


def _hash_file(digest: hashlib._Hash, path: Path) -> None:
    with contextlib.suppress(OSError):
        found = path.stat()
        digest.update(f"{path} {found.st_ino} {found.st_size} {found.st_mtime_ns}\n".encode())


def is_rootfs(path: Path) -> bool:
    """Whether a directory is a root file system, and not an OCI layout."""
    return path.is_dir() and not (path / "oci-layout").is_file()


async def directory(launcher: Launcher, root: Path) -> tuple[Tree, ...]:
    """The layers of a root file system in a directory of this machine. Raises CreateError."""
    if not await anyio.to_thread.run_sync((root / "bin").exists):
        raise CreateError(f"{root} is not a root file system: it has no /bin")
    return await stack(launcher, [root])


async def stack(
    launcher: Launcher, layers: Sequence[Path], workdir: str = "", locks: Sequence[int] = ()
) -> tuple[Tree, ...]:
    """The layers of an image, the uppermost first, below a layer of ours. Raises CreateError.

    ``locks``: descriptors that keep the layers on disk, for a launcher that outlives its owner.
    """
    top = await _scratch(launcher, partial(fill_top, layers=layers, workdir=workdir))
    held = [*locks, *[None] * (len(layers) - len(locks))]
    below = [await layer(launcher, path, lock) for path, lock in zip(layers, held, strict=True)]
    return (("", (top, *below)),)


async def layer(launcher: Launcher, path: Path, lock: int | None = None) -> int:
    """Register a directory of this machine as a layer at the launcher. Raises CreateError.

    A launcher that outlives its owner holds ``lock``, the lock of the layer, as long as it has the layer.
    """
    try:
        held = lock if launcher.keeps else None
        return (await launcher.ask(Request.LAYER, 0, os.fsencode(path) + b"\0", held)).value
    except LauncherError as error:
        raise CreateError(f"{path} cannot be used as a layer: {error.message}") from error


async def _scratch(launcher: Launcher, fill: Callable[[Path], None]) -> int:
    try:
        reply = await launcher.ask(Request.SCRATCH)
    except LauncherError as error:
        raise CreateError(error.message) from error
    (descriptor,) = reply.descriptors
    try:
        with anyio.CancelScope(shield=True):
            # Only reachable by its descriptor: it is in the launcher's mount namespace.
            await anyio.to_thread.run_sync(fill, Path(f"/proc/self/fd/{descriptor}"))
    except OSError as error:
        raise CreateError(f"the image's own layer cannot be created: {error}") from error
    finally:
        os.close(descriptor)
    return reply.value


def _directories() -> list[str]:
    """The directories of the host's software; only ``usr`` on most systems."""
    paths = {name: Path("/", name) for name in ("usr", *SOFTWARE)}
    return [name for name, path in paths.items() if path.is_dir() and not path.is_symlink()]


def _copy_directories(source: Path, target: Path) -> None:
    """Create the same directories, without files. Skips those that we may not read."""
    waiting = [(str(source), str(target))]
    while waiting:
        theirs, ours = waiting.pop()
        for name in _subdirectories(theirs):
            if os.access(f"{theirs}/{name}", os.R_OK | os.X_OK):
                os.mkdir(f"{ours}/{name}", 0o755)  # noqa: PTH102 (there are ten thousands)
                waiting.append((f"{theirs}/{name}", f"{ours}/{name}"))


def _subdirectories(path: str) -> list[str]:
    with os.scandir(path) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]


def _fill_host(root: Path) -> None:
    for name, mode in DIRECTORIES.items():
        (root / name).mkdir()
        (root / name).chmod(mode)
    for name in SOFTWARE:
        path = Path("/", name)
        if path.is_symlink():
            (root / name).symlink_to(os.readlink(path))
        elif path.is_dir():
            (root / name).mkdir()
    (root / "var/lock").symlink_to("/run/lock")
    (root / "var/run").symlink_to("/run")
    for name in (*ETC_FILES, *(path.name for path in Path("/etc").glob("python*"))):
        _copy(Path("/etc", name), root / "etc" / name)
    _write(root / "etc/pam.d/other", PAM.encode())
    for name, data in {**{n: t.encode() for n, t in ACCOUNTS.items()}, **_host_files()}.items():
        _write(root / name, data)


def fill_above_usr(root: Path) -> None:
    """Fill the layer above ``/usr``, whose directories appear at the root of the overlay.

    They are hidden there. Our own ``usr`` has a directory of each name with a redirect to the hidden one, as
    overlayfs writes it when a directory is renamed.
    """
    _fill_host(root)
    for ours in (root / name for name in DIRECTORIES if "/" not in name and name != USR.name):
        os.setxattr(ours, OPAQUE, b"y")
    os.setxattr(root / USR.name, WHOLE, b"y")
    for below in sorted(USR.iterdir()):
        if not os.path.lexists(root / below.name):
            os.mknod(root / below.name, stat.S_IFCHR, WHITEOUT_DEVICE)
        shown = root / USR.name / below.name
        if below.is_symlink():
            shown.symlink_to(os.readlink(below))
        elif below.is_dir():
            shown.mkdir()
            os.setxattr(shown, REDIRECT, os.fsencode(f"/{below.name}"))
            _copy_metadata(shown, OverlayEntry((below,), is_directory=True))
        else:
            _copy(below, shown)


def _host_files() -> dict[str, bytes]:
    files = {name: text.encode() for name, text in HOST_FILES.items()}
    files["etc/resolv.conf"] = network_policy.resolver_settings()
    return files


def fill_top(root: Path, layers: Sequence[Path], workdir: str) -> None:
    """Fill the layer above an image's own layers. Its directories look like those below."""
    etc = lookup(layers, "etc")
    if etc is None or etc.is_directory:  # if /etc is a link, leave it alone
        for name, data in _host_files().items():
            _write(root / name, data)
        _copy_metadata(root / "etc", etc)
    at = root
    parts = [part for part in os.path.normpath(f"/{workdir}").split("/") if part]
    missing = lookup(layers, "/".join(parts)) is None
    for number, part in enumerate(parts if missing else (), 1):
        below = lookup(layers, "/".join(parts[:number]))
        if below is not None and not below.is_directory:
            return
        at = at / part
        at.mkdir(exist_ok=True)
        _copy_metadata(at, below)


def _copy_metadata(path: Path, below: OverlayEntry | None) -> None:
    if below is None:
        path.chmod(0o755)
        return
    found = below.paths[0].lstat()
    with contextlib.suppress(PermissionError):  # without root everything is ours
        os.chown(path, found.st_uid, found.st_gid)
    path.chmod(stat.S_IMODE(found.st_mode))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def _copy(source: Path, target: Path) -> None:
    """Copy a part of ``/etc``. Keeps symbolic links that point to what a sandbox has."""
    try:
        found = source.lstat()
    except OSError:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISLNK(found.st_mode):
        link = os.readlink(source)
        resolved = os.path.normpath(source.parent / link)
        if resolved.startswith(LINK_TARGETS):
            target.symlink_to(link)
        return
    if stat.S_ISDIR(found.st_mode):
        target.mkdir(exist_ok=True)
        for child in sorted(source.iterdir()):
            _copy(child, target / child.name)
    # A file that not every user of the host may read is not for a sandbox.
    elif stat.S_ISREG(found.st_mode) and found.st_mode & stat.S_IROTH and found.st_size <= _CONFIG_MAX:
        _write(target, source.read_bytes(), stat.S_IMODE(found.st_mode) & 0o755)


def _write(path: Path, data: bytes, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)
