"""Running a part of a test as somebody who is nobody on this host."""

from __future__ import annotations

import compileall
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("anyio", "msgspec", "sniffio", "idna", "typing_extensions.py", "exceptiongroup")
USER = 54_321
"""Has no entry anywhere: no name, no home, no range of ids."""
RANGE = 7_000_000
"""First of the 65,536 ids that the same user has where a test asks for a range."""


@functools.cache
def _copy() -> Path:
    """The package and what it needs, where everybody may read it."""
    target = Path(tempfile.mkdtemp(prefix="dutyfree-test-", dir="/tmp"))
    target.chmod(0o755)
    shutil.copytree(ROOT / "src/dutyfree", target / "dutyfree", ignore=shutil.ignore_patterns("__pycache__"))
    for module in (sys.modules["anyio"], sys.modules["msgspec"]):
        site = Path(module.__file__ or "").parents[1]
        for name in PACKAGES:
            if (site / name).is_dir():
                shutil.copytree(site / name, target / name, dirs_exist_ok=True)
            elif (site / name).exists():
                shutil.copy(site / name, target / name)
    compileall.compile_dir(target, quiet=1)
    subprocess.run(["chmod", "-R", "a+rX", str(target)], check=True)
    return target


def remove() -> None:
    if _copy.cache_info().currsize:
        shutil.rmtree(_copy(), ignore_errors=True)
        _copy.cache_clear()
        _with_range.cache_clear()


@functools.cache
def _interpreter() -> str:
    """A Python of our version that everybody may run; empty if there is none."""
    for path in (sys.executable, shutil.which("python3", path="/usr/local/bin:/usr/bin") or ""):
        code = "import sys; sys.exit(sys.version_info[:2] != " + repr(tuple(sys.version_info[:2])) + ")"
        if path and subprocess.run([*_as_user(), path, "-c", code], capture_output=True).returncode == 0:
            return path
    return ""


def _as_user() -> list[str]:
    return ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]


@functools.cache
def _with_range() -> list[str]:
    """Runs a command that sees a name and a range of ids for the user in /etc. Others see what was there."""
    for name in ("newuidmap", "newgidmap"):
        if not Path(f"/usr/bin/{name}").exists():
            pytest.skip(f"no {name}; to enable it: apt-get install uidmap")
    lists = _copy() / "etc"
    lists.mkdir()
    account = f"dutyfree-test:x:{USER}:{USER}::/nonexistent:/bin/sh\n"
    (lists / "passwd").write_text(Path("/etc/passwd").read_text() + account)
    for name in ("subuid", "subgid"):
        (lists / name).write_text(f"dutyfree-test:{RANGE}:65536\n")
        Path("/etc", name).touch()  # to be mounted on
    mounts = 'for name in passwd subuid subgid; do mount --bind $0/$name /etc/$name || exit; done; exec "$@"'
    return ["unshare", "--mount", "sh", "-c", mounts, str(lists)]


def start(*arguments: str, ranges: bool = False) -> subprocess.Popen[str]:
    """Python with these arguments, as the user, who may have a range of ids. Skips where that cannot be."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user; to enable it: run as root")
    if not _interpreter():
        version = ".".join(map(str, sys.version_info[:2]))
        pytest.skip(f"no Python {version} that everybody may run; to enable it: apt-get install python3")
    environment = {"PYTHONPATH": str(_copy()), "PYTHONDONTWRITEBYTECODE": "1", "PATH": "/usr/bin:/bin"}
    return subprocess.Popen(
        [*(_with_range() if ranges else ()), *_as_user(), _interpreter(), *arguments],
        env=environment,
        cwd="/",
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(*arguments: str, ranges: bool = False) -> str:
    """What it printed; its failure is the test's."""
    process = start(*arguments, ranges=ranges)
    out, err = process.communicate()
    if process.returncode == 2 and "user namespace" in err:
        pytest.skip(f"{err.strip()}")
    assert process.returncode == 0, out[-3000:] + err[-3000:]
    return out
