"""Pods that run before they are asked for. Owners share them: whoever takes one marks it as its own.

A pod is taken by a patch that the server applies only while the pod is marked as ready, so two owners never
take the same one. Each owner keeps ``count`` pods of the kinds that it uses, and removes its unused ones when
it closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Collection

import anyio

from dutyfree.contract.errors import CleanupError, CreateError
from dutyfree.substrates.kubernetes import status
from dutyfree.substrates.kubernetes.api import JSON_PATCH, Api, ApiError, ApiLost, Object
from dutyfree.substrates.kubernetes.ownership import KIND, OWNER, POOL, REFUSED, ROLE, Lease
from dutyfree.substrates.kubernetes.pods import PodKind, Pods
from dutyfree.substrates.kubernetes.watch import PodWatch
from dutyfree.substrates.local.lifecycle import uninterrupted

KINDS = 8
"""Kinds of pods that an owner keeps; those of the kind that was not used longest are removed."""

_log = logging.getLogger(__name__)


class ReadyPods:
    """The pool of one owner, for up to KINDS kinds."""

    def __init__(self, api: Api, held: Lease, pods: Pods, pool: str, count: int, lifetime: float) -> None:
        """``lifetime``: the seconds after which the cluster ends a pod. No ready one is older than half."""
        self.count = count
        self._lifetime = lifetime
        self._api = api
        self._lease = held
        self._pods = pods
        self._shared = PodWatch(api, f"{ROLE}=ready,{POOL}={pool}")
        self._kinds: OrderedDict[str, PodKind] = OrderedDict()
        self._making: dict[str, asyncio.Task[None]] = {}
        self._claiming: set[str] = set()
        """Pods that a request of this owner is just taking, so that no other one tries it."""
        self._unclear: set[str] = set()
        """Pods that may be ours: the answer to a request for them did not say. Then they are removed."""
        self._closed = False

    def __repr__(self) -> str:
        return f"<{sum(map(_is_ready, self._shared.pods.values()))} pods ready>"

    async def start(self) -> None:
        """Raises ApiError, ApiLost."""
        if self.count:
            await self._shared.start()

    async def take(self, kind: PodKind) -> str | None:
        """The name of a pod that is ours from now on; None if none is ready.

        Others are made in the background. Raises CreateError.
        """
        label = self._use(kind)
        tried: set[str] = set()
        try:
            while (name := self._candidate(label, tried)) is not None:
                tried.add(name)
                if await self._claim(name):
                    return name
        finally:
            self._refill(label)
        return None

    async def fill(self, kind: PodKind) -> None:
        """Wait until all pods of a kind are ready. Raises CreateError."""
        label = self._use(kind)
        self._refill(label)
        if (task := self._making.get(label)) is not None:
            await asyncio.shield(task)

    async def settle(self) -> None:
        """Wait until no pod is being made in the background."""
        while self._making:
            await asyncio.wait([*self._making.values()])

    def _use(self, kind: PodKind) -> str:
        label = self._pods.kind_label(kind)
        self._kinds[label] = kind
        self._kinds.move_to_end(label)
        while len(self._kinds) > KINDS:
            unused, _ = self._kinds.popitem(last=False)
            self._drop(unused)
        return label

    def _drop(self, label: str) -> None:
        """Remove our ready pods of a kind in the background."""
        for pod in self._own(label):
            self._pods.remove_soon(pod["metadata"]["name"])

    def _candidate(self, label: str, tried: Collection[str]) -> str | None:
        """A ready pod of a kind. Our own come first, so that owners seldom want the same one."""
        for pod in (*self._own(label), *self._of_kind(self._shared, label)):
            name = str(pod["metadata"]["name"])
            if name not in tried and name not in self._claiming and name not in self._unclear:
                return name
        return None

    def _own(self, label: str) -> list[Object]:
        return self._of_kind(self._pods.watch, label)

    def _of_kind(self, watch: PodWatch, label: str) -> list[Object]:
        """The ready pods of a kind that a watch knows."""
        return [
            pod
            for pod in watch.pods.values()
            if (labels := pod["metadata"]["labels"]).get(KIND) == label and labels.get(ROLE) == "ready"
            if _is_ready(pod) and not self._is_spent(pod)
        ]

    def _is_spent(self, pod: Object) -> bool:
        """Whether a pod has ended, or would end too soon: its lifetime began when it was made."""
        return status.has_ended(pod) or status.age(pod) > self._lifetime / 2

    async def _claim(self, name: str) -> bool:
        """Make a pod ours, unless another owner was faster. Raises CreateError."""
        self._claiming.add(name)
        try:
            taken = await uninterrupted(self._marked(name), self._give_up)
        finally:
            self._claiming.discard(name)
        if taken is None:
            return False
        if not _is_ready(taken):  # it ended, or was deleted, a moment ago
            self._pods.remove_soon(name)
            return False
        return True

    async def _give_up(self, taken: Object | None) -> None:
        """Remove a pod that we took for a request that was cancelled."""
        if taken is not None:
            with contextlib.suppress(CleanupError):
                await self._pods.remove(taken["metadata"]["name"])

    async def _marked(self, name: str) -> Object | None:
        """The pod, marked as ours; None if another owner was faster. Raises CreateError."""
        patch = [
            {"op": "test", "path": f"/metadata/labels/{ROLE}", "value": "ready"},
            {"op": "replace", "path": f"/metadata/labels/{ROLE}", "value": "sandbox"},
            {"op": "replace", "path": f"/metadata/labels/{OWNER}", "value": self._lease.owner},
            {"op": "replace", "path": "/metadata/ownerReferences", "value": [self._lease.reference]},
        ]
        try:
            taken = await self._api.request(
                "PATCH", self._api.path("pods", name), body=patch, content=JSON_PATCH
            )
        except (ApiError, ApiLost) as error:
            if isinstance(error, ApiError) and error.status in REFUSED:
                self._shared.pods.pop(name, None)
                return None
            if error.may_be_done:
                self._unclear.add(name)
                self._pods.remove_late(name).add_done_callback(lambda _: self._unclear.discard(name))
            raise CreateError(f"the pod {name} could not be taken from the pool: {error}") from error
        self._shared.pods.pop(name, None)
        known = self._pods.watch.pods.get(name)
        if known is None or known["metadata"]["labels"].get(ROLE) == "ready":  # the watch is not that far
            self._pods.watch.pods[name] = taken
        return taken

    def _refill(self, label: str) -> None:
        for pod in self._pods.watch.pods.values():
            labels = pod["metadata"]["labels"]
            if labels.get(KIND) == label and labels.get(ROLE) == "ready" and self._is_spent(pod):
                self._pods.remove_soon(pod["metadata"]["name"])
        if label not in self._making and not self._closed and label in self._kinds:
            task = asyncio.get_running_loop().create_task(self._make_all(label))
            self._making[label] = task
            task.add_done_callback(lambda done: self._made(label, done))

    def _made(self, label: str, task: asyncio.Task[None]) -> None:
        self._making.pop(label, None)
        if label not in self._kinds:
            self._drop(label)
        if not task.cancelled() and (error := task.exception()) is not None:
            # The next request makes its own, and gets the error.
            _log.warning("no pod could be made for the pool: %s", error)

    async def _make_all(self, label: str) -> None:
        while (kind := self._kinds.get(label)) is not None and len(self._own(label)) < self.count:
            missing = self.count - len(self._own(label))
            making = (self._pods.make(kind, "ready", {}) for _ in range(missing))
            made = await asyncio.gather(*making, return_exceptions=True)  # all end, whatever fails
            for one in made:
                if isinstance(one, BaseException):
                    raise one

    async def close(self) -> None:
        """Make no more pods. The substrate removes those that nobody took."""
        self._closed = True
        with anyio.CancelScope(shield=True):
            making = [*self._making.values()]
            for task in making:
                task.cancel()
            await asyncio.gather(*making, return_exceptions=True)
            await self._shared.close()


def _is_ready(pod: Object) -> bool:
    return status.holds(pod, "Ready") and not pod["metadata"].get("deletionTimestamp")
