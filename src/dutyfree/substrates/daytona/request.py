"""What a sandbox of Daytona is created with: image, limits and labels as the SDK takes them. No I/O."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping
from typing import Any

from daytona import CreateSandboxFromImageParams, CreateSandboxFromSnapshotParams, Resources

from dutyfree.contract import Limits
from dutyfree.contract.errors import CreateError
from dutyfree.contract.limits import NetworkPolicy

SNAPSHOT_SCHEME = "daytona-snapshot:"
"""Begins the image of a recipe that is a snapshot at Daytona."""
GIB = 1 << 30


def create_params(
    image: str | None, limits: Limits, labels: Mapping[str, str], *, snapshot: str, user: str, lease: int
) -> CreateSandboxFromImageParams | CreateSandboxFromSnapshotParams:
    """The parameters of ``create``. Raises CreateError for limits that Daytona does not have.

    A sandbox without activity for the lease is stopped, and deleted as soon as it is stopped. So Daytona
    removes the sandboxes of a program that died.
    """
    common: dict[str, Any] = {
        "labels": dict(labels),
        "os_user": user or None,
        "auto_stop_interval": minutes(lease),
        "auto_delete_interval": 0,
        **egress(limits.network),
    }
    resources = _resources(limits)
    if image is not None and not image.startswith(SNAPSHOT_SCHEME):
        return CreateSandboxFromImageParams(image=image, resources=resources, **common)
    if resources is not None:
        raise CreateError(
            "daytona cannot limit a sandbox from a snapshot: the snapshot has its own limits",
            remedy="give the recipe an image, or leave the limits out",
        )
    name = snapshot if image is None else image.removeprefix(SNAPSHOT_SCHEME)
    return CreateSandboxFromSnapshotParams(snapshot=name or None, **common)


def minutes(seconds: int) -> int:
    """Daytona counts in minutes."""
    return max(1, math.ceil(seconds / 60))


def _resources(limits: Limits) -> Resources | None:
    """Raises CreateError for limits that Daytona does not have. It counts in whole CPUs and GiB."""
    refused = ["pids"] if limits.pids is not None else []
    refused += ["cpus to a fraction"] if limits.cpus is not None and limits.cpus != int(limits.cpus) else []
    sizes = {"memory": limits.memory, "disk": limits.disk}
    refused += [
        f"{name} to a part of a GiB" for name, size in sizes.items() if size is not None and size % GIB
    ]
    if refused:
        raise CreateError(f"daytona cannot limit {', '.join(refused)}", remedy="leave it out, or round it up")
    if limits.cpus is None and limits.memory is None and limits.disk is None:
        return None
    return Resources(
        cpu=None if limits.cpus is None else int(limits.cpus),
        memory=None if limits.memory is None else limits.memory // GIB,
        disk=None if limits.disk is None else limits.disk // GIB,
    )


def egress(policy: NetworkPolicy | None) -> dict[str, Any]:
    """A network policy as Daytona takes it: off unless it says otherwise. Raises CreateError."""
    if policy == "on":
        return {"network_block_all": False}
    if policy is None or policy == "off" or not policy:
        return {"network_block_all": True}
    networks, domains = [], []
    for entry in policy:
        try:
            networks.append(str(ipaddress.IPv4Network(entry)))
        except ValueError:
            if ":" in entry or entry in ("host", "*") or not entry.rpartition(".")[2].strip("0123456789/"):
                raise CreateError(
                    f"daytona cannot allow {entry!r}: it allows domains and IPv4 networks, without ports",
                    remedy="leave the port out, or name a domain or a network such as 10.0.0.0/8",
                ) from None
            domains.append(entry)
    if networks and domains:
        raise CreateError(
            "daytona cannot allow domains and networks at once: what it does with both is not documented",
            remedy="use only one of them",
        )
    name, allowed = ("network_allow_list", networks) if networks else ("domain_allow_list", domains)
    return {name: ",".join(allowed)}
