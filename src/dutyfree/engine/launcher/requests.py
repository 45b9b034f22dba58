"""From limits to what the launcher is asked for; what this host cannot keep is refused."""

from __future__ import annotations

import os

from dutyfree.contract import Limits
from dutyfree.contract.errors import CreateError, LimitError
from dutyfree.engine.host.features import HostFeatures
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.protocol import Create, Tree

PIDS = 2048
"""Of a sandbox without such a limit: enough for builds, and no bomb reaches the host's."""

LEAST_MEMORY = 1 << 20
LEAST_CPUS = 0.01
"""Of a sandbox: what the smallest program needs, and what the kernel can count."""

SHARE = 4
"""This part of the host's memory is the limit of what has no other."""


def host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def share_of_memory() -> int:
    """Bytes: of a sandbox, of all snapshots together, and of an idle pool."""
    return host_memory() // SHARE


def check_limits(limits: Limits) -> None:
    """Raises LimitError for what no sandbox can have, on any host."""
    if limits.memory is not None and limits.memory < LEAST_MEMORY:
        raise LimitError(f"no program runs in {limits.memory} bytes", remedy="allow at least 1M")
    if limits.cpus is not None and limits.cpus < LEAST_CPUS:
        raise LimitError(f"the kernel cannot limit to {limits.cpus} cpus", remedy="allow at least 0.01")
    if limits.disk is not None and limits.memory is not None and limits.disk > limits.memory // 2:
        raise LimitError(
            f"a disk of {limits.disk} bytes does not fit into a memory of {limits.memory}",
            remedy="what is written is kept in memory: allow at least twice as much of it",
        )


def create(features: HostFeatures, trees: tuple[Tree, ...], limits: Limits) -> bytes:
    """The request for a sandbox, but for its label. Raises LimitError, CreateError."""
    check_limits(limits)
    _refuse_what_cannot_be_limited(features, limits)
    # No sandbox takes all memory from the others. What it may write, it may also hold.
    memory = max(share_of_memory(), 2 * (limits.disk or 0)) if limits.memory is None else limits.memory
    return protocol.create(
        Create.SHARED_NETWORK if shares_network(features, limits) else 0,
        trees,
        memory=memory if "memory" in features.controllers else 0,
        disk=memory // 2 if limits.disk is None else limits.disk,
        pids=limits.pids if limits.pids is not None else PIDS,
        cpu_quota=0 if limits.cpus is None else int(limits.cpus * 100_000),
    )


def shares_network(features: HostFeatures, limits: Limits) -> bool:
    """Without root there is no way out of a network of its own. Raises CreateError."""
    if features.mode == "root" or limits.network in (None, "off"):
        return False
    if limits.network != "on":
        raise CreateError(
            "native cannot tell apart what a sandbox reaches without root",
            remedy='run as root, or let it reach nothing ("off") or everything ("on")',
        )
    return True


def _refuse_what_cannot_be_limited(features: HostFeatures, limits: Limits) -> None:
    enforced = {
        "cpus": (limits.cpus, "cpu" in features.controllers),
        "memory": (limits.memory, "memory" in features.controllers),
        "pids": (limits.pids, features.counts_processes),
    }
    for name, (wanted, possible) in enforced.items():
        if wanted is not None and not possible:
            raise CreateError(f"native cannot limit {name} here", remedy="see `dutyfree doctor`")
