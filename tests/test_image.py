"""The study's image: where it comes from, and that half of one is never taken for whole."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import pytest

from dutyfree import paths, study_image
from dutyfree.contract.errors import Unavailable
from tests.awaiting import together
from tests.processes import eventually

SOURCES = """\
# What this machine uses
Types: deb deb-src
# a note in between
URIs: http://mirror.example/debian
Suites: trixie trixie-updates
Components: main
 contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: trixie-security
Components: main
"""


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path))
    assert paths.cache() == tmp_path
    monkeypatch.delenv("DUTYFREE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert paths.cache() == Path("/xdg/dutyfree")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/someone")
    assert paths.cache() == Path("/home/someone/.cache/dutyfree")
    assert not Path("/xdg").exists()


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("sources.list.d/debian.sources", SOURCES, "http://mirror.example/debian"),
        ("sources.list.d/debian.sources", SOURCES.replace("Types", "Enabled: no\nTypes", 1), None),
        ("sources.list.d/debian.sources", SOURCES.replace("deb deb-src", "deb-src"), None),
        ("sources.list", "deb http://a.example/debian trixie main", "http://a.example/debian"),
        (
            "sources.list",
            "deb [arch=amd64 signed-by=/x] http://a.example/d trixie main",
            "http://a.example/d",
        ),
        ("sources.list", "deb [ arch=amd64 ] http://a.example/d trixie contrib main", "http://a.example/d"),
        ("sources.list", "# deb http://a.example/debian trixie main", None),
        ("sources.list", "deb http://a.example/debian trixie contrib", None),
        ("sources.list", "deb http://a.example/debian bookworm main\ndeb", None),
        ("sources.list", "deb cdrom:[Debian] trixie main", None),
        ("sources.list.d/notes.txt", "deb http://a.example/debian bookworm main", None),
    ],
)
def test_mirror_is_the_machines_own(tmp_path: Path, name: str, text: str, found: str | None) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    assert study_image.mirror("trixie", tmp_path) == found


def test_mirror_list(tmp_path: Path) -> None:
    (tmp_path / "mirrors").write_text("https://first.example/debian\nhttps://second.example/debian\n")
    line = f"deb mirror+file:{tmp_path}/mirrors trixie main\n"
    (tmp_path / "sources.list").write_text(line)
    assert study_image.mirror("trixie", tmp_path) == "https://first.example/debian"
    (tmp_path / "mirrors").unlink()
    assert study_image.mirror("trixie", tmp_path) is None


def test_half_an_image_is_none(cache: Path) -> None:
    directory = cache / "images"
    directory.mkdir(parents=True)
    assert study_image.built() is None
    scratch = directory / "image.tar"
    scratch.write_bytes(b"x" * 1000)
    made = study_image._publish(scratch, "trixie")
    assert study_image.built() == made
    assert made.tar.read_bytes() == b"x" * 1000
    os.truncate(made.tar, 999)
    assert study_image.built() is None
    made.tar.unlink()
    assert study_image.built() is None
    study_image._record().write_bytes(b'{"name": ')
    assert study_image.built() is None


def test_a_new_image_replaces_the_old(cache: Path) -> None:
    (cache / "images").mkdir(parents=True)
    for content in (b"old", b"new"):
        scratch = cache / "images" / "image.tar"
        scratch.write_bytes(content)
        study_image._publish(scratch, "trixie")
    assert [path.read_bytes() for path in (cache / "images").glob("*.tar")] == [b"new"]


async def test_build_gives_what_the_cache_holds(cache: Path) -> None:
    def plant() -> study_image.StudyImage:
        (cache / "images").mkdir(parents=True)
        scratch = cache / "images" / "image.tar"
        scratch.write_bytes(b"held")
        return study_image._publish(scratch, study_image.suite())

    made = await anyio.to_thread.run_sync(plant)
    assert await study_image.build() == made


async def test_only_root_builds(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Unavailable, match="only root") as caught:
        await study_image.build()
    assert "--from" in caught.value.remedy
    assert not await anyio.Path(cache).exists()


async def test_unusable_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(Unavailable, match="cannot be written") as caught:
        await study_image.build()
    assert "DUTYFREE_CACHE" in caught.value.remedy


# --- Real builds -----------------------------------------------------------------------------------

needs_debootstrap = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("debootstrap") is None,
    reason="needs root and debootstrap; to enable it: apt-get install debootstrap, and run as root",
)

FEW = ("patch",)

BUILDER = f"""
import anyio
from dutyfree import study_image
study_image.PACKAGES = {FEW}
anyio.run(lambda: study_image.build(progress=lambda line: print(line, flush=True)))
"""


def leftovers(cache: Path) -> tuple[list[str], list[str]]:
    """Mounts under the cache, and processes that work in it."""
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(cache) in line]
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            commands.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return mounts, [command for command in commands if str(cache) in command]


@pytest.mark.skipif(os.geteuid() != 0, reason="to enable it: run as root")
def test_a_build_whose_maker_died_at_once_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run([*study_image._namespaces(), "touch", str(tmp_path / "begun")], check=True)
    assert (tmp_path / "begun").exists()
    monkeypatch.setattr(os, "getpid", lambda: 1 << 22)  # nobody's: as if the parent were another by now
    ended = subprocess.run([*study_image._namespaces(), "touch", str(tmp_path / "never")], check=False)
    assert ended.returncode
    assert not (tmp_path / "never").exists()


@needs_debootstrap
@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "number"), [("Retrieving", signal.SIGINT), ("Configuring", signal.SIGKILL)]
)
def test_broken_off_build_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, moment: str, number: signal.Signals
) -> None:
    """With fewer packages than there are in a whole one: whatever they are, the moments are the same."""
    monkeypatch.setattr(study_image, "PACKAGES", FEW)
    with subprocess.Popen(
        [sys.executable, "-c", BUILDER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as builder:
        assert builder.stdout is not None
        reached = any(line.startswith(moment) for line in builder.stdout)
        builder.send_signal(number)
    assert reached, "the build ended by itself"
    assert eventually(lambda: leftovers(cache) == ([], [])), "the kernel takes its time to end them all"
    assert study_image.built() is None
    if number == signal.SIGINT:
        assert sorted(path.name for path in (cache / "images").iterdir()) == ["lock"]
    # The next builder finds the lock free, and sweeps what is left.
    scratch = study_image._scratch()
    assert sorted(path.name for path in (cache / "images").iterdir()) == sorted([scratch.name, "lock"])


def portrait(made: study_image.StudyImage) -> tuple[list[str], list[str], dict[str, object]]:
    """Names in the tar, names beside it, and its record."""
    with tarfile.open(made.tar) as tar:
        names = tar.getnames()
    record: dict[str, object] = msgspec.json.decode(study_image._record().read_bytes())
    return names, sorted(path.name for path in made.tar.parent.iterdir()), record


@needs_debootstrap
@pytest.mark.slow
async def test_build(cache: Path) -> None:
    said: list[str] = []
    made: list[study_image.StudyImage] = []

    async def build() -> None:
        made.append(await study_image.build(progress=said.append))

    await together(build, build)
    assert made[0] == made[1], "two builders, one build"
    assert sum(line.startswith("debootstrap of") for line in said) == 1
    assert "waiting for another build of the image" in said
    names, files, record = await anyio.to_thread.run_sync(portrait, made[0])
    assert {"./usr/bin/python3", "./usr/bin/git", "./usr/bin/patch", "./workspace"} <= set(names)
    for dropped in ("./dev/", "./proc/", "./usr/share/doc/", "./var/lib/apt/lists/"):
        assert not [name for name in names if name.startswith(dropped)], dropped
    assert len(files) == 3, files
    assert record["digest"] == made[0].digest
