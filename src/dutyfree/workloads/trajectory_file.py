"""Recorded trajectories: files with one step per line as JSON, which run like the scripted ones."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dutyfree.contract import Limits
from dutyfree.contract.errors import UsageError
from dutyfree.workloads import tiers
from dutyfree.workloads.fixture import Fixture
from dutyfree.workloads.workload import Step, Workload


def save(workload: Workload, path: Path) -> None:
    """Write the actions of a workload with their expected results."""
    path.write_bytes(b"".join(msgspec.json.encode(step) + b"\n" for step in workload.actions))


def load(path: Path, fixture: Fixture, url: str) -> Workload:
    """Load a workload: T2's set-up, then the steps of a file, whose name it has. Raises UsageError."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"cannot read the recorded trajectory {path}: {error.strerror}") from error
    steps: list[Step] = []
    for number, line in enumerate(lines, 1):
        try:
            steps.append(msgspec.json.decode(line, type=Step))
        except msgspec.MsgspecError as error:
            raise UsageError(
                f"{path}, line {number} is not a step: {error}",
                remedy="docs/workloads.md describes the format",
            ) from error
    if not steps:
        raise UsageError(f"the recorded trajectory {path} is empty")
    return Workload(
        name=path.stem,
        first=tiers.FIRST,
        recipe=tiers.recipe(fixture),
        setup=tiers.setup(fixture, url),
        actions=tuple(steps),
        limits=Limits(network="on"),
    )
