"""Make pods, follow them until they run, and remove them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import re
import time
import uuid
from collections.abc import Coroutine, Mapping
from typing import Any, Literal, NamedTuple

import anyio
import msgspec

from dutyfree.contract import Limits, Span
from dutyfree.contract.errors import CleanupError, CreateError
from dutyfree.engine.launcher.client import BINARY
from dutyfree.engine.layers.command_defaults import WORKDIR
from dutyfree.substrates.kubernetes import status
from dutyfree.substrates.kubernetes.api import Api, ApiError, ApiLost, Object
from dutyfree.substrates.kubernetes.config import KubernetesConfig
from dutyfree.substrates.kubernetes.ownership import (
    GRACE,
    KIND,
    OURS,
    OWNER,
    POOL,
    ROLE,
    Lease,
    cleanup_error,
    delete,
    withdraw,
)
from dutyfree.substrates.kubernetes.watch import PodWatch
from dutyfree.substrates.local.lifecycle import uninterrupted

DIRECTORY = "/.dutyfree"
PROGRAM = f"{DIRECTORY}/init"
NETWORK = "dutyfree.network"
"""The label of pods to which our NetworkPolicy applies, if its value is "off"."""
LABELS = "dutyfree.labels"
"""The annotation with the caller's labels: those of Kubernetes cannot have every text."""

# PID 1 until init is there. A deletion of the pod does not wait for it.
_WAIT = (
    f"trap 'exit 0' TERM; mkfifo {DIRECTORY}/go 2>/dev/null; read -r line <{DIRECTORY}/go; exec {PROGRAM} pod"
)
# PID 1 with an exec for each action. It reaps, and does nothing.
IDLE_SECONDS = 2147483647
_IDLE = f"trap 'exit 0' TERM; while :; do sleep {IDLE_SECONDS} & wait $!; done"

DROPPED = ("AUDIT_WRITE", "MKNOD", "NET_RAW")
"""Usual capabilities that no sandbox needs. With raw sockets, one pod can pretend to be another."""

LATE_SECONDS = 120.0
"""How long after a request without a clear answer its pod may still appear."""

_log = logging.getLogger(__name__)

_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


class PodKind(NamedTuple):
    """What pods have in common that can stand for each other."""

    image: str
    limits: Limits
    program: Literal["stream", "host", "image", ""]
    """How init comes into the pod; "" without one."""


class Pod(NamedTuple):
    """A pod that runs."""

    name: str
    spans: tuple[Span, ...]


class Pods:
    """Makes the pods of one opening."""

    def __init__(self, api: Api, config: KubernetesConfig, held: Lease, watch: PodWatch) -> None:
        self._api = api
        self._config = config
        self._lease = held
        self._removing: set[asyncio.Task[None]] = set()
        self.watch = watch

    async def make(self, kind: PodKind, role: str, labels: Mapping[str, str]) -> Pod:
        """Make a pod and wait until it runs. Raises CreateError."""
        zero = time.perf_counter()
        body = self._body(kind, role, labels)
        name = body["metadata"]["name"]
        marks: dict[str, float] = {}

        def look(pod: Object | None) -> None:
            for step, condition in status.STEPS.items():
                if pod is not None and step not in marks and status.holds(pod, condition):
                    marks[step] = time.perf_counter()

        async def discard(made: Object) -> None:
            self.watch.pods.setdefault(name, made)
            with anyio.CancelScope(shield=True), contextlib.suppress(ApiError, ApiLost, CleanupError):
                await self._discard(name)

        with self.watch.listening(name, look):
            made = await uninterrupted(self._create(body, role), discard)
            marks["create"] = time.perf_counter()
            self.watch.pods.setdefault(name, made)
            try:
                await self._running(name)
            except BaseException:
                await discard(made)
                raise
        return Pod(name, _spans(zero, marks))

    async def _create(self, body: Object, role: str) -> Object:
        try:
            return await self._api.request("POST", self._api.path("pods"), body=body)
        except (ApiError, ApiLost) as error:
            # The pool uses a ready one as soon as it sees it.
            if error.may_be_done and role == "sandbox":
                self.remove_late(body["metadata"]["name"])
            if isinstance(error, ApiLost):
                raise CreateError(str(error)) from error
            raise CreateError(f"the cluster refused the pod: {error}", remedy=_remedy(error)) from error

    async def _running(self, name: str) -> None:
        def judge(pod: Object | None) -> bool | None:
            if pod is None:
                raise CreateError(f"the pod {name} was deleted before it was ready")
            if (error := status.failure(pod)) is not None:
                raise error
            return status.holds(pod, "Ready") or None

        try:
            with anyio.fail_after(self._config.create_seconds):
                await self.watch.until(name, judge)
        except TimeoutError:
            raise status.late(
                self.watch.pods.get(name) or {"metadata": {"name": name}}, self._config.create_seconds
            ) from None

    async def remove(self, name: str) -> None:
        """Delete a pod, and wait until its processes have ended. Raises CleanupError.

        Its node frees the rest some seconds later, and then the cluster forgets the pod.
        """

        def judge(pod: Object | None) -> bool | None:
            return True if pod is None or status.is_removed(pod) else None

        try:
            with anyio.fail_after(self._config.remove_seconds):
                if await delete(self._api, "pods", name, grace=GRACE):
                    await self.watch.until(name, judge)
        except TimeoutError as error:
            raise cleanup_error(name, f"it exists after {self._config.remove_seconds:g} s") from error
        except (ApiError, ApiLost) as error:
            raise cleanup_error(name, error) from error

    def remove_soon(self, name: str) -> None:
        """Remove a pod in the background, unless another owner takes it before."""
        self._start(self._discard(name))

    def remove_late(self, name: str) -> asyncio.Task[None]:
        """Remove a pod as soon as it is there, and ours: whether a request for it was done is not known."""
        return self._start(self._seen_and_removed(name))

    async def _discard(self, name: str) -> None:
        """Remove a pod, unless another owner has taken it. Raises ApiError, ApiLost, CleanupError."""
        pod = self.watch.pods.get(name)
        if pod is not None and await withdraw(self._api, pod):
            await self.remove(name)

    async def _seen_and_removed(self, name: str) -> None:
        def judge(pod: Object | None) -> bool | None:
            return True if pod is not None and pod["metadata"]["labels"].get(ROLE) == "sandbox" else None

        with anyio.move_on_after(LATE_SECONDS):
            await self.watch.until(name, judge)
            await self.remove(name)

    def _start(self, removal: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(removal)
        self._removing.add(task)
        task.add_done_callback(self._removed)
        return task

    def _removed(self, task: asyncio.Task[None]) -> None:
        self._removing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("a pod could not be removed: %s", error)

    async def close(self) -> None:
        """Remove all pods that are left. What cannot be removed is left to the Lease."""
        for task in [*self._removing]:
            task.cancel()
        for name in [*self.watch.pods]:
            self.remove_soon(name)
        while self._removing:
            await asyncio.wait([*self._removing])

    # --- The pod ----------------------------------------------------------------------------------------

    def kind_label(self, kind: PodKind) -> str:
        """The same for all owners whose pods of a kind are the same."""
        plain = self._spec(kind)
        return hashlib.sha256(msgspec.json.encode([plain, kind.limits.network], order="sorted")).hexdigest()[
            :32
        ]

    def _body(self, kind: PodKind, role: str, labels: Mapping[str, str]) -> Object:
        own = {OURS: "1", OWNER: self._lease.owner, ROLE: role, NETWORK: kind.limits.network or "off"}
        if role == "ready":
            own |= {POOL: self._config.pool, KIND: self.kind_label(kind)}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"dutyfree-{uuid.uuid4().hex[:16]}",
                "labels": {**{k: v for k, v in labels.items() if _is_label(k, v)}, **own},
                "annotations": {LABELS: msgspec.json.encode(dict(labels)).decode()} if labels else {},
                "ownerReferences": [self._lease.reference],
            },
            "spec": self._spec(kind),
        }

    def _spec(self, kind: PodKind) -> Object:
        config = self._config
        container: Object = {
            "name": status.CONTAINER,
            "image": kind.image,
            "imagePullPolicy": config.pull_policy,
            "workingDir": WORKDIR,
            "env": [{"name": "HOME", "value": WORKDIR}],
            "resources": self._resources(kind.limits),
            "securityContext": {"capabilities": {"drop": list(DROPPED)}},
        }
        spec: Object = {
            "containers": [container],
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": GRACE,
            "activeDeadlineSeconds": config.lifetime_seconds,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        }
        if kind.program:
            _add_init(kind.program, container, spec)
        else:
            container["command"] = ["/bin/sh", "-c", _IDLE]
        for field, value in (
            ("runtimeClassName", config.runtime_class),
            ("nodeSelector", config.node_selector),
            ("tolerations", list(config.tolerations)),
            ("imagePullSecrets", [{"name": name} for name in config.pull_secrets]),
        ):
            if value:
                spec[field] = value
        return spec

    def _resources(self, limits: Limits) -> Object:
        bound: dict[str, str] = {}
        if limits.cpus is not None:
            bound["cpu"] = f"{math.ceil(limits.cpus * 1000)}m"
        if limits.memory is not None:
            bound["memory"] = str(limits.memory)
        asked: dict[str, str] = {}
        if self._config.request_cpus is not None:
            asked["cpu"] = f"{math.ceil(self._config.request_cpus * 1000)}m"
        if self._config.request_memory is not None:
            asked["memory"] = str(self._config.request_memory)
        return {**({"limits": bound} if bound else {}), **({"requests": asked} if asked else {})}


def _add_init(program: str, container: Object, spec: Object) -> None:
    container["securityContext"]["runAsUser"] = 0
    container["command"] = [PROGRAM, "pod"]
    if program == "stream":
        container["command"] = ["/bin/sh", "-c", _WAIT]
        container["volumeMounts"] = [{"name": "init", "mountPath": DIRECTORY}]
        spec["volumes"] = [{"name": "init", "emptyDir": {}}]
    elif program == "host":
        container["volumeMounts"] = [{"name": "init", "mountPath": PROGRAM, "readOnly": True}]
        spec["volumes"] = [{"name": "init", "hostPath": {"path": str(BINARY), "type": "File"}}]


def check_limits(limits: Limits, *, node_pids: int, isolated_network: bool) -> None:
    """Raises CreateError for a limit that a pod cannot have.

    ``node_pids``: how many processes every node grants to a pod; 0 if that is not known.
    """
    if limits.pids is not None and not 0 < node_pids <= limits.pids:
        raise CreateError(
            f"kubernetes cannot limit pids of one pod, and the nodes grant {node_pids or 'no known number'}",
            remedy="set podPidsLimit of the kubelets to the limit, or leave it out",
        )
    if limits.disk is not None:
        raise CreateError(
            "kubernetes cannot limit the disk of a pod: it only evicts pods that exceed a limit",
            remedy="leave it out, or use the substrate native",
        )
    if isinstance(limits.network, tuple):
        raise CreateError(
            "kubernetes cannot limit the network to a list of names",
            remedy='use "on" or "off", or the substrate native',
        )
    if limits.network == "off" and not isolated_network:
        raise CreateError(
            "whether this cluster can close the network of a pod is not known",
            remedy="if its network plugin enforces NetworkPolicy, open it with isolated_network=True, "
            "or on the command line: --option isolated_network=true",
        )


def _is_label(name: str, value: Any) -> bool:
    return bool(name and _LABEL.fullmatch(name) and _LABEL.fullmatch(value))


def _spans(zero: float, marks: Mapping[str, float]) -> tuple[Span, ...]:
    """One span after the other. What the watch told of together has no time of its own."""
    spans, last = [], zero
    for step in ("create", *status.STEPS):
        end = max(last, marks.get(step, last))
        spans.append(Span(step, last - zero, end - last))
        last = end
    return tuple(spans)


def _remedy(error: ApiError) -> str:
    if "exceeded quota" in error.message:
        return "remove other pods, or raise the namespace's quota"
    if error.status == 403 and "cannot create resource" in error.message:
        return "give the account the rights that docs/kubernetes.md lists"
    return ""
