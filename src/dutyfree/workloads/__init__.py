"""Workloads: the tiers T0, T1, T2 and the trajectories, the same on every substrate.

May import the contract and ``dutyfree.validation``. Start with ``tiers`` and ``trajectories``. ``catalog``
has the names, ``workload`` the types, ``project`` and ``fixture`` the repositories that they work on, and
``gitserver`` serves these to the sandboxes.
"""

from dutyfree.workloads.catalog import NAMES, TIERS, build, check_name, is_name, project_of

__all__ = ["NAMES", "TIERS", "build", "check_name", "is_name", "project_of"]
