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
from dutyfree.substrates.kubernetes.api import (
    JSON_PATCH,
    MERGE_PATCH,
    Api,
    ApiError,
    ApiLost,
    Object,
)
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
EXPIRED, SKEW_SECONDS = 2, 600
"""A Lease is expired after this many times its duration, but not before these seconds: clocks of machines
differ."""
REFUSED = (404, 409, 422)
"""Another owner was faster, or the object is gone: 422 is a test of a patch that failed."""

_log = logging.getLogger(__name__)


class Lease:
    """The Lease of one opening."""

    def __init__(self, api: Api, seconds: int, process: str) -> None:
        """``process``: the identity of the owner's process."""
        self._api = api
        self._seconds = seconds
        self._process = process
        self.owner = uuid.uuid4().hex[:20]
        self.name = f"dutyfree-{self.owner}"
        self._uid = ""

    async def make(self) -> None:
        """Raises ApiError, ApiLost."""
        body = {
            "apiVersion": GROUP,
            "kind": "Lease",
            "metadata": {
                "name": self.name,
                "labels": {OURS: "1", OWNER: self.owner},
                "annotations": {PROCESS: self._process},
            },
            "spec": {
                "holderIdentity": self.owner,
                "leaseDurationSeconds": self._seconds,
                "renewTime": _now(),
            },
        }
        made = await self._api.request("POST", self._api.path("leases", group=GROUP), body=body)
        self._uid = made["metadata"]["uid"]

    @property
    def reference(self) -> Object:
        """The entry of ``ownerReferences`` of what it owns."""
        return {"apiVersion": GROUP, "kind": "Lease", "name": self.name, "uid": self._uid}

    async def renew(self) -> None:
        """Renew it for ever. A cluster that does not answer is asked again."""
        while True:
            await anyio.sleep(self._seconds / 4)
            try:
                await self._renew()
            except (ApiError, ApiLost) as error:
                _log.warning("the lease %s could not be renewed: %s", self.name, error)

    async def _renew(self) -> None:
        try:
            await self._api.request(
                "PATCH",
                self._api.path("leases", self.name, group=GROUP),
                body={"spec": {"renewTime": _now()}},
                content=MERGE_PATCH,
            )
        except ApiError as error:
            if error.status != 404:
                raise
            # Its pods go with it. New ones need a Lease that exists.
            _log.warning("the lease %s was deleted from outside; so are its pods", self.name)
            await self.make()


@asynccontextmanager
async def lease(api: Api, seconds: int) -> AsyncIterator[Lease]:
    """A Lease that is renewed until the end of the context, and deleted then. Raises ApiError, ApiLost."""
    process = await anyio.to_thread.run_sync(identity)
    held = Lease(api, seconds, process or "")
    await held.make()
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


async def withdraw(api: Api, pod: Object) -> bool:
    """Let nobody take a ready pod any more. False if it is gone, or somebody has taken it.

    A pod that is not ready is left as it is: only its owner uses it. Raises ApiError, ApiLost.
    """
    labels = pod["metadata"]["labels"]
    if labels.get(ROLE) != "ready":
        return True
    patch = [
        {"op": "test", "path": f"/metadata/labels/{ROLE}", "value": "ready"},
        {"op": "test", "path": f"/metadata/labels/{OWNER}", "value": labels[OWNER]},
        {"op": "replace", "path": f"/metadata/labels/{ROLE}", "value": "leaving"},
    ]
    try:
        await api.request("PATCH", api.path("pods", pod["metadata"]["name"]), body=patch, content=JSON_PATCH)
    except ApiError as error:
        if error.status in REFUSED:
            return False
        raise
    return True


# --- Leftovers --------------------------------------------------------------------------------------------


async def listed(api: Api, selector: str) -> list[Object]:
    """The pods that a selector finds. Raises ApiError, ApiLost."""
    found = await api.request("GET", api.path("pods"), query={"labelSelector": selector})
    return list(found["items"])


async def remove_leftovers(api: Api, *, dry_run: bool = False) -> list[tuple[str, str]]:
    """Remove the pods and the Leases of dead owners. Returns the kind and the name of each.

    Raises ApiError, ApiLost.
    """
    # The pods first: a Lease is made before its pods.
    found = await listed(api, f"{OURS}=1")
    listing = await api.request("GET", api.path("leases", group=GROUP), query={"labelSelector": f"{OURS}=1"})
    known = {each["metadata"]["labels"].get(OWNER): each for each in listing["items"]}
    dead = [owner for owner, each in known.items() if await anyio.to_thread.run_sync(_is_dead, each)]
    pods = [
        pod
        for pod in found
        # Without a Lease: it was deleted, and the garbage collector has not come yet.
        if (owner := pod["metadata"]["labels"].get(OWNER)) in dead or owner not in known
        if not pod["metadata"].get("deletionTimestamp")
    ]
    leases = [known[owner]["metadata"]["name"] for owner in dead]
    if not dry_run:
        for pod in [*pods]:
            if await withdraw(api, pod):
                await delete(api, "pods", pod["metadata"]["name"], grace=GRACE)
            else:
                pods.remove(pod)
        # Another process may have been faster.
        leases = [name for name in leases if await delete(api, "leases", name, group=GROUP)]
    return [*(("pod", pod["metadata"]["name"]) for pod in pods), *(("Lease", name) for name in leases)]


def _is_dead(found: Object) -> bool:
    """Whether the owner of a Lease is dead. Blocks."""
    # Nodes may be clones of one machine, and owners in pods have the machine id of their image.
    process = (found["metadata"].get("annotations") or {}).get(PROCESS, "")
    if is_dead(process, after_reboot=False):
        return True
    spec = found["spec"]
    try:
        renewed = datetime.datetime.fromisoformat(spec["renewTime"])
    except (KeyError, ValueError):
        return False
    age = (datetime.datetime.now(datetime.UTC) - renewed).total_seconds()
    return age > max(SKEW_SECONDS, EXPIRED * int(spec.get("leaseDurationSeconds") or 60))


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def cleanup_error(name: str, cause: object) -> CleanupError:
    return CleanupError(
        f"the pod {name} could not be removed: {cause}",
        remedy=f"once the cluster works again: `dutyfree gc`, or kubectl delete pod {name}",
    )
