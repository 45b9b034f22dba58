"""The records of sandboxes, by which the next server goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dutyfree.server.records import SandboxRecords


def test_ended_sandboxes_are_forgotten_while_the_server_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1e9
    monkeypatch.setattr(time, "time", lambda: now)
    with SandboxRecords(tmp_path / "sandboxes.sqlite", 3600) as kept:

        def add(name: str) -> None:
            row = (name, "one", name, b"", b"")
            kept._database.execute("INSERT INTO sandboxes VALUES (?, ?, ?, ?, ?, NULL)", row)

        def names() -> list[str]:
            return [name for (name,) in kept._database.execute("SELECT id FROM sandboxes ORDER BY id")]

        for name, left in (("a", ["a"]), ("b", ["a", "b"]), ("c", ["b", "c"])):
            kept._thread.submit(add, name).result()
            kept.end(name)
            assert kept._thread.submit(names).result() == left
            now += 1900
