from __future__ import annotations

from pathlib import Path

import pytest

from dutyfree.contract.errors import UsageError
from dutyfree.workloads import build
from dutyfree.workloads.fixture import Fixture
from dutyfree.workloads.trajectory_file import load, save


@pytest.mark.parametrize("name", ["T2", "trajectory-60"])
def test_what_is_saved_is_loaded(name: str, fixture: Fixture, tmp_path: Path) -> None:
    workload = build(name, fixture, "git://x/attrs.git")
    save(workload, tmp_path / f"{name}.jsonl")
    assert load(tmp_path / f"{name}.jsonl", fixture, "git://x/attrs.git") == workload


def test_a_line_by_hand(fixture: Fixture, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '{"label": "look", "kind": "inspect", "action": {"type": "exec", "command": "ls"}}\n'
        '{"label": "see", "kind": "inspect", "action": {"type": "read", "path": "attrs/README.md"},'
        ' "expect": {"contains": ["YXR0cnM="]}}\n'
    )
    look, see = load(path, fixture, "").actions
    assert look.expect.exit_code == 0
    assert see.expect.contains == (b"attrs",)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [("", "is empty"), ("{}\n", "line 1 is not a step: .*label"), ("\n", "line 1"), ("nonsense\n", "line 1")],
)
def test_what_is_no_trajectory(content: str, complaint: str, fixture: Fixture, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError, match=complaint):
        load(path, fixture, "")
    with pytest.raises(UsageError, match=r"cannot read the recorded trajectory .*: No such file"):
        load(tmp_path / "other.jsonl", fixture, "")
