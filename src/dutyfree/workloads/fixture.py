"""A fixture: the repository of a project with a real bug, its fix, and the dependencies of its tests.

A release of the project fails one test of its next release, and the fix is one changed line. Both releases
come from the package index as source archives. The repository is built from them with fixed authors and
dates, so its commits have the same hashes everywhere. dutyfree contains no code of the project: the patch is
the difference between the archives.
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

from dutyfree.contract.stage import tree_digest
from dutyfree.workloads import downloads
from dutyfree.workloads import project as project_module
from dutyfree.workloads.downloads import FixtureError, Tree
from dutyfree.workloads.project import ATTRS, Project

MANIFEST = "fixture.json"

GIT_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}
"""Ignore the git settings of the user and of the machine."""

GIT_TRUST_ALL = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
"""Let git work on a repository that belongs to another user, as a copied one may."""

Progress = Callable[[str], object]


class Patch(msgspec.Struct, frozen=True):
    """The fix: as an edit, and as a diff."""

    path: str
    old: bytes
    """Occurs exactly once in the file."""
    new: bytes
    diff: str
    """A unified diff for ``git apply``."""


class Fixture(msgspec.Struct, frozen=True, kw_only=True):
    root: Path
    project: Project
    patch: Patch
    versions: dict[str, str]
    """Versions of the project before and after, and of the wheels."""

    @property
    def served(self) -> Path:
        """The directory that the git server serves. It contains ``repository``."""
        return self.root / "served"

    @property
    def repository(self) -> Path:
        """The bare repository."""
        return self.served / f"{self.project.name}.git"

    @property
    def checkout(self) -> Path:
        """A repository with a working tree at the buggy commit: the same bytes on every machine."""
        return self.root / self.project.name

    @property
    def wheels(self) -> Path:
        return self.root / "wheels"


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    digest: str
    patch: Patch
    versions: dict[str, str]


def build(cache: Path, progress: Progress | None = None, project: Project = ATTRS) -> Fixture:
    """Return the fixture of a project in ``cache``; build it if it is missing or damaged. Blocks for seconds.

    Several processes may build at the same time, and may be killed: the fixture gets its name only when it is
    complete, and is verified before each use. Raises FixtureError.
    """
    say = progress or (lambda _message: None)
    root = cache / f"fixture-{project.name}-{_key()}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / "fixture.lock", say):
            for stale in cache.glob("fixture-making-*"):  # left by a builder that was killed
                shutil.rmtree(stale, ignore_errors=True)
            fixture = _load(root, project)
            if fixture is None:
                making = Path(tempfile.mkdtemp(prefix="fixture-making-", dir=cache))
                try:
                    _make(making, project, say)
                    shutil.rmtree(root, ignore_errors=True)
                    making.rename(root)
                finally:
                    shutil.rmtree(making, ignore_errors=True)
                fixture = _load(root, project)
    except OSError as error:
        raise FixtureError(
            f"the {project.name} fixture cannot be built in {cache}: {error.strerror or error}",
            remedy="free some space, or set DUTYFREE_CACHE to another directory",
        ) from error
    if fixture is None:
        raise FixtureError(
            f"the {project.name} fixture in {root} changed while it was built",
            remedy="check the disk, or set DUTYFREE_CACHE to another directory",
        )
    return fixture


def _key() -> str:
    """A hash of the code that builds the fixture, the pinned versions and the digest function.

    So another version of dutyfree has its own fixture, and neither replaces the other's.
    """
    makers = (Path(__file__), Path(downloads.__file__), Path(project_module.__file__), downloads.WHEELS)
    parts = (*(path.read_bytes() for path in makers), inspect.getsource(tree_digest).encode())
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


@contextlib.contextmanager
def _lock(path: Path, say: Progress) -> Iterator[None]:
    """Hold the lock. The kernel releases it if this process dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process to build a fixture")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _load(root: Path, project: Project) -> Fixture | None:
    """The fixture at ``root``; None if it is missing or damaged. The digest takes about 20 ms."""
    try:
        manifest = msgspec.json.decode((root / MANIFEST).read_bytes(), type=_Manifest)
        if manifest.digest != _digest(root, project):
            return None
    except (OSError, msgspec.MsgspecError):
        return None
    return Fixture(root=root, project=project, patch=manifest.patch, versions=manifest.versions)


def _digest(root: Path, project: Project) -> str:
    parts = ("served", project.name, "wheels")
    return hashlib.sha256(b"".join(tree_digest(root / part) for part in parts)).hexdigest()


def _make(root: Path, project: Project, say: Progress) -> None:
    say(f"downloading {project.name} and its test dependencies")
    releases = (project.buggy, project.fixed)
    with tempfile.TemporaryDirectory(prefix="downloads-", dir=root) as scratch, ThreadPoolExecutor() as pool:
        sources = [
            pool.submit(downloads.source, Path(scratch, version), project, version) for version in releases
        ]
        wheels = pool.submit(downloads.wheels, root / "wheels")
        before, after = (source.result() for source in sources)
        pins = wheels.result()
    say(f"building the {project.name} repository")
    _repositories(root, project, before, after)
    for path in (root, *root.rglob("*")):
        path.chmod(
            0o755 if path.is_dir() else 0o644
        )  # independent of the umask: modes are part of the content key
    manifest = _Manifest(
        digest=_digest(root, project),
        patch=derive_patch(project.patched, before[project.patched], after[project.patched]),
        versions={f"{project.name} before": project.buggy, f"{project.name} after": project.fixed, **pins},
    )
    (root / MANIFEST).write_bytes(msgspec.json.encode(manifest))


# --- The repository --------------------------------------------------------------------------------


def _repositories(root: Path, project: Project, before: Tree, after: Tree) -> None:
    """Create the bare repository and the checkout, with the same history."""
    history = _history(project, before, after)
    bare, checkout = root / "served" / f"{project.name}.git", root / project.name
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
        if commit != project.commit:
            raise FixtureError(
                f"the head of the {project.name} repository is commit {commit}, expected {project.commit}",
                remedy="check which git is on the PATH",
            )
    # Pack it as hosted repositories are packed, so that the server has little to compute for a clone.
    _git(bare, "-c", "pack.threads=1", "repack", "-adfq", "--write-bitmap-index")
    # An index that is read from the tree contains no times or inodes: it has the same bytes on every
    # machine, and the first git status checks the files themselves.
    _git(checkout, "read-tree", "HEAD")
    _git(checkout, "checkout-index", "--all")


def _history(project: Project, before: Tree, after: Tree) -> bytes:
    """Four commits for git fast-import. The last one adds the test that shows the bug."""
    tests = {path: data for path, data in before.items() if project.is_test(path)}
    source = {path: data for path, data in before.items() if project.is_source(path)}
    rest = {path: data for path, data in before.items() if path not in tests and path not in source}
    new_tests = {
        path: data
        for path, data in after.items()
        if path.startswith(project.new_tests) and before.get(path) != data
    }
    commits = (
        ("Add the licence, the settings and the documentation", rest),
        (f"Add {project.name} {project.buggy}", source),
        (f"Add the tests of {project.name} {project.buggy}", tests),
        (project.subject, new_tests),
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
        message = done.stderr.decode(errors="replace").strip()
        raise FixtureError(
            f"git {' '.join(arguments)} failed: {message}", remedy="check which git is on the PATH"
        )
    return done.stdout


def derive_patch(path: str, before: bytes, after: bytes) -> Patch:
    """The change between two versions of a file, with enough lines before it to be unique."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    changes = [opcode for opcode in matcher.get_opcodes() if opcode[0] != "equal"]
    if len(changes) != 1:
        raise FixtureError(f"{path}: expected one change between the releases, found {len(changes)}")
    _, old_start, old_end, new_start, new_end = changes[0]
    while True:
        removed, added = b"".join(old[old_start:old_end]), b"".join(new[new_start:new_end])
        if before.count(removed) == 1 and before.replace(removed, added) == after:
            break
        if not old_start:
            raise FixtureError(f"{path}: the changed lines occur more than once in the file")
        old_start, new_start = old_start - 1, new_start - 1
    diff = difflib.unified_diff(
        before.decode().splitlines(keepends=True),
        after.decode().splitlines(keepends=True),
        f"a/{path}",
        f"b/{path}",
    )
    return Patch(path=path, old=removed, new=added, diff="".join(diff))
