from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.exchange.nodes import Nodes


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("session")


@pytest.fixture
def nodes(tmp_path: Path, session: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """Two nodes; the first one is in use. This process has a token for their servers."""

    def use(node: Path) -> None:
        monkeypatch.setenv("DUTYFREE_CACHE", str(node))

    with contextlib.ExitStack() as stack:
        found = Nodes(tmp_path, session, use, stack)
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))  # not this machine's logins
        monkeypatch.setenv("DUTYFREE_PEER_TOKEN", found.token)
        use(found.here)
        yield found
