"""Pods that run before they are asked for. Owners share them: whoever takes one marks it as its own.

A pod is taken by a patch that the server applies only while the pod is marked as ready, so two owners never
take the same one. Each owner keeps ``count`` pods of the kinds that it uses, and removes its unused ones when
it closes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict

import anyio

from dutyfree.contract.errors import CreateError
from dutyfree.substrates.kubernetes import status
from dutyfree.substrates.kubernetes.api import JSON_PATCH, Api, ApiError, ApiLost, Object
from dutyfree.substrates.kubernetes.ownership import KIND, OWNER, POOL, ROLE, Lease
from dutyfree.substrates.kubernetes.pods import PodKind, Pods
from dutyfree.substrates.kubernetes.watch import PodWatch

KINDS = 8
"""Kinds of pods that an owner keeps; those of the kind that was not used longest are removed."""

_REFUSED = (404, 409, 422)
"""Another owner was faster, or the pod is gone: 422 is a test of a patch that failed."""

_log = logging.getLogger(__name__)


class ReadyPods:
    """The pool of one owner, for up to KINDS kinds."""

    def __init__(self, api: Api, held: Lease, pods: Pods, pool: str, count: int) -> None:
        self.count = count
        self._api = api
        self._lease = held
        self._pods = pods
        self._shared = PodWatch(api, f"{ROLE}=ready,{POOL}={pool}")
        self._kinds: OrderedDict[str, PodKind] = OrderedDict()
        self._making: dict[str, asyncio.Task[None]] = {}
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
        try:
            for pod in self._candidates(label):
                if await self._claim(pod):
                    return str(pod["metadata"]["name"])
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
            self._kinds.popitem(last=False)
        return label

    def _candidates(self, label: str) -> list[Object]:
        """Ready pods of a kind. Our own come first, so that owners seldom want the same one."""
        own = self._own(label)
        names = {pod["metadata"]["name"] for pod in own}
        others = _of_kind(self._shared, label)
        return own + [pod for pod in others if pod["metadata"]["name"] not in names]

    def _own(self, label: str) -> list[Object]:
        return _of_kind(self._pods.watch, label)

    async def _claim(self, pod: Object) -> bool:
        """Make a pod ours, unless another owner was faster. Raises CreateError."""
        name = pod["metadata"]["name"]
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
        except ApiError as error:
            if error.status in _REFUSED:
                for watch in (self._shared, self._pods.watch):
                    watch.pods.pop(name, None)
                return False
            raise CreateError(f"the pod {name} could not be taken from the pool: {error}") from error
        except ApiLost as error:
            raise CreateError(str(error)) from error
        self._shared.pods.pop(name, None)
        self._pods.watch.pods[name] = taken
        return True

    def _refill(self, label: str) -> None:
        if label not in self._making and not self._closed and label in self._kinds:
            task = asyncio.get_running_loop().create_task(self._make_all(label))
            self._making[label] = task
            task.add_done_callback(lambda done: self._made(label, done))

    def _made(self, label: str, task: asyncio.Task[None]) -> None:
        self._making.pop(label, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            # The next request makes its own, and gets the error.
            _log.warning("no pod could be made for the pool: %s", error)

    async def _make_all(self, label: str) -> None:
        while (kind := self._kinds.get(label)) is not None and len(self._own(label)) < self.count:
            missing = self.count - len(self._own(label))
            await asyncio.gather(*(self._pods.make(kind, "ready", {}) for _ in range(missing)))

    async def close(self) -> None:
        """Make no more pods. The substrate removes those that nobody took."""
        self._closed = True
        with anyio.CancelScope(shield=True):
            making = [*self._making.values()]
            for task in making:
                task.cancel()
            await asyncio.gather(*making, return_exceptions=True)
            await self._shared.close()


def _of_kind(watch: PodWatch, label: str) -> list[Object]:
    """The ready pods of a kind that a watch knows."""
    return [
        pod
        for pod in watch.pods.values()
        if (labels := pod["metadata"]["labels"]).get(KIND) == label and labels.get(ROLE) == "ready"
        if _is_ready(pod)
    ]


def _is_ready(pod: Object) -> bool:
    return status.holds(pod, "Ready") and not pod["metadata"].get("deletionTimestamp")
