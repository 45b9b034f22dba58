"""Files that clients send."""

from __future__ import annotations

import os
from pathlib import Path

from dutyfree.server.files import TenantFiles


def test_what_a_killed_server_had_begun_to_receive_is_removed(tmp_path: Path) -> None:
    files = TenantFiles(tmp_path)
    old, fresh = files.scratch("tenant"), files.scratch("tenant")
    (tmp_path / "tenant/.receiving-tree/deep").mkdir(parents=True)
    kept = tmp_path / "tenant" / ("0" * 64)
    kept.touch()
    for path in (old, kept, tmp_path / "tenant/.receiving-tree"):
        os.utime(path, (0, 0))
    files.sweep()
    assert sorted(path.name for path in (tmp_path / "tenant").iterdir()) == sorted([fresh.name, kept.name])
