"""The attrs fixture: a repository with a real bug, its fix, and what its tests need.

attrs 25.2.0 with the tests of 25.3.0 has one failing test, and one line of ``src/attr/_make.py`` that
differs between the two releases is its fix. Both come from the package index as source archives; the
repository is made from them with fixed authors and dates, so that its commits have the same hashes
everywhere. Nothing of attrs is stored here: the patch is derived from the archives.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import inspect
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from dutyfree.contract.recipe import tree_digest
from dutyfree.workloads import downloads
from dutyfree.workloads.downloads import BUGGY, FIXED, SOURCES, FixtureError, Tree

COMMIT = "ebfa157b16ea6e2f42ec44ed1c9e4445ed90ca48"
"""The buggy commit, the head of ``main``."""

PATCHED = "src/attr/_make.py"
MANIFEST = "fixture.json"

GIT_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}
"""Nobody's git settings but the repository's own."""

TRUSTING = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
"""A repository that was copied may belong to someone else; git is to work on it all the same."""

Progress = Callable[[str], object]


class Patch(msgspec.Struct, frozen=True):
    """The fix, as an agent would apply it and as a reviewer would read it."""

    path: str
    old: bytes
    """Stands in the file exactly once."""
    new: bytes
    diff: str
    """In unified form, for ``git apply``."""


class Fixture(msgspec.Struct, frozen=True, kw_only=True):
    root: Path
    commit: str
    patch: Patch
    versions: dict[str, str]
    """attrs before and after, and the distributions in the wheelhouse."""

    @property
    def served(self) -> Path:
        """The directory for a git server to serve; it holds ``attrs.git``."""
        return self.root / "served"

    @property
    def repository(self) -> Path:
        """The bare repository."""
        return self.served / "attrs.git"

    @property
    def checkout(self) -> Path:
        """A repository with its working tree at the buggy commit, the same bytes wherever it is made."""
        return self.root / "attrs"

    @property
    def wheels(self) -> Path:
        return self.root / "wheels"


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    digest: str
    patch: Patch
    versions: dict[str, str]


def build(cache: Path, progress: Progress | None = None) -> Fixture:
    """Give the fixture under ``cache``, made now unless it stands there whole. Blocks for seconds.

    Safe against other builders, and against the death of any of them: the fixture appears under its
    name only when it is complete, and is verified before it is used again. Raises FixtureError.
    """
    say = progress or (lambda _message: None)
    root = cache / f"fixture-{_key()}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / "fixture.lock", say):
            for stale in cache.glob("fixture-making-*"):  # left by a builder that was killed
                shutil.rmtree(stale, ignore_errors=True)
            fixture = _load(root)
            if fixture is None:
                making = Path(tempfile.mkdtemp(prefix="fixture-making-", dir=cache))
                try:
                    _make(making, say)
                    shutil.rmtree(root, ignore_errors=True)
                    making.rename(root)
                finally:
                    shutil.rmtree(making, ignore_errors=True)
                fixture = _load(root)
    except OSError as error:
        raise FixtureError(
            f"the attrs fixture cannot be made in {cache}: {error.strerror or error}",
            remedy="free some space or name another directory in DUTYFREE_CACHE",
        ) from error
    if fixture is None:
        raise FixtureError(
            f"the attrs fixture in {root} changed while it was made",
            remedy="check the disk, or name another directory in DUTYFREE_CACHE",
        )
    return fixture


def _key() -> str:
    """Changes whenever what makes it, the pins or the way of digesting do.

    So an old fixture is never taken for a new one, and never replaced while an older dutyfree uses it.
    """
    makers = (Path(__file__), Path(downloads.__file__), downloads.WHEELS)
    parts = (*(path.read_bytes() for path in makers), inspect.getsource(tree_digest).encode())
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


@contextlib.contextmanager
def _lock(path: Path, say: Progress) -> Iterator[None]:
    """Hold the lock; the kernel lets go of it should we die."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process to make the attrs fixture")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _load(root: Path) -> Fixture | None:
    """The fixture at ``root`` if it is there and whole: a digest of its few megabytes takes some 20 ms."""
    try:
        manifest = msgspec.json.decode((root / MANIFEST).read_bytes(), type=_Manifest)
        if manifest.digest != _digest(root):
            return None
    except (OSError, msgspec.MsgspecError):
        return None
    return Fixture(root=root, commit=COMMIT, patch=manifest.patch, versions=manifest.versions)


def _digest(root: Path) -> str:
    return hashlib.sha256(
        b"".join(tree_digest(root / part) for part in ("served", "attrs", "wheels"))
    ).hexdigest()


def _make(root: Path, say: Progress) -> None:
    say("downloading attrs and its test dependencies")
    with tempfile.TemporaryDirectory(prefix="downloads-", dir=root) as scratch, ThreadPoolExecutor() as pool:
        sources = [pool.submit(downloads.source, Path(scratch, version), version) for version in SOURCES]
        wheels = pool.submit(downloads.wheels, root / "wheels")
        before, after = (source.result() for source in sources)
        pins = wheels.result()
    say("making the attrs repository")
    _repositories(root, before, after)
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)  # whatever the umask: modes are part of a recipe's key
    manifest = _Manifest(
        digest=_digest(root),
        patch=derive_patch(PATCHED, before[PATCHED], after[PATCHED]),
        versions={"attrs before": BUGGY, "attrs after": FIXED, **pins},
    )
    (root / MANIFEST).write_bytes(msgspec.json.encode(manifest))


# --- The repository --------------------------------------------------------------------------------


def _repositories(root: Path, before: Tree, after: Tree) -> None:
    """Make the bare repository and the checkout, of one history."""
    history = _history(before, after)
    bare, checkout = root / "served" / "attrs.git", root / "attrs"
    for directory, kind in ((bare, ["--bare"]), (checkout, [])):
        directory.mkdir(parents=True)
        _git(
            directory,
            "init",
            "--quiet",
            "--template=",
            "--object-format=sha1",
            "--initial-branch=main",
            *kind,
        )
        quiet = ("-c", "core.logAllRefUpdates=false", "-c", "fastimport.unpackLimit=1")
        _git(directory, *quiet, "fast-import", "--quiet", stdin=history)
        commit = _git(directory, "rev-parse", "refs/heads/main").decode().strip()
        if commit != COMMIT:
            raise FixtureError(
                f"the attrs repository came out as commit {commit}, expected {COMMIT}",
                remedy="check which git is on the PATH",
            )
    # A hosted repository is packed well: its server then has next to nothing to compute for a clone.
    _git(bare, "-c", "pack.threads=1", "repack", "-adfq", "--write-bitmap-index")
    # An index read from the tree has no times or inodes in it: the same bytes wherever it is made, and
    # git looks at the files themselves at its first status.
    _git(checkout, "read-tree", "HEAD")
    _git(checkout, "checkout-index", "--all")


def _history(before: Tree, after: Tree) -> bytes:
    """Four commits for git fast-import; the last has the sources with the bug and the test that shows it."""
    tests = {path: data for path, data in before.items() if path.startswith("tests/")}
    source = {path: data for path, data in before.items() if path.startswith("src/")}
    rest = {path: data for path, data in before.items() if path not in tests and path not in source}
    wanted = {
        path: data for path, data in after.items() if path.startswith("tests/") and before.get(path) != data
    }
    commits = (
        ("Add the licence, the settings and the documentation", rest),
        (f"Add attrs {BUGGY}", source),
        (f"Add the tests of attrs {BUGGY}", tests),
        ("Test that a field_transformer may be a generator", wanted),
    )
    stream = bytearray()
    for number, (subject, files) in enumerate(commits):
        moment = 1_741_773_600 + number * 3600  # 2025-03-12 10:00 UTC and the hours after
        person = f"dutyfree fixture <fixture@dutyfree.invalid> {moment} +0000"
        stream += f"commit refs/heads/main\nauthor {person}\ncommitter {person}\n".encode()
        stream += _data(f"{subject}\n".encode())
        for path, content in sorted(files.items()):
            stream += f"M 100644 inline {path}\n".encode() + _data(content)
    return bytes(stream) + b"done\n"


def _data(content: bytes) -> bytes:
    return b"data %d\n%b\n" % (len(content), content)


def _git(directory: Path, *arguments: str, stdin: bytes = b"") -> bytes:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=directory,
            input=stdin,
            capture_output=True,
            env={**inherited, **GIT_ENVIRONMENT},
            check=False,
        )
    except FileNotFoundError:
        raise FixtureError("git was not found", remedy="install git") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise FixtureError(
            f"git {' '.join(arguments)} failed: {said}", remedy="check which git is on the PATH"
        )
    return done.stdout


def derive_patch(path: str, before: bytes, after: bytes) -> Patch:
    """The one change between two versions of a file, with as much around it as makes it unique."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    changes = [opcode for opcode in matcher.get_opcodes() if opcode[0] != "equal"]
    if len(changes) != 1:
        raise FixtureError(f"{path}: expected one change between the releases, found {len(changes)}")
    _, old_start, old_end, new_start, new_end = changes[0]
    while True:
        lost, gained = b"".join(old[old_start:old_end]), b"".join(new[new_start:new_end])
        if before.count(lost) == 1 and before.replace(lost, gained) == after:
            break
        if not old_start:
            raise FixtureError(f"{path}: the change cannot be told from the rest of the file")
        old_start, new_start = old_start - 1, new_start - 1
    diff = difflib.unified_diff(
        before.decode().splitlines(keepends=True),
        after.decode().splitlines(keepends=True),
        f"a/{path}",
        f"b/{path}",
    )
    return Patch(path=path, old=lost, new=gained, diff="".join(diff))
