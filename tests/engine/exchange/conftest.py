from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.exchange.nodes import Nodes


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("session")


@pytest.fixture
def nodes(tmp_path: Path, session: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    def use(node: Path) -> None:
        monkeypatch.setenv("DUTYFREE_CACHE", str(node))

    found = Nodes(tmp_path, session, use)
    use(found.here)
    return found
