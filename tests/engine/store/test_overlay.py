"""Layers are read as overlayfs shows them: the same entries as in a mounted overlay."""

from __future__ import annotations

import os
import random
import stat
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dutyfree.engine.store.overlay import OPAQUE, children, lookup

pytestmark = pytest.mark.root("only root can mount an overlay")

NAMES = ("a", "b", "c")


def fill(directory: Path, chance: random.Random, layer: int, depth: int = 3) -> None:
    """Random files, directories, opaque directories, and whiteouts above the lowest layer."""
    for name in NAMES:
        kind = chance.choice(("none", "file", "whiteout", "directory", "directory", "opaque"))
        path = directory / name
        if kind == "file" or (kind in ("directory", "opaque") and not depth):
            path.write_text(str(layer))
        elif kind == "whiteout" and layer:
            os.mknod(path, stat.S_IFCHR, 0)
        elif kind in ("directory", "opaque"):
            path.mkdir()
            if kind == "opaque":
                os.setxattr(path, OPAQUE, b"y")
            fill(path, chance, layer, depth - 1)


def shown(layers: Sequence[Path], at: str = "") -> Iterator[tuple[str, str | None]]:
    """What the store's reader shows: paths, and the contents of files."""
    directory = lookup(layers, at)
    assert directory is not None
    for name, entry in children(directory.paths).items():
        path = f"{at}/{name}"
        assert lookup(layers, path) == entry
        yield path, None if entry.is_directory else entry.paths[0].read_text()
        if entry.is_directory:
            yield from shown(layers, path)


def mounted(layers: Sequence[Path], target: Path) -> Iterator[tuple[str, str | None]]:
    """What the kernel shows."""
    lower = ":".join(map(str, layers))
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", f"lowerdir={lower}", str(target)], check=True)
    try:
        for path in target.rglob("*"):
            if path.exists():  # overlayfs also lists whiteouts in directories that no lower layer has
                yield f"/{path.relative_to(target)}", None if path.is_dir() else path.read_text()
    finally:
        subprocess.run(["umount", str(target)], check=True)


@pytest.mark.parametrize("seed", range(12))
def test_the_same_as_a_mounted_overlay(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    layers = [tmp_path / str(number) for number in range(4)]
    for number, layer in enumerate(layers):
        layer.mkdir()
        fill(layer, chance, number)
    (tmp_path / "mounted").mkdir()
    uppermost_first = layers[::-1]
    found = dict(shown(uppermost_first))
    assert found
    assert found == dict(mounted(uppermost_first, tmp_path / "mounted"))
