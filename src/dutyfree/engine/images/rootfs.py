"""Layers in the launcher's hands: of this machine, of a directory, of an image in the store.

``host`` is this machine's own ``/usr`` and what belongs to it, with an ``/etc`` made by a list of what is
harmless: no home, no variable data, no keys, nothing of ``/opt`` or ``/run``. Of every other image all is its
own, but for the three files in ``/etc`` that say where it runs.
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

REACHED = ("/usr/", "/etc/alternatives/", "/etc/ssl/certs/", "/etc/pki/")
"""Where links in it may lead."""

USERS = {"root": (0, 0, "/root"), "daemon": (1, 1, "/usr/sbin"), "nobody": (65534, 65534, "/nonexistent")}

ACCOUNTS = {
    "etc/passwd": "".join(f"{name}:x:{u}:{g}::{home}:/bin/sh\n" for name, (u, g, home) in USERS.items()),
    "etc/group": "root:x:0:\ndaemon:x:1:\ntty:x:5:\nstaff:x:50:\nusers:x:100:\nnogroup:x:65534:\n",
}

PLACE = {
    "etc/hostname": "sandbox\n",
    "etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost\n",
}
"""Where it runs; and ``resolv.conf``, which is the host's."""

PAM = "".join(f"{kind} required pam_permit.so\n" for kind in ("auth", "account", "password", "session"))
"""For su, adduser and their like: in a sandbox there is no secret that they could guard."""

USR = Path("/usr")

_LARGEST = 4 << 20
"""No file of configuration is larger."""


async def host(launcher: Launcher, *, rootless: bool = False) -> tuple[Tree, ...]:
    """This machine's own software. Raises CreateError.

    Where it all lies in ``/usr``, one overlay shows it, but for those without root, whose overlays follow no
    marks. To them its files belong to nobody; its directories are laid over it once more, as the sandbox's
    own, so that files can be added, replaced and removed there.
    """
    if not rootless and await anyio.to_thread.run_sync(host_trees) == 1:
        return (("", (await _scratch(launcher, _fill_joined), await layer(launcher, USR))),)
    trees: list[Tree] = [("", (await _scratch(launcher, _fill_host),))]
    for name in await anyio.to_thread.run_sync(_directories):
        source = Path("/", name)
        above = (await _scratch(launcher, partial(_repeat_directories, source)),) if rootless else ()
        trees.append((name, (*above, await layer(launcher, source))))
    return tuple(trees)


def host_identity() -> str:
    """Another one whenever software was installed, removed or changed on this machine. Blocks."""
    digest = hashlib.sha256(f"{os.uname().machine} {host_trees()}".encode())
    for listed in (
        "etc/os-release",
        "var/lib/dpkg/status",
        "var/lib/rpm/rpmdb.sqlite",
        "lib/apk/db/installed",
    ):
        _note(digest, Path("/", listed))
    for root in (Path("/", name) for name in _directories()):
        for path in (root, *sorted(root.glob("*/")), *sorted(root.glob("local/*/"))):
            _note(digest, path)
    return f"host {digest.hexdigest()}"


def host_trees() -> int:
    """Overlays that with root a sandbox upon this machine's software is put together from. Blocks."""
    directories = _directories()
    return 1 if directories == [USR.name] else 1 + len(directories)


def _note(digest: hashlib._Hash, path: Path) -> None:
    with contextlib.suppress(OSError):
        found = path.stat()
        digest.update(f"{path} {found.st_ino} {found.st_size} {found.st_mtime_ns}\n".encode())


def lies_at(path: Path) -> bool:
    """Whether a directory is to be taken as it is, and not for a layout with images in it."""
    return path.is_dir() and not (path / "oci-layout").is_file()


async def directory(launcher: Launcher, root: Path) -> tuple[Tree, ...]:
    """A root file system that lies unpacked on this host. Raises CreateError."""
    if not await anyio.to_thread.run_sync((root / "bin").exists):
        raise CreateError(f"{root} is no root file system: it has no /bin")
    return await stacked(launcher, [root])


async def stacked(launcher: Launcher, layers: Sequence[Path], workdir: str = "") -> tuple[Tree, ...]:
    """Layers of an image, the uppermost first, under what is ours. Raises CreateError."""
    top = await _scratch(launcher, partial(_fill_top, layers=layers, workdir=workdir))
    return (("", (top, *[await layer(launcher, path) for path in layers])),)


async def layer(launcher: Launcher, path: Path) -> int:
    """A directory of this host in the launcher's hands. Raises CreateError."""
    try:
        return (await launcher.ask(Request.LAYER, 0, os.fsencode(path) + b"\0")).value
    except LauncherError as error:
        raise CreateError(f"{path} cannot be a layer: {error.message}") from error


async def _scratch(launcher: Launcher, fill: Callable[[Path], None]) -> int:
    try:
        reply = await launcher.ask(Request.SCRATCH)
    except LauncherError as error:
        raise CreateError(error.message) from error
    (descriptor,) = reply.descriptors
    try:
        with anyio.CancelScope(shield=True):
            # The way to it is the descriptor: the layer is in no mount namespace but the launcher's.
            await anyio.to_thread.run_sync(fill, Path(f"/proc/self/fd/{descriptor}"))
    except OSError as error:
        raise CreateError(f"the image cannot be made: {error}") from error
    finally:
        os.close(descriptor)
    return reply.value


def _directories() -> list[str]:
    """Where the host's software lies: one directory on most systems."""
    paths = {name: Path("/", name) for name in ("usr", *SOFTWARE)}
    return [name for name, path in paths.items() if path.is_dir() and not path.is_symlink()]


def _repeat_directories(source: Path, target: Path) -> None:
    """Those that we may look into; the others stay as they are."""
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
    for name in (*HARMLESS, *(path.name for path in Path("/etc").glob("python*"))):
        _copy(Path("/etc", name), root / "etc" / name)
    _write(root / "etc/pam.d/other", PAM.encode())
    for name, data in {**{n: t.encode() for n, t in ACCOUNTS.items()}, **_place()}.items():
        _write(root / name, data)


def _fill_joined(root: Path) -> None:
    """What belongs over ``/usr`` as the layer below, whose directories lie at its root.

    They are hidden there; and in our own ``usr`` there is one of each name, marked as those are that were
    renamed in an overlay: it shows what has the other name below.
    """
    _fill_host(root)
    for ours in (root / name for name in DIRECTORIES if "/" not in name and name != USR.name):
        os.setxattr(ours, OPAQUE, b"y")
    for below in sorted(USR.iterdir()):
        if not os.path.lexists(root / below.name):
            os.mknod(root / below.name, stat.S_IFCHR, WHITEOUT_DEVICE)
        shown = root / USR.name / below.name
        if below.is_symlink():
            shown.symlink_to(os.readlink(below))
        elif below.is_dir():
            shown.mkdir()
            os.setxattr(shown, REDIRECT, os.fsencode(f"/{below.name}"))
            _imitate(shown, OverlayEntry((below,), is_directory=True))
        else:
            _copy(below, shown)


def _place() -> dict[str, bytes]:
    files = {name: text.encode() for name, text in PLACE.items()}
    files["etc/resolv.conf"] = network_policy.resolver_settings()
    return files


def _fill_top(root: Path, layers: Sequence[Path], workdir: str) -> None:
    """What lies over an image's own layers; its directories look as they do below."""
    etc = lookup(layers, "etc")
    if etc is None or etc.is_directory:  # of a link nothing is known, and it stays
        for name, data in _place().items():
            _write(root / name, data)
        _imitate(root / "etc", etc)
    at = root
    parts = [part for part in os.path.normpath(f"/{workdir}").split("/") if part]
    missing = lookup(layers, "/".join(parts)) is None
    for number, part in enumerate(parts if missing else (), 1):
        below = lookup(layers, "/".join(parts[:number]))
        if below is not None and not below.is_directory:
            return
        at = at / part
        at.mkdir(exist_ok=True)
        _imitate(at, below)


def _imitate(path: Path, below: OverlayEntry | None) -> None:
    if below is None:
        path.chmod(0o755)
        return
    found = below.paths[0].lstat()
    with contextlib.suppress(PermissionError):  # without root all is ours anyway
        os.chown(path, found.st_uid, found.st_gid)
    path.chmod(stat.S_IMODE(found.st_mode))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def _copy(source: Path, target: Path) -> None:
    """A part of ``/etc``; links that stay within what a sandbox has are kept as links."""
    try:
        found = source.lstat()
    except OSError:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISLNK(found.st_mode):
        link = os.readlink(source)
        resolved = os.path.normpath(source.parent / link)
        if resolved.startswith(REACHED):
            target.symlink_to(link)
        return
    if stat.S_ISDIR(found.st_mode):
        target.mkdir(exist_ok=True)
        for child in sorted(source.iterdir()):
            _copy(child, target / child.name)
    # What is not for everybody on the host is not for a sandbox.
    elif stat.S_ISREG(found.st_mode) and found.st_mode & stat.S_IROTH and found.st_size <= _LARGEST:
        _write(target, source.read_bytes(), stat.S_IMODE(found.st_mode) & 0o755)


def _write(path: Path, data: bytes, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)
