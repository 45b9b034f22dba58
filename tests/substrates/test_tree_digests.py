"""Digests of files that are read again only if they may have changed."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dutyfree.contract.stage import tree_digest
from dutyfree.substrates.hosted.tree_digests import TreeDigests


class Counted:
    """A cache, and whether it reads the files. Its answers must be true in any case."""

    def __init__(self, settled: float = 0.05) -> None:
        self._calls = 0
        self._cache = TreeDigests(settled, self._compute)

    def _compute(self, path: Path) -> bytes:
        self._calls += 1
        return tree_digest(path)

    def reads(self, root: Path) -> bool:
        before = self._calls
        assert self._cache.digest(root) == tree_digest(root)
        return self._calls > before


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree that has not changed for longer than the cache waits."""
    root = tmp_path / "tree"
    (root / "dir").mkdir(parents=True)
    (root / "file").write_text("text")
    (root / "dir/other").write_text("other")
    (root / "link").symlink_to("file")
    time.sleep(0.1)
    return root


def test_unchanged_files_are_read_once(tree: Path) -> None:
    cache = Counted()
    assert [cache.reads(tree) for _ in range(3)] == [True, False, False]
    assert [cache.reads(tree / "file") for _ in range(2)] == [True, False]


def _rewrite_with_old_times(root: Path) -> None:
    before = (root / "file").stat()
    (root / "file").write_text("TEXT")
    os.utime(root / "file", ns=(before.st_atime_ns, before.st_mtime_ns))


def _replace_directory(root: Path) -> None:
    shutil.copytree(root / "dir", root.parent / "copy")
    shutil.rmtree(root / "dir")
    (root.parent / "copy").rename(root / "dir")


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "dir/other").write_text("OTHER"),
        _rewrite_with_old_times,
        lambda root: (root / "file").chmod(0o700),
        lambda root: (root / "dir/new").touch(),
        lambda root: (root / "file").unlink(),
        lambda root: (root / "file").rename(root / "renamed"),
        lambda root: ((root / "link").unlink(), (root / "link").symlink_to("dir")),
        _replace_directory,
    ],
    ids=["contents", "contents with old times", "mode", "new", "gone", "renamed", "link", "directory"],
)
def test_every_change_is_seen(tree: Path, change: Callable[[Path], object]) -> None:
    cache = Counted()
    assert [cache.reads(tree) for _ in range(2)] == [True, False]
    change(tree)
    assert cache.reads(tree)


def test_fresh_files_are_not_trusted(tree: Path) -> None:
    cache = Counted(3600)
    assert [cache.reads(tree) for _ in range(2)] == [True, True]


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TreeDigests().digest(tmp_path / "missing")
