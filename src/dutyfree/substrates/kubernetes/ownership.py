"""Who owns the pods: each opening has a Lease, which it renews and which is the owner of its pods.

When the Lease is deleted, the cluster's garbage collector deletes its pods. An opening whose Lease was not
renewed, or whose process is dead for certain, is dead: the next opening, and ``dutyfree gc``, remove its pods
and its Lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread

from dutyfree.contract.errors import CleanupError
from dutyfree.substrates.kubernetes.api import MERGE_PATCH, Api, ApiError, ApiLost, Object
from dutyfree.substrates.local.owner import identity, is_dead

OURS, OWNER, ROLE, POOL, KIND = (
    "dutyfree",
    "dutyfree.owner",
    "dutyfree.role",
    "dutyfree.pool",
    "dutyfree.kind",
)
"""Labels. ``OURS=1`` has everything that we make."""
PROCESS = "dutyfree.process"
"""The annotation of a Lease with the identity of the owner's process."""

GROUP = "coordination.k8s.io/v1"
GRACE = 1
"""Seconds that a pod has to end by itself. With 0 the cluster forgets it before its node has ended it."""
EXPIRED = 2
"""A Lease is expired after this many times its duration: clocks of machines differ."""

_log = logging.getLogger(__name__)


class Lease:
    """The Lease of one opening."""

    def __init__(self, api: Api, found: Object) -> None:
        self._api = api
        self.owner: str = found["metadata"]["labels"][OWNER]
        self.name: str = found["metadata"]["name"]
        self._uid: str = found["metadata"]["uid"]
        self._seconds: int = found["spec"]["leaseDurationSeconds"]

    @property
    def reference(self) -> Object:
        """The entry of ``ownerReferences`` of what it owns."""
        return {"apiVersion": GROUP, "kind": "Lease", "name": self.name, "uid": self._uid}

    async def renew(self) -> None:
        """Renew it for ever. A cluster that does not answer is asked again."""
        while True:
            await anyio.sleep(self._seconds / 4)
            try:
                await self._api.request(
                    "PATCH",
                    self._api.path("leases", self.name, group=GROUP),
                    body={"spec": {"renewTime": _now()}},
                    content=MERGE_PATCH,
                )
            except (ApiError, ApiLost) as error:
                _log.warning("the lease %s could not be renewed: %s", self.name, error)


@asynccontextmanager
async def lease(api: Api, seconds: int) -> AsyncIterator[Lease]:
    """A Lease that is renewed until the end of the context, and deleted then. Raises ApiError, ApiLost."""
    owner = uuid.uuid4().hex[:20]
    process = await anyio.to_thread.run_sync(identity) or ""
    made = await api.request(
        "POST",
        api.path("leases", group=GROUP),
        body={
            "apiVersion": GROUP,
            "kind": "Lease",
            "metadata": {
                "name": f"dutyfree-{owner}",
                "labels": {OURS: "1", OWNER: owner},
                "annotations": {PROCESS: process},
            },
            "spec": {"holderIdentity": owner, "leaseDurationSeconds": seconds, "renewTime": _now()},
        },
    )
    held = Lease(api, made)
    renewal = asyncio.create_task(held.renew())
    try:
        yield held
    finally:
        renewal.cancel()
        with anyio.CancelScope(shield=True), contextlib.suppress(ApiError, ApiLost):
            await delete(api, "leases", held.name, group=GROUP)


async def delete(api: Api, kind: str, name: str, *, group: str = "", grace: int | None = None) -> bool:
    """Delete an object. False if there is none. Raises ApiError, ApiLost."""
    body: Object = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
    if grace is not None:
        body["gracePeriodSeconds"] = grace
    try:
        await api.request("DELETE", api.path(kind, name, group=group), body=body)
    except ApiError as error:
        if error.status == 404:
            return False
        raise
    return True


# --- Leftovers --------------------------------------------------------------------------------------------


async def listed(api: Api, selector: str) -> list[Object]:
    """The pods that a selector finds. Raises ApiError, ApiLost."""
    found = await api.request("GET", api.path("pods"), query={"labelSelector": selector})
    return list(found["items"])


async def remove_leftovers(api: Api, *, dry_run: bool = False) -> list[str]:
    """Remove the pods and the Leases of dead owners. Returns the names of the pods.

    Raises ApiError, ApiLost.
    """
    # The pods first: a Lease is made before its pods.
    found = await listed(api, f"{OURS}=1")
    leases = await api.request("GET", api.path("leases", group=GROUP), query={"labelSelector": f"{OURS}=1"})
    known = {each["metadata"]["labels"].get(OWNER): each for each in leases["items"]}
    dead = [owner for owner, each in known.items() if await anyio.to_thread.run_sync(_is_dead, each)]
    pods = [
        pod["metadata"]["name"]
        for pod in found
        # Without a Lease: it was deleted, and the garbage collector has not come yet.
        if (owner := pod["metadata"]["labels"].get(OWNER)) in dead or owner not in known
        if not pod["metadata"].get("deletionTimestamp")
    ]
    if not dry_run:
        for name in pods:
            await delete(api, "pods", name, grace=GRACE)
        for owner in dead:
            await delete(api, "leases", known[owner]["metadata"]["name"], group=GROUP)
    return pods


def _is_dead(found: Object) -> bool:
    """Whether the owner of a Lease is dead. Blocks."""
    if is_dead((found["metadata"].get("annotations") or {}).get(PROCESS, "")):
        return True
    spec = found["spec"]
    try:
        renewed = datetime.datetime.fromisoformat(spec["renewTime"])
    except (KeyError, ValueError):
        return False
    age = (datetime.datetime.now(datetime.UTC) - renewed).total_seconds()
    return age > EXPIRED * int(spec.get("leaseDurationSeconds") or 60)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def cleanup_error(name: str, cause: object) -> CleanupError:
    return CleanupError(
        f"the pod {name} could not be removed: {cause}",
        remedy=f"once the cluster works again: `dutyfree gc`, or kubectl delete pod {name}",
    )
