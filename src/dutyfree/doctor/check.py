"""All checks of the doctor; here those of what the study and all of dutyfree need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from dutyfree import paths, substrates
from dutyfree.contract import Availability
from dutyfree.doctor import native
from dutyfree.doctor.finding import Finding
from dutyfree.study import machine

GIT_DAEMON_REMEDY = "install git with its daemon (Debian: apt-get install git)"


async def check_all() -> list[Finding]:
    """Check everything. Raises nothing."""
    findings = [check() for check in _CHECKS]
    seen: dict[str, Availability] = {}
    for name in substrates.names():
        found = seen[name] = await substrates.probe(name)
        if seen.get(name.partition("-")[0]) == found and "-" in name:
            continue  # native at a fixed warmth: already checked as native
        findings.append(Finding(f"substrate {name}", found.available, found.detail, found.remedy))
    return findings + await native.check()


def blocking(findings: list[Finding]) -> Iterator[Finding]:
    """The findings that prevent even a study on bare."""
    return (finding for finding in findings if finding.needed and not finding.fine)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding(
        "python", sys.version_info >= (3, 11), version, "install Python 3.11 or newer", needed=True
    )


def _kernel() -> Finding:
    fine = hasattr(os, "pidfd_open")
    detail = f"{os.uname().sysname} {os.uname().release}, cgroups {machine.cgroup_mode()}"
    return Finding("kernel", fine, detail, "dutyfree needs Linux 5.3 or newer", needed=True)


def _root() -> Finding:
    return Finding(
        "root",
        os.geteuid() == 0,
        "root" if os.geteuid() == 0 else f"user {os.geteuid()}",
        "run as root to build the study's image, to drop page caches and to run commands as other users",
    )


def _git() -> Finding:
    found = shutil.which("git")
    if found is None:
        return Finding("git", False, "not found", GIT_DAEMON_REMEDY, needed=True)
    said = subprocess.run([found, "--exec-path"], capture_output=True, text=True, check=False).stdout.strip()
    daemon = Path(said, "git-daemon").exists()
    detail = f"{found}, {'with' if daemon else 'without'} its daemon"
    return Finding("git", daemon, detail, GIT_DAEMON_REMEDY, needed=True)


def _pip() -> Finding:
    """Check pip: T2 installs its test dependencies with the pip of the python3 on the PATH of commands."""
    search = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    found = shutil.which("python3", path=search)
    remedy = "install it (Debian: apt-get install python3-pip)"
    if found is None:
        return Finding("python3 of bare", False, f"none on {search}", remedy, needed=True)
    said = subprocess.run([found, "-m", "pip", "--version"], capture_output=True, text=True, check=False)
    detail = said.stdout.strip() or f"{found} has no pip"
    return Finding("python3 of bare", said.returncode == 0, detail, remedy, needed=True)


def _debootstrap() -> Finding:
    found = shutil.which("debootstrap", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    return Finding(
        "debootstrap",
        found is not None,
        found or "not found",
        "needed to build the study's image (Debian: apt-get install debootstrap)",
    )


def _space() -> Finding:
    least = min(
        (shutil.disk_usage(_existing(path)).free, str(path))
        for path in (Path(tempfile.gettempdir()), paths.cache())
    )
    return Finding(
        "disk",
        least[0] > 3 << 30,
        f"{least[0] / 2**30:.1f} GiB free at {least[1]}",
        "free 3 GiB there, or set TMPDIR and DUTYFREE_CACHE elsewhere",
    )


def _load() -> Finding:
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    return Finding(
        "load", load < cores / 2, f"{load:.2f} on {cores} cores", "measure while nothing else runs"
    )


def _existing(path: Path) -> Path:
    return next(found for found in (path, *path.parents) if found.exists())


_CHECKS: tuple[Callable[[], Finding], ...] = (
    _python,
    _kernel,
    _root,
    _git,
    _pip,
    _debootstrap,
    _space,
    _load,
)
