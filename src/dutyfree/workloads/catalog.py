"""The names of the workloads, and building a workload by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dutyfree.contract.errors import UsageError

if TYPE_CHECKING:
    from dutyfree.workloads.fixture import Fixture
    from dutyfree.workloads.workload import Workload

TIERS = ("T0", "T1", "T2")
TRAJECTORIES = ("trajectory", "inspect", "edit", "build", "networkx")
NAMES = (*TIERS, *(f"{kind}-N" for kind in TRAJECTORIES))
"""The names of workloads. N is any number of actions."""


def check_name(name: str) -> None:
    """Raise UsageError unless ``name`` is the name of a workload."""
    if name not in TIERS:
        _kind_and_length(name)


def is_name(name: str) -> bool:
    """Whether ``name`` is the name of a workload."""
    try:
        check_name(name)
    except UsageError:
        return False
    return True


def project_of(name: str) -> str | None:
    """The name of the project that a workload works on; None for T0. Recorded trajectories work on attrs."""
    if name == "T0":
        return None
    return "networkx" if is_name(name) and name.startswith("networkx-") else "attrs"


def build(name: str, fixture: Fixture | None, url: str, full_tests: bool = False) -> Workload:
    """Build the workload ``name``, which clones from ``url``. T0 needs no fixture. Raises UsageError."""
    check_name(name)
    from dutyfree.workloads import tiers, trajectories

    if name == "T0":
        return tiers.t0()
    if fixture is None or fixture.project.name != project_of(name):
        raise UsageError(f"{name} needs the {project_of(name)} fixture")
    if name == "T1":
        return tiers.t1(fixture)
    if name == "T2":
        return tiers.t2(fixture, url, full_tests=full_tests)
    kind, length = _kind_and_length(name)
    mix = kind if kind in trajectories.MIXES else trajectories.MIXES[0]
    return trajectories.trajectory(length, fixture, url, kind=mix)


def _kind_and_length(name: str) -> tuple[str, int]:
    kind, _, digits = name.rpartition("-")
    if kind not in TRAJECTORIES or not (digits.isascii() and digits.isdigit()):
        from dutyfree.validation import suggestion  # only for an error

        remedy = f"{suggestion(name, NAMES)} choose one of {', '.join(NAMES)}".strip()
        raise UsageError(f"there is no workload {name!r}", remedy=remedy)
    if digits != str(int(digits)) or int(digits) < 1:
        raise UsageError(f"{name!r} has no valid length", remedy=f"write {kind}-N with N ≥ 1")
    return kind, int(digits)
