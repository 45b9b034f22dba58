"""Workloads: the tiers T0, T1, T2 and the trajectories, the same on every substrate.

May import the contract and ``dutyfree.validation``. Start with ``tiers`` and ``trajectories``; ``workload``
has the types, ``fixture`` the repository that they work on, and ``gitserver`` serves it to the sandboxes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dutyfree.contract.errors import UsageError

if TYPE_CHECKING:
    from dutyfree.workloads.fixture import Fixture
    from dutyfree.workloads.workload import Workload

NAMES = ("T0", "T1", "T2", "trajectory-N")
"""The names of workloads. N is any number of actions."""

_TRAJECTORY = "trajectory-"


def check_name(name: str) -> None:
    """Raise UsageError unless ``name`` is the name of a workload."""
    if name not in NAMES[:3]:
        _length(name)


def is_name(name: str) -> bool:
    """Whether ``name`` is the name of a workload."""
    try:
        check_name(name)
    except UsageError:
        return False
    return True


def build(name: str, fixture: Fixture | None, url: str, full_tests: bool = False) -> Workload:
    """Build the workload ``name``, which clones from ``url``. T0 needs no fixture. Raises UsageError."""
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

        remedy = f"{suggestion(name, NAMES)} choose one of {', '.join(NAMES)}".strip()
        raise UsageError(f"there is no workload {name!r}", remedy=remedy)
    if digits != str(int(digits)) or int(digits) < 1:
        raise UsageError(f"{name!r} has no valid length", remedy="write trajectory-N with N ≥ 1")
    return int(digits)
