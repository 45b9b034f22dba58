from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dutyfree.contract.stage import tree_digest
from dutyfree.workloads import build as workload
from dutyfree.workloads.downloads import FixtureError
from dutyfree.workloads.fixture import GIT_ENVIRONMENT, Fixture, build, derive_patch
from dutyfree.workloads.project import ATTRS
from tests.processes import ran

BUILDER = """
import pathlib, signal, sys
from dutyfree.workloads.fixture import build
def say(message):
    print(message, flush=True)
    if len(sys.argv) > 2 and message.startswith(sys.argv[2]):
        signal.pause()
print(build(pathlib.Path(sys.argv[1]), say).root)
"""


def git(directory: Path, *arguments: str) -> str:
    return ran(["git", *arguments], cwd=directory, env={**os.environ, **GIT_ENVIRONMENT}, check=True).stdout


def builder(cache: Path, *moment: str) -> subprocess.Popen[str]:
    """Who builds into the cache, or gets no further than to what it says at some moment."""
    command = [sys.executable, "-c", BUILDER, str(cache), *moment]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_the_checkout_is_clean_at_the_buggy_commit(fixture: Fixture, tmp_path: Path) -> None:
    copy = tmp_path / "attrs"
    shutil.copytree(fixture.checkout, copy)
    assert git(copy, "rev-parse", "main", "HEAD").split() == [ATTRS.commit, ATTRS.commit]
    assert git(copy, "status", "--porcelain", "--ignored") == ""
    assert len(git(copy, "log", "--format=%s").splitlines()) == 4
    assert git(fixture.repository, "rev-parse", "main").strip() == ATTRS.commit
    git(fixture.repository, "fsck", "--strict")


def test_the_patch_is_one_line_in_both_forms(fixture: Fixture, tmp_path: Path) -> None:
    copy = tmp_path / "attrs"
    shutil.copytree(fixture.checkout, copy)
    source = (copy / ATTRS.patched).read_bytes()
    assert source.count(fixture.patch.old) == 1
    (tmp_path / "fix.diff").write_text(fixture.patch.diff)
    git(copy, "apply", str(tmp_path / "fix.diff"))
    assert (copy / ATTRS.patched).read_bytes() == source.replace(fixture.patch.old, fixture.patch.new)
    assert git(copy, "diff", "--numstat") == f"1\t1\t{ATTRS.patched}\n"
    assert fixture.versions["attrs after"] == ATTRS.fixed


def test_every_wheel_serves_every_python(fixture: Fixture) -> None:
    names = sorted(wheel.name for wheel in fixture.wheels.iterdir())
    assert len(names) == 9
    assert all(name.endswith("-none-any.whl") for name in names)


def test_two_caches_hold_the_same_bytes(fixture: Fixture, tmp_path: Path) -> None:
    mask = os.umask(0o077)
    try:
        other = build(tmp_path / "cache")
    finally:
        os.umask(mask)
    for part in ("checkout", "served", "wheels"):
        assert tree_digest(getattr(other, part)) == tree_digest(getattr(fixture, part))
    assert other.patch == fixture.patch
    for name in ("T1", "T2", "trajectory-5"):
        mine, theirs = workload(name, fixture, "git://x/"), workload(name, other, "git://x/")
        assert mine.recipe.key() == theirs.recipe.key()
        assert mine.actions == theirs.actions


@pytest.mark.slow
def test_killed_concurrent_and_damaged_builds_end_well(fixture: Fixture, tmp_path: Path) -> None:
    for moment in ("downloading", "building the attrs repository"):
        with builder(tmp_path, moment) as process:
            assert process.stdout is not None
            assert any(line.startswith(moment) for line in process.stdout)
            process.send_signal(signal.SIGKILL)
        assert list(tmp_path.glob("fixture-making-*"))

    together = [builder(tmp_path) for _ in range(3)]
    said = [process.communicate()[0].splitlines() for process in together]
    assert [process.returncode for process in together] == [0, 0, 0]
    assert len({lines[-1] for lines in said}) == 1
    assert sum(line.startswith("downloading") for lines in said for line in lines) == 1
    assert not list(tmp_path.glob("fixture-making-*"))

    damaged = build(tmp_path)
    assert tree_digest(damaged.checkout) == tree_digest(fixture.checkout)
    (damaged.checkout / ATTRS.patched).write_bytes(b"")
    assert tree_digest(build(tmp_path).checkout) == tree_digest(fixture.checkout)


def test_a_whole_fixture_is_used_again(fixture: Fixture, tmp_path: Path) -> None:
    said: list[str] = []
    copy = tmp_path / fixture.root.name
    shutil.copytree(fixture.root, copy)
    assert build(tmp_path, said.append).root == copy
    assert said == []


def test_a_tampered_download_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = tmp_path / "links"
    links.mkdir()
    with tarfile.open(links / "attrs-25.2.0.tar.gz", "w:gz") as tar:
        for name in ("PKG-INFO", "src/attr/_make.py"):
            content = b"Metadata-Version: 2.1\nName: attrs\nVersion: 25.2.0\n"
            member = tarfile.TarInfo(f"attrs-25.2.0/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    with pytest.raises(FixtureError, match="DO NOT MATCH THE HASHES") as raised:
        build(tmp_path / "cache")
    assert "pip config list" in raised.value.remedy
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["fixture.lock"]


def test_no_index_gives_one_clear_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(FixtureError, match=r"pip could not download .* No matching distribution"):
        build(tmp_path / "cache")


def test_an_unusable_cache_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FixtureError, match="Not a directory") as raised:
        build(tmp_path / "file" / "cache")
    assert "DUTYFREE_CACHE" in raised.value.remedy


@given(
    st.lists(st.sampled_from(["a\n", "b\n", "c\n", "\n"]), min_size=1, max_size=12),
    st.lists(st.sampled_from(["a\n", "x\n", "y\n"]), max_size=3),
    st.data(),
)
def test_a_derived_patch_applies(lines: list[str], new: list[str], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(lines)))
    end = data.draw(st.integers(start, len(lines)))
    before = "".join(lines).encode()
    after = "".join([*lines[:start], *new, *lines[end:]]).encode()
    try:
        patch = derive_patch("file", before, after)
    except FixtureError:
        return  # several changes or none, or one that cannot be told from the rest
    assert before.count(patch.old) == 1
    assert before.replace(patch.old, patch.new) == after
