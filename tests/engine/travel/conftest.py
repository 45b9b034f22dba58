from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.travel.nodes import Nodes


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    def use(node: Path) -> None:
        monkeypatch.setenv("DUTYFREE_CACHE", str(node))

    found = Nodes(tmp_path, use)
    use(found.here)
    return found
