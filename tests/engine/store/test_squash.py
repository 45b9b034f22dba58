"""Squash: the merged layer keeps the attributes of its sources."""

from __future__ import annotations

import os
from pathlib import Path

from dutyfree.engine.store.cancel import CancelToken
from dutyfree.engine.store.squash import squash

ACCESS = bytes.fromhex("0200000001000700ffffffff020005000700000004000500ffffffff") + bytes.fromhex(
    "10000500ffffffff20000000ffffffff"
)
"""u::rwx, u:7:r-x, g::r-x, m::r-x, o::---"""


def test_directories_keep_attributes_and_access_lists(tmp_path: Path) -> None:
    for layer in ("upper", "lower", "one"):
        (tmp_path / layer).mkdir()
    for layer in ("upper", "lower"):
        (tmp_path / layer / "d").mkdir()
        (tmp_path / layer / "d" / layer).write_text(layer)
    kept = {"user.kept": b"1", "system.posix_acl_access": ACCESS, "system.posix_acl_default": ACCESS}
    for name, value in kept.items():
        os.setxattr(tmp_path / "upper/d", name, value)
    squash([tmp_path / "upper", tmp_path / "lower"], tmp_path / "one", CancelToken())
    made = tmp_path / "one/d"
    assert sorted(os.listdir(made)) == ["lower", "upper"]
    assert {name: os.getxattr(made, name) for name in os.listxattr(made)} == kept
