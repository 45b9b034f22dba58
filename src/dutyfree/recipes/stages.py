"""Functions that make common stages: clone a repository, install packages (docs/recipes.md).

The content key of a stage includes its commands and the contents of its files. So a lock file counts by its
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
from urllib.parse import urlsplit

from dutyfree.contract import Stage
from dutyfree.contract.errors import UsageError
from dutyfree.contract.services import Ready, Service

REPOSITORY = "repository"
"""The default directory of a repository, relative to the working directory."""

LOCKS = ".dutyfree-locks"
"""The directory, in the working directory, in which a command finds its lock files."""

RESOLVE_SECONDS = 60.0

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
URL = re.compile(r"[a-z+]+://|[^/\s]+@[^/\s]+:")
_QUIET = "GIT_TERMINAL_PROMPT=0 GIT_CONFIG_NOSYSTEM=1"


_UNZIP = """
import os, stat, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as archive:
    for member in archive.infolist():
        member.filename = "/".join(member.filename.split("/")[int(sys.argv[3]):])
        if not member.filename:
            continue
        mode = member.external_attr >> 16
        if stat.S_ISLNK(mode):
            path = os.path.join(sys.argv[2], member.filename)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(archive.read(member), path)
        else:
            path = archive.extract(member, sys.argv[2])
            if stat.S_ISREG(mode):
                os.chmod(path, mode & 0o777)
"""
"""Unpacks a zip archive with modes and links, which ``python -m zipfile`` loses."""


def repository(
    source: str | Path,
    *,
    commit: str | None = None,
    branch: str | None = None,
    path: str = REPOSITORY,
    token: str | None = None,
    strip: int = 0,
) -> Stage:
    """Clone a repository from a URL, or copy a local directory or archive.

    A commit fixes the contents. With a branch, or without either, the stage has the commit of the time when
    it was built, until its layer is removed: ``dutyfree layer ls`` shows it, and ``pin`` finds it in advance.
    ``token`` names a variable of the caller's environment with a password for the server. ``strip`` removes
    that many leading directories from the paths of an archive, as tar's --strip-components does.
    Raises UsageError.
    """
    if not isinstance(strip, int) or strip < 0:
        raise UsageError(f"strip must be a number of directories ≥ 0, not {strip!r}")
    if isinstance(source, str) and URL.match(source):
        _refuse_strip(source, strip)
        return _cloned(source, commit, branch, path, token)
    if commit or branch or token:
        raise UsageError(
            f"{source} is a local path, which takes no commit, branch or token",
            remedy="add a stage after it: checkout(commit)",
        )
    local = Path(source)
    if local.is_dir():
        _refuse_strip(source, strip)
        return Stage("repository", files={path: local})
    return _unpacked(local, path, strip)


def _refuse_strip(source: str | Path, strip: int) -> None:
    if strip:
        raise UsageError(f"{source} is not an archive: only an archive takes strip")


def pin(url: str, branch: str | None = None) -> str:
    """The current commit of a branch, or of the server's default branch. Blocks. Raises UsageError."""
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
        raise UsageError(f"git cannot reach {url}: {error}") from error
    if done.returncode:
        raise UsageError(f"git cannot reach {url}: {done.stderr.strip()}")
    if not done.stdout:
        raise UsageError(f"{url} has no branch {branch!r}")
    return done.stdout.split()[0]


def _cloned(url: str, commit: str | None, branch: str | None, path: str, token: str | None) -> Stage:
    server = shlex.quote(_server(url))
    from_branch = f" --branch {shlex.quote(branch)}" if branch else ""
    there = shlex.quote(path)
    commands = [f"{_git(token, server)} clone --quiet{from_branch} -- {shlex.quote(url)} {there}"]
    if commit is not None:
        how = f"-B {shlex.quote(branch)}" if branch else "--detach"
        commands.append(_at(commit, there, _git(token, server), how))
    commands.append(f"git -C {there} rev-parse HEAD")  # the commit is kept with the layer
    return Stage("repository", commands=tuple(commands), secrets=(token,) if token else ())


def _server(url: str) -> str:
    """The server of a URL. Raises UsageError if the URL has a password."""
    parts = urlsplit(url)
    if parts.password:
        raise UsageError(
            f"the URL of {parts.hostname} contains a password, which would be kept with the layer",
            remedy="remove it, and name a variable that has it: token=",
        )
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _git(token: str | None, server: str) -> str:
    """A git command without prompts that gives the password in a variable to one server (a shell word).

    It gives the password to no other server, because files such as .lfsconfig make git ask others.
    Raises UsageError.
    """
    git = f"{_QUIET} git"
    if token is None:
        return git
    if not _VARIABLE.fullmatch(token):
        raise UsageError(
            f"{token!r} is not the name of a variable", remedy="give the name of the variable, not the token"
        )
    helper = f'.helper=!f() {{ echo username=token; echo "password=${token}"; }}; f'
    return f"{git} -c credential.helper= -c credential.{server}{shlex.quote(helper)}"


_ORIGIN = '"$(git remote get-url origin | sed -E "s,^([a-z+]+://)([^/@]*@)?([^/]*).*,\\1\\3,")"'
"""Shell code for the server that the current repository was cloned from."""


def _at(commit: str, there: str, git: str, how: str) -> str:
    """A command that checks out a commit. Raises UsageError."""
    if not _COMMIT.fullmatch(commit):
        raise UsageError(f"{commit!r} is not a whole commit id", remedy="give all 40 digits, or a branch")
    # Most servers also give commits that are on no branch.
    known = f"git cat-file -e {commit} 2>/dev/null || {git} fetch --quiet origin {commit}"
    return f"cd {there} && {{ {known}; }} && git checkout --quiet {how} {commit}"


def checkout(
    commit: str, *, path: str = REPOSITORY, token: str | None = None, only_past: bool = False
) -> Stage:
    """Check out a commit in the repository of an earlier stage. Recipes of many commits share one clone.

    ``only_past`` removes remotes, and branches, tags and objects that are not ancestors of the commit, so
    that the agent cannot find the solution of a task in later commits. Raises UsageError.
    """
    there = shlex.quote(path)
    commands = [_at(commit, there, _git(token, _ORIGIN), "--force --detach")]
    if only_past:
        commands.append(f"cd {there} && {_ONLY_PAST}")
    commands.append(f"git -C {there} rev-parse HEAD")
    return Stage("repository", commands=tuple(commands), secrets=(token,) if token else ())


_ONLY_PAST = " && ".join(
    (
        "git remote | xargs -r -n 1 git remote remove",
        # A reference that is listed once is not an ancestor of the commit.
        "{ git for-each-ref --merged HEAD --format='%(refname)'; git for-each-ref --format='%(refname)'; }"
        " | sort | uniq -u | sed 's/^/delete /' | git update-ref --stdin",
        'rm -f "$(git rev-parse --git-dir)/FETCH_HEAD" "$(git rev-parse --git-dir)/ORIG_HEAD"',
        "git reflog expire --expire=now --expire-unreachable=now --all",
        "git gc --quiet --prune=now",
    )
)


def _unpacked(archive: Path, path: str, strip: int) -> Stage:
    if not archive.is_file():
        raise UsageError(f"{archive} is neither a URL nor a directory or an archive on this machine")
    there, at = shlex.quote(path), f"{LOCKS}/archive"
    if zipfile.is_zipfile(archive):
        unpack = shlex.join(["python3", "-c", _UNZIP, at, path, str(strip)])
    elif tarfile.is_tarfile(archive):
        dropped = f" --strip-components={strip}" if strip else ""
        unpack = f"tar -xf {at} --no-same-owner{dropped} -C {there}"
    else:
        raise UsageError(f"{archive} is neither a tar nor a zip archive")
    return Stage(
        "repository", commands=(f"mkdir -p {there} && {unpack} && rm -r {LOCKS}",), files={at: archive}
    )


def pip(
    *packages: str,
    requirements: str | Path | None = None,
    options: Sequence[str] = (),
    python: str = "python3",
    secrets: Sequence[str] = (),
) -> Stage:
    """Install Python packages, by name or from a requirements file. Raises UsageError."""
    if not packages and requirements is None:
        raise UsageError("pip has nothing to install", remedy="name packages, or a requirements file")
    if isinstance(options, str):
        raise UsageError(
            f"options must be a list of strings, not {options!r}", remedy=f"write options=({options!r},)"
        )
    words = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-cache-dir", *options]
    locks: dict[str, str | Path] = {}
    if requirements is not None:
        locks["requirements.txt"] = requirements
        words += ["-r", f"{LOCKS}/requirements.txt"]
    return command(_joined([*words, *packages]), locks=locks, secrets=secrets)


def npm(directory: str = REPOSITORY, *, lock: str | Path | None = None, secrets: Sequence[str] = ()) -> Stage:
    """Run ``npm ci`` in a directory of the sandbox. ``lock`` is copied there as ``package-lock.json``."""
    there = shlex.quote(directory)
    cache = f'"$here"/{LOCKS}/cache'
    install = f"here=$PWD; cd {there} && npm ci --no-audit --no-fund --cache {cache} && rm -rf {cache}"
    if lock is None:
        return command(install, secrets=secrets)
    put = f"cp {LOCKS}/package-lock.json {there}"
    return command(put, install, locks={"package-lock.json": lock}, secrets=secrets)


def apt(*packages: str) -> Stage:
    """Install Debian packages, ``name`` or ``name=version``. The image must have apt. Raises UsageError."""
    if not packages:
        raise UsageError("apt has nothing to install", remedy="name packages")
    install = _joined(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages])
    quiet = "export DEBIAN_FRONTEND=noninteractive"
    tidy = "apt-get clean && rm -rf /var/lib/apt/lists/*"  # keep the layer small
    return command(f"{quiet}; apt-get update -qq && {install} && {tidy}")


def command(
    *commands: str,
    locks: Mapping[str, str | Path] | None = None,
    secrets: Sequence[str] = (),
) -> Stage:
    """Run any commands that install something. They find the files ``locks`` in the directory ``LOCKS``."""
    files = {f"{LOCKS}/{name}": Path(path) for name, path in (locks or {}).items()}
    tidy = (f"rm -rf {LOCKS}",) if files else ()
    return Stage("dependencies", commands=(*commands, *tidy), files=files, secrets=secrets)  # type: ignore[arg-type]


def _joined(words: Sequence[str]) -> str:
    """Quote words for the shell. Raises UsageError for a word that is not a string."""
    for word in words:
        if not isinstance(word, str):
            raise UsageError(
                f"{word!r} must be a string", remedy="pass each name as its own argument, or *names"
            )
    return shlex.join(words)


def python(
    *modules: str,
    name: str = "python",
    python: str = "python3",
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    seconds: float = 60.0,
) -> Service:
    """A service: an interpreter that imports these modules once, and forks for each ``sandbox.call``.

    Do not preload the code under test: the fork does not see later changes of a module
    (docs/warm-processes.md).
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
