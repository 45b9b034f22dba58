"""Downloads for the fixtures: pinned files, fetched with pip and verified."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path, PurePosixPath

from dutyfree.contract.errors import DutyfreeError
from dutyfree.workloads.project import Project

WHEELS = Path(__file__).with_name("wheels.txt")

# pip needs the metadata of what it downloads, and would install the build system of the archive for it,
# which takes seconds and downloads more code. The archive contains its metadata, and this build backend
# returns it.
_BACKEND = """\
import pathlib, shutil

def prepare_metadata_for_build_wheel(directory, settings=None):
    fields = dict(line.split(": ", 1) for line in open("PKG-INFO", encoding="utf-8") if ": " in line[:12])
    name = f"{fields['Name'].strip()}-{fields['Version'].strip()}.dist-info"
    target = pathlib.Path(directory, name)
    target.mkdir()
    shutil.copy("PKG-INFO", target / "METADATA")
    return name
"""

Tree = dict[str, bytes]
"""Path in the repository → content."""


class FixtureError(DutyfreeError):
    """The fixture could not be built."""


def source(downloads: Path, project: Project, version: str) -> Tree:
    """The files in the source archive of a release, without PKG-INFO."""
    downloads.mkdir()
    requirements = downloads / "requirements.txt"
    digest = project.digests[version]
    requirements.write_text(f"{project.name}=={version} --hash=sha256:{digest}\n")
    package, _, module = project.build_backend.partition(".")
    backend = downloads / "backend" / package
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / f"{module}.py").write_text(_BACKEND)
    options = ["--no-binary", ":all:", "--no-build-isolation"]
    _download([*options, "-r", str(requirements)], downloads, {"PYTHONPATH": str(backend.parent)})
    archive = downloads / f"{project.name}-{version}.tar.gz"
    content = archive.read_bytes()
    _verify(archive.name, content, digest)
    tree: Tree = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        for member in tar:
            path = PurePosixPath(member.name).relative_to(f"{project.name}-{version}")
            file = tar.extractfile(member) if member.isfile() else None
            if file is not None and ".." not in path.parts and str(path) != "PKG-INFO":
                tree[str(path)] = file.read()
    return tree


def wheels(target: Path) -> dict[str, str]:
    """Download the wheels. Returns distribution → version."""
    target.mkdir()
    _download(["--only-binary", ":all:", "-r", str(WHEELS)], target, {})
    pins: dict[str, tuple[str, str]] = {}
    for line in WHEELS.read_text().splitlines():
        if line and not line.startswith("#"):
            pin, _, digest = line.partition(" --hash=sha256:")
            name, _, version = pin.partition("==")
            pins[digest] = (name, version)
    found = {hashlib.sha256(wheel.read_bytes()).hexdigest(): wheel.name for wheel in target.iterdir()}
    if found.keys() != pins.keys():
        wrong = sorted(name for digest, name in found.items() if digest not in pins)
        raise FixtureError(
            f"the downloaded wheels are not the pinned ones: {', '.join(wrong) or 'wheels are missing'}",
            remedy="check the package index that pip uses (pip config list)",
        )
    return dict(pins.values())


def _verify(name: str, content: bytes, expected: str) -> None:
    if hashlib.sha256(content).hexdigest() != expected:
        raise FixtureError(
            f"{name} is not the pinned file: its SHA-256 differs",
            remedy="check the package index that pip uses (pip config list)",
        )


def _download(arguments: list[str], target: Path, environment: dict[str, str]) -> None:
    """Download pinned files with pip, from its configured index."""
    command = [*_pip(), "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"]
    done = subprocess.run(
        [*command, "--require-hashes", "--dest", str(target), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, "PIP_NO_COLOR": "1", **environment},
        check=False,
    )
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if "ERROR" in line] or [done.stderr[-300:]]
        raise FixtureError(
            f"pip could not download the files of the fixture: {' '.join(lines)[-600:]}",
            remedy="check the network and the package index that pip uses (pip config list), then try again",
        )


@functools.cache
def _pip() -> list[str]:
    """A command that runs pip. Environments made by uv have none, so try uv and the system too."""
    for command in (
        [sys.executable, "-m", "pip"],
        ["uv", "tool", "run", "--quiet", "pip"],
        ["python3", "-m", "pip"],
        ["/usr/bin/python3", "-m", "pip"],
    ):
        with contextlib.suppress(OSError):
            if not subprocess.run([*command, "--version"], capture_output=True, check=False).returncode:
                return command
    raise FixtureError(
        "the fixture needs pip, and none was found",
        remedy=f"run {sys.executable} -m ensurepip, or install uv or python3-pip",
    )
