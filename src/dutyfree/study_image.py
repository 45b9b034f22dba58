"""The study's image: the same software on every substrate.

``build`` makes it from Debian packages with debootstrap and keeps it as a tar archive in the cache.
A Docker engine can pull one instead (``use_adopted``). Substrates use the one that was requested last.

A build runs in its own mount and pid namespaces and ends with this process: neither Ctrl-C nor SIGKILL leaves
a mount or a process behind. The record beside the archive is written last, so an unfinished image is never
used; the next build removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TextIO

import anyio
import anyio.to_thread
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from dutyfree import paths
from dutyfree.contract.errors import Unavailable
from dutyfree.engine.store.locks import try_lock

REFERENCE = "dutyfree/study:latest"
"""The name of the study's image in a Docker engine."""

PACKAGES = (
    "ca-certificates",
    "git",
    "patch",
    "procps",
    "python3",
    "python3-pip",
    "python3-venv",
)
"""Added to Debian's essential packages (dash, coreutils, grep, sed, findutils, diffutils, tar, ...)."""

TOOLS = ("sh", "python3", "git")
"""The programs that an image must have for the tiers."""

ENVIRONMENT = {"LANG": "C.UTF-8", "PIP_NO_CACHE_DIR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

FORMAT = 1
"""Part of the image's key. Increase it when the build changes."""

DROPPED = ("dev", "proc", "sys", "run", "tmp", "var/cache", "var/lib/apt/lists", "var/log")
"""Directories to empty, beside the documentation and translations in usr/share."""

DOCUMENTATION = ("doc", "info", "lintian", "locale", "man")

Progress = Callable[[str], None]

_log = logging.getLogger(__name__)


class StudyImage(msgspec.Struct, frozen=True):
    """A built image in the cache."""

    name: str
    digest: str
    """``sha256:...`` of the tar."""
    size: int
    suite: str
    packages: tuple[str, ...]

    @property
    def tar(self) -> Path:
        return folder() / self.name


def built() -> StudyImage | None:
    """The image that ``build`` would return without building; None if the cache does not have it."""
    try:
        image = msgspec.json.decode(_record().read_bytes(), type=StudyImage)
        return image if image.tar.stat().st_size == image.size else None
    except (OSError, msgspec.DecodeError):
        return None


def chosen() -> bool:
    """Whether ``build`` was called after the last ``use_adopted``, so that its image has precedence."""
    return _choice().exists()


async def build(*, progress: Progress | None = None, force: bool = False, choose: bool = True) -> StudyImage:
    """Build the study's image, unless the cache has it. It takes about a minute, 400 MB and root.

    Substrates use this image from now on, instead of an adopted one; not with ``choose=False``.
    Raises Unavailable, with the remedy, if it cannot be built here.
    """
    image = await _found_or_made(progress or _log.info, force)
    if choose:
        await anyio.to_thread.run_sync(_choose)
    return image


async def _found_or_made(say: Progress, force: bool) -> StudyImage:
    if not force and (image := await anyio.to_thread.run_sync(built)):
        return image
    _require_root()
    async with _lock(say):
        # Another process may have built it while this one waited.
        if not force and (image := await anyio.to_thread.run_sync(built)):
            return image
        await _require_debootstrap(say)
        scratch = await anyio.to_thread.run_sync(_scratch)
        try:
            return await _build(scratch, say)
        except OSError as error:
            raise Unavailable(
                f"the image could not be written to {folder()}: {error.strerror or error}",
                remedy="free some space there (2 GB), or set DUTYFREE_CACHE to another directory",
            ) from error
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(lambda: shutil.rmtree(scratch, ignore_errors=True))


def use_adopted() -> None:
    """From now on use the image that a Docker engine adopted as ``REFERENCE``, until ``build`` is called."""
    _choice().unlink(missing_ok=True)


def folder() -> Path:
    return paths.cache() / "images"


def _record() -> Path:
    spec = msgspec.json.encode([FORMAT, suite(), PACKAGES, DROPPED, DOCUMENTATION, os.uname().machine])
    return folder() / f"study-{hashlib.sha256(spec).hexdigest()[:16]}.json"


def _choice() -> Path:
    return paths.cache() / "image-chosen"


def _choose() -> None:
    try:
        _choice().touch()
    except OSError as error:
        raise Unavailable(
            f"the cache directory {paths.cache()} cannot be written: {error.strerror}",
            remedy="set DUTYFREE_CACHE to a writable directory",
        ) from error


def _require_root() -> None:
    if os.geteuid() != 0:
        raise Unavailable(
            "only root can build the study's image from Debian packages",
            remedy="run `sudo dutyfree image build` with the same DUTYFREE_CACHE, "
            "or `dutyfree image build --from IMAGE` with an image that has python3 and git",
        )


async def _require_debootstrap(say: Progress) -> None:
    if await anyio.to_thread.run_sync(shutil.which, "debootstrap"):
        return
    if await anyio.to_thread.run_sync(shutil.which, "apt-get"):
        say("debootstrap is missing: apt-get install debootstrap")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        # The package lists may be missing or old. Whether debootstrap is there afterwards decides.
        for command in ("update -qq", "install -y -qq --no-install-recommends debootstrap"):
            with contextlib.suppress(Unavailable):
                await _run(["apt-get", *command.split()], say, environment)
    if not await anyio.to_thread.run_sync(shutil.which, "debootstrap"):
        raise Unavailable(
            "debootstrap is missing",
            remedy="install your distribution's debootstrap package, "
            "or use `dutyfree image build --from IMAGE` with an image that has python3 and git",
        )


@contextlib.asynccontextmanager
async def _lock(say: Progress) -> AsyncIterator[None]:
    """Let one builder run at a time. The kernel frees the lock of a killed builder."""
    file = await anyio.to_thread.run_sync(_lock_file)
    with file:
        reported = False
        # Poll, because waiting for the lock would need a thread that cannot be cancelled.
        while not try_lock(file.fileno(), fcntl.LOCK_EX):
            if not reported:
                say("waiting for another build of the image")
                reported = True
            await anyio.sleep(0.2)
        yield


def _lock_file() -> TextIO:
    directory = folder()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return open(directory / "lock", "w")
    except OSError as error:
        raise Unavailable(
            f"the cache directory {directory} cannot be written: {error.strerror}",
            remedy="set DUTYFREE_CACHE to a writable directory",
        ) from error


def _scratch() -> Path:
    """Make a build directory, and remove those of killed builders. We hold the lock."""
    for old in folder().glob("build-*"):
        shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix="build-", dir=folder()))


async def _build(scratch: Path, say: Progress) -> StudyImage:
    root = scratch / "root"
    started = time.monotonic()
    wanted, source, environment = await anyio.to_thread.run_sync(_settings)
    say(f"debootstrap of Debian {wanted} from {source or 'its default mirror'}")
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", wanted, str(root)]
    await _run([*_namespaces(), *command, *([source] if source else [])], say, environment)
    say("packing")
    await anyio.to_thread.run_sync(_clean, root)
    tar = scratch / "image.tar"
    packing = ["tar", "--create", "--sort=name", "--numeric-owner", "--one-file-system"]
    await _run([*packing, f"--file={tar}", f"--directory={root}", "."], say, environment)
    image = await anyio.to_thread.run_sync(_publish, tar, wanted)
    say(f"{image.name}: {image.size >> 20} MB in {time.monotonic() - started:.0f} s")
    return image


def _settings() -> tuple[str, str | None, dict[str, str]]:
    """The suite, mirror and environment of a build on this machine."""
    wanted = suite()
    return wanted, mirror(wanted), _environment()


def _namespaces() -> list[str]:
    """A command prefix that ends the build with this process.

    The death of this process kills unshare, which kills debootstrap, PID 1 of its namespace, and so all. If
    the parent is already another process, this one died before the kernel could be told, and nothing starts.
    """
    dying = ["setpriv", "--pdeathsig=KILL", "sh", "-c", 'test "$PPID" = "$0" && exec "$@"', str(os.getpid())]
    return [*dying, "unshare", "--mount", "--pid", "--fork", "--kill-child=KILL"]


def _environment() -> dict[str, str]:
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    if "http_proxy" not in environment and shutil.which("apt-config"):
        # debootstrap downloads with wget, which does not know apt's proxy.
        said = subprocess.run(
            ["apt-config", "shell", "proxy", "Acquire::http::Proxy"],
            capture_output=True,
            text=True,
            check=False,
        )
        value = "".join(shlex.split(said.stdout)[:1]).removeprefix("proxy=")
        if value and value != "DIRECT":
            environment["http_proxy"] = value
    return environment


async def _run(command: list[str], say: Progress, environment: dict[str, str]) -> None:
    """Run a command and report its lines. Raises Unavailable with the last lines if it fails."""
    last: deque[str] = deque(maxlen=6)
    # With its own session, so that Ctrl-C reaches only us, and we end it.
    process = await anyio.open_process(
        command,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        lines = BufferedByteReceiveStream(process.stdout)
        with contextlib.suppress(anyio.EndOfStream, anyio.IncompleteRead):
            while True:
                line = (await lines.receive_until(b"\n", 1 << 20)).decode(errors="replace")
                last.append(line.removeprefix("I: ").strip())
                say(last[-1])
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
        with anyio.CancelScope(shield=True):
            await process.aclose()
    if process.returncode:
        name = next(word for word in command if word in ("debootstrap", "tar", "apt-get"))
        raise Unavailable(
            f"{name} failed with status {process.returncode}: {' | '.join(last)}",
            remedy="check that the machine reaches its Debian mirror, and that the disk has 2 GB free",
        )


def _clean(root: Path) -> None:
    for name in (*DROPPED, *(f"usr/share/{part}" for part in DOCUMENTATION)):
        directory = root / name
        for path in directory.iterdir() if directory.is_dir() else ():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    (root / "workspace").mkdir()
    (root / "etc/hostname").unlink(missing_ok=True)
    (root / "etc/resolv.conf").unlink(missing_ok=True)  # the builder's own; every substrate writes another


def _publish(scratch: Path, wanted: str) -> StudyImage:
    with scratch.open("rb+") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    record = _record()
    tar = record.with_name(f"{record.stem}-{digest[:16]}.tar")
    image = StudyImage(tar.name, f"sha256:{digest}", scratch.stat().st_size, wanted, PACKAGES)
    scratch.rename(tar)
    half = scratch.with_name(record.name)
    half.write_bytes(msgspec.json.encode(image))
    half.rename(record)
    for old in record.parent.glob(f"{record.stem}-*.tar"):
        if old != tar:
            old.unlink()
    return image


# --- Debian -------------------------------------------------------------------------------------------------

FALLBACK_SUITE = "bookworm"


def suite() -> str:
    """The host's Debian suite, so that bare and the image have the same software; else a fixed suite."""
    release: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/etc/os-release").read_text().splitlines():
            name, _, value = line.partition("=")
            release[name] = value.strip().strip("\"'")
    return (
        release.get("VERSION_CODENAME") or FALLBACK_SUITE if release.get("ID") == "debian" else FALLBACK_SUITE
    )


def mirror(wanted: str, etc: Path = Path("/etc/apt")) -> str | None:
    """The mirror from which apt gets the main component of the suite; None for debootstrap's default."""
    for path in (etc / "sources.list", *sorted((etc / "sources.list.d").glob("*"))):
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError):
            continue
        read = _stanzas(text) if path.suffix == ".sources" else _lines(text)
        # The main list may be in either format.
        for uri, suites, components in (*read, *(_stanzas(text) if path.name == "sources.list" else ())):
            if wanted in suites and "main" in components:
                return _resolved(uri)
    return None


def _lines(text: str) -> Iterator[tuple[str, list[str], list[str]]]:
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if words[:1] != ["deb"]:
            continue
        if len(words) > 1 and words[1].startswith("["):
            end = next((place for place, word in enumerate(words) if word.endswith("]")), len(words))
            words[1 : end + 1] = []
        if len(words) > 3:
            yield words[1], [words[2]], words[3:]


def _stanzas(text: str) -> Iterator[tuple[str, list[str], list[str]]]:
    kept = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for stanza in kept.split("\n\n"):
        fields: dict[str, list[str]] = {}
        name = ""
        for line in stanza.splitlines():
            if line[:1].isspace():
                fields.setdefault(name, []).extend(line.split())
            else:
                name, _, value = line.partition(":")
                name = name.lower()
                fields[name] = value.split()
        if "deb" in fields.get("types", ()) and fields.get("enabled") != ["no"]:
            for uri in fields.get("uris", ()):
                yield uri, fields.get("suites", []), fields.get("components", [])


def _resolved(uri: str) -> str | None:
    """Take the first entry of a mirror list."""
    if uri.startswith("mirror+file:"):
        with contextlib.suppress(OSError, IndexError):
            return Path(uri.removeprefix("mirror+file:")).read_text().split()[0]
        return None
    return uri if uri.partition(":")[0] in ("http", "https", "file") else None
