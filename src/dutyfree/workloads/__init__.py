"""WHAT runs: the tiers T0, T1, T2 and the trajectories, the same on every substrate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dutyfree.contract.errors import UsageError

if TYPE_CHECKING:
    from dutyfree.workloads.fixture import Fixture
    from dutyfree.workloads.workload import Workload

NAMES = ("T0", "T1", "T2", "trajectory-N")
"""What may be asked for; N is any number of actions."""

_TRAJECTORY = "trajectory-"


def check_name(name: str) -> None:
    """Raise UsageError unless ``name`` is that of a workload."""
    if name not in NAMES[:3]:
        _length(name)


def build(name: str, fixture: Fixture | None, url: str, full_tests: bool = False) -> Workload:
    """The workload ``name``, cloning from ``url`` where it clones. T0 needs no fixture. Raises UsageError."""
    check_name(name)
    from dutyfree.workloads import tiers, trajectories

    if name == "T0":
        return tiers.t0()
    if fixture is None:
        raise UsageError(f"{name} needs the attrs fixture")
    if name == "T1":
        return tiers.t1(fixture)
    if name == "T2":
        return tiers.t2(fixture, url, full_tests=full_tests)
    return trajectories.trajectory(_length(name), fixture, url)


def _length(name: str) -> int:
    digits = name.removeprefix(_TRAJECTORY)
    if not name.startswith(_TRAJECTORY) or not (digits.isascii() and digits.isdigit()):
        from dutyfree.validation import suggestion  # only for an error

        remedy = f"{suggestion(name, NAMES)} choose among {', '.join(NAMES)}".strip()
        raise UsageError(f"there is no workload {name!r}", remedy=remedy)
    if digits != str(int(digits)) or int(digits) < 1:
        raise UsageError(f"{name!r} is no length of a trajectory", remedy="write trajectory-1 or more")
    return int(digits)
