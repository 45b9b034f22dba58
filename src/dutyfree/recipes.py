"""Stages that most recipes are made of, and recipes from TOML files (docs/recipes.md).

A stage's key is made of its commands and of the files it copies in, so that lock files count by their
contents, and a repository by its commit.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

import msgspec

from dutyfree.contract import Recipe, Stage
from dutyfree.errors import RecipeError, UsageError
from dutyfree.services import Ready, Service

REPOSITORY = "repository"
"""Where a repository lies, relative to the working directory, if nothing else is said."""

LOCKS = ".dutyfree-locks"
"""Where lock files lie, in the working directory, while the command that reads them runs."""

RESOLVE_SECONDS = 60.0

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_URL = re.compile(r"[a-z+]+://|[^/\s]+@[^/\s]+:")
_QUIET = "GIT_TERMINAL_PROMPT=0 GIT_CONFIG_NOSYSTEM=1"


def repository(
    source: str | Path,
    *,
    commit: str | None = None,
    branch: str | None = None,
    path: str = REPOSITORY,
    token: str | None = None,
) -> Stage:
    """A repository: cloned from a URL, or a local directory or archive copied in.

    Of a URL a commit names one content for ever. Of a branch, or of nothing, it is the commit that is there
    when the stage is made, and stays that: ``dutyfree layer ls`` tells it; ``pin`` finds it beforehand.
    ``token`` names a variable of the caller's environment with a password for the server.
    Raises UsageError.
    """
    if isinstance(source, str) and _URL.match(source):
        return _cloned(source, commit, branch, path, token)
    if commit or branch or token:
        raise UsageError(
            f"{source} is copied as it is: it takes no commit, branch or token",
            remedy="clone by a URL, such as file:///path/of/a/repository",
        )
    local = Path(source)
    if local.is_dir():
        return Stage("repository", files={path: local})
    return _unpacked(local, path)


def pin(url: str, branch: str | None = None) -> str:
    """The commit that a branch (the server's default without one) is at now. Blocks. Raises UsageError."""
    wanted = f"refs/heads/{branch}" if branch else "HEAD"
    try:
        done = subprocess.run(
            ["git", "ls-remote", "--", url, wanted],
            capture_output=True,
            text=True,
            timeout=RESOLVE_SECONDS,
            check=False,
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{url} could not be asked: {error}") from error
    if done.returncode:
        raise UsageError(f"{url} could not be asked: {done.stderr.strip()}")
    if not done.stdout:
        raise UsageError(f"{url} has no branch {branch!r}")
    return done.stdout.split()[0]


def _cloned(url: str, commit: str | None, branch: str | None, path: str, token: str | None) -> Stage:
    if commit is not None and not _COMMIT.fullmatch(commit):
        raise UsageError(f"{commit!r} is no whole commit", remedy="give all 40 digits, or a branch")
    server = _server(url)
    git = f"{_QUIET} git"
    if token is not None:
        if not _VARIABLE.fullmatch(token):
            raise UsageError(f"{token!r} is no name of a variable", remedy="name the variable, not the token")
        helper = f'!f() {{ echo username=token; echo "password=${token}"; }}; f'
        # For this server alone: what the repository holds may have git ask others, as .lfsconfig does.
        git += f" -c credential.helper= -c {shlex.quote(f'credential.{server}.helper={helper}')}"
    from_branch = f" --branch {shlex.quote(branch)}" if branch else ""
    there = shlex.quote(path)
    commands = [f"{git} clone --quiet{from_branch} -- {shlex.quote(url)} {there}"]
    if commit is not None:
        # A commit that no branch has can still be asked for, of most servers.
        known = f"git cat-file -e {commit} 2>/dev/null || {git} fetch --quiet origin {commit}"
        how = f"-B {shlex.quote(branch)}" if branch else "--detach"
        commands.append(f"cd {there} && {{ {known}; }} && git checkout --quiet {how} {commit}")
    commands.append(f"git -C {there} rev-parse HEAD")  # what it says is kept with the layer
    return Stage("repository", commands=tuple(commands), secrets=(token,) if token else ())


def _server(url: str) -> str:
    """Who answers for the URL. Raises UsageError for one with a password in it."""
    parts = urlsplit(url)
    if parts.password:
        raise UsageError(
            f"the URL of {parts.hostname} has a password in it, which would be kept with the layer",
            remedy="leave it out, and name a variable that has it: token=",
        )
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _unpacked(archive: Path, path: str) -> Stage:
    if not archive.is_file():
        raise UsageError(f"{archive} is neither a URL, nor a directory or an archive on this machine")
    there, at = shlex.quote(path), f"{LOCKS}/archive"
    if zipfile.is_zipfile(archive):
        unpack = f"python3 -m zipfile -e {at} {there}"
    elif tarfile.is_tarfile(archive):
        unpack = f"tar -xf {at} --no-same-owner -C {there}"
    else:
        raise UsageError(f"{archive} is neither a tar nor a zip archive")
    return Stage(
        "repository", commands=(f"mkdir -p {there} && {unpack} && rm -r {LOCKS}",), files={at: archive}
    )


def pip(
    *packages: str,
    requirements: Path | None = None,
    options: Sequence[str] = (),
    python: str = "python3",
    secrets: Sequence[str] = (),
) -> Stage:
    """Packages of Python, by name or by a file of requirements. Raises UsageError."""
    if not packages and requirements is None:
        raise UsageError("pip has nothing to install", remedy="name packages, or a file of requirements")
    words = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-cache-dir", *options]
    locks = {}
    if requirements is not None:
        locks["requirements.txt"] = requirements
        words += ["-r", f"{LOCKS}/requirements.txt"]
    return command(shlex.join([*words, *packages]), locks=locks, secrets=secrets)


def npm(directory: str = REPOSITORY, *, lock: Path | None = None, secrets: Sequence[str] = ()) -> Stage:
    """What a ``package-lock.json`` says, for a directory of the sandbox; the lock, if given, is put there."""
    there = shlex.quote(directory)
    cache = f'"$here"/{LOCKS}/cache'
    install = f"here=$PWD; cd {there} && npm ci --no-audit --no-fund --cache {cache} && rm -rf {cache}"
    if lock is None:
        return command(install, secrets=secrets)
    put = f"cp {LOCKS}/package-lock.json {there}"
    return command(put, install, locks={"package-lock.json": lock}, secrets=secrets)


def apt(*packages: str) -> Stage:
    """Packages of Debian and its kin, ``name`` or ``name=version``; the image has apt. Raises UsageError."""
    if not packages:
        raise UsageError("apt has nothing to install", remedy="name packages")
    install = shlex.join(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages])
    quiet = "export DEBIAN_FRONTEND=noninteractive"
    tidy = "apt-get clean && rm -rf /var/lib/apt/lists/*"  # the layer needs neither
    return command(f"{quiet}; apt-get update -qq && {install} && {tidy}")


def command(
    *commands: str,
    locks: Mapping[str, Path] | None = None,
    secrets: Sequence[str] = (),
) -> Stage:
    """Any commands that install something; ``locks`` are files that they find in ``LOCKS`` meanwhile."""
    files = {f"{LOCKS}/{name}": path for name, path in (locks or {}).items()}
    tidy = (f"rm -rf {LOCKS}",) if files else ()
    return Stage("dependencies", commands=(*commands, *tidy), files=files, secrets=tuple(secrets))


def python(
    *modules: str,
    name: str = "python",
    python: str = "python3",
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    seconds: float = 60.0,
) -> Service:
    """An interpreter that has imported these modules, and forks for each ``sandbox.call(name, arguments)``.

    Not for the code under test: a module that has changed since is not used (docs/warm-processes.md).
    """
    return Service(
        name=name,
        command=(python, "-c", _zygote(), *modules),
        ready=Ready(line="ready\n"),
        seconds=seconds,
        cwd=cwd,
        env=dict(env or {}),
        forks=True,
    )


@functools.cache
def _zygote() -> str:
    return Path(__file__).with_name("zygote.py").read_text(encoding="utf-8")


# --- From a file ---------------------------------------------------------------------------------------


class _Repository(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="repository"
):
    source: str
    commit: str | None = None
    branch: str | None = None
    path: str = REPOSITORY
    token: str | None = None

    def stage(self, root: Path) -> Stage:
        source = self.source if _URL.match(self.source) else root / self.source
        return repository(source, commit=self.commit, branch=self.branch, path=self.path, token=self.token)


class _Pip(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="pip"):
    packages: tuple[str, ...] = ()
    requirements: str | None = None
    options: tuple[str, ...] = ()
    python: str = "python3"
    secrets: tuple[str, ...] = ()

    def stage(self, root: Path) -> Stage:
        file = None if self.requirements is None else root / self.requirements
        return pip(
            *self.packages, requirements=file, options=self.options, python=self.python, secrets=self.secrets
        )


class _Npm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="npm"):
    directory: str = REPOSITORY
    lock: str | None = None
    secrets: tuple[str, ...] = ()

    def stage(self, root: Path) -> Stage:
        return npm(self.directory, lock=None if self.lock is None else root / self.lock, secrets=self.secrets)


class _Apt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="apt"):
    packages: tuple[str, ...]

    def stage(self, root: Path) -> Stage:
        del root
        return apt(*self.packages)


class _Dependencies(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="dependencies"
):
    commands: tuple[str, ...]
    locks: dict[str, str] = {}
    secrets: tuple[str, ...] = ()

    def stage(self, root: Path) -> Stage:
        locks = {name: root / path for name, path in self.locks.items()}
        return command(*self.commands, locks=locks, secrets=self.secrets)


class _Files(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="files"):
    files: dict[str, str]

    def stage(self, root: Path) -> Stage:
        return Stage("files", files={name: root / path for name, path in self.files.items()})


class _Setup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="setup"):
    commands: tuple[str, ...]
    secrets: tuple[str, ...] = ()

    def stage(self, root: Path) -> Stage:
        del root
        return Stage("setup", commands=self.commands, secrets=self.secrets)


_Described: TypeAlias = _Repository | _Pip | _Npm | _Apt | _Dependencies | _Files | _Setup


class _Python(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    modules: tuple[str, ...]
    name: str = "python"
    python: str = "python3"
    cwd: str | None = None
    env: dict[str, str] = {}
    seconds: float = 60.0

    def service(self) -> Service:
        return python(
            *self.modules,
            name=self.name,
            python=self.python,
            cwd=self.cwd,
            env=self.env,
            seconds=self.seconds,
        )


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    image: str | None = None
    stages: tuple[_Described, ...] = ()
    services: tuple[Service, ...] = ()
    python: tuple[_Python, ...] = ()


def load(path: Path) -> Recipe:
    """A recipe from a TOML file; paths in it start at its directory. Raises UsageError."""
    remedy = "docs/recipes.md describes recipes"
    try:
        described = msgspec.toml.decode(path.read_bytes(), type=_File)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: {error}", remedy=remedy) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}", remedy=remedy) from error
    stages = []
    for number, one in enumerate(described.stages, 1):
        try:
            stages.append(one.stage(path.parent))
        except UsageError as error:
            raise UsageError(f"{path}: stage {number}: {error.message}", remedy=error.remedy) from error
        for source in stages[-1].files.values():
            if not os.path.lexists(source):
                raise UsageError(f"{path}: stage {number}: there is no {source}")
    services = (*described.services, *(one.service() for one in described.python))
    try:
        return Recipe(described.image, tuple(stages), services)
    except RecipeError as error:
        raise UsageError(f"{path}: {error.message}", remedy=error.remedy) from error
