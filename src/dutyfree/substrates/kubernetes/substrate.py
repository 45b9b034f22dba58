"""The substrate ``kubernetes``: opening a cluster, and creating pods."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from typing import Any, ClassVar

import anyio
import anyio.to_thread
import msgspec

from dutyfree.contract import Availability, Limits, Recipe, Span, limited
from dutyfree.contract.errors import ActionError, CleanupError, CreateError, SubstrateError, Unavailable
from dutyfree.contract.substrate import refuse_second_entry
from dutyfree.engine.launcher.client import BINARY
from dutyfree.engine.layers import run_stage
from dutyfree.engine.layers.command_defaults import WORKDIR, CommandDefaults, command_defaults
from dutyfree.engine.sandbox.guest import Guest, with_variables
from dutyfree.engine.sandbox.init_sandbox import InitSandbox
from dutyfree.engine.sandbox.lifecycle import to_the_end
from dutyfree.substrates.kubernetes import guest, status
from dutyfree.substrates.kubernetes.api import REMEDY, Api, ApiError, ApiLost, Object, connect
from dutyfree.substrates.kubernetes.config import KubernetesConfig
from dutyfree.substrates.kubernetes.images import Images
from dutyfree.substrates.kubernetes.ownership import OURS, OWNER, ROLE, Lease, lease, listed, remove_leftovers
from dutyfree.substrates.kubernetes.pods import NETWORK, PodKind, Pods, check_limits
from dutyfree.substrates.kubernetes.pool import ReadyPods
from dutyfree.substrates.kubernetes.sandbox import PodSandbox
from dutyfree.substrates.kubernetes.watch import PodWatch

POLICY = "dutyfree-no-network"
NETWORKING = "networking.k8s.io/v1"
NODES = 20
"""Of more nodes the limits are not asked for."""


class Kubernetes:
    """The provider of ``kubernetes``: entering it opens a cluster and gives a KubernetesSubstrate."""

    summary: ClassVar[str] = "pods of a Kubernetes cluster, one per sandbox"
    Config: ClassVar[type[msgspec.Struct]] = KubernetesConfig

    def __init__(self, config: KubernetesConfig | None = None) -> None:
        self._config = config or KubernetesConfig()
        self._stack = AsyncExitStack()
        self._is_open = False

    async def __aenter__(self) -> KubernetesSubstrate:
        refuse_second_entry(self._is_open, "kubernetes")
        async with AsyncExitStack() as stack:
            opened = await stack.enter_async_context(_opened(self._config))
            self._stack = stack.pop_all()
        self._is_open = True
        return opened

    async def __aexit__(self, *details: Any) -> bool | None:
        self._is_open = False
        return await self._stack.__aexit__(*details)

    @classmethod
    async def probe(cls, config: KubernetesConfig) -> Availability:
        if config.actions == "init" and not await anyio.Path(BINARY).exists():
            return Availability(False, f"{BINARY} is missing", "install a C compiler, and dutyfree again")
        try:
            api = await connect(config)
            try:
                version = await _version(api)
                await listed(api, f"{OURS}=1")
            finally:
                await api.close()
        except Unavailable as error:
            return Availability(False, error.message, error.remedy)
        except ApiError as error:
            return Availability(False, f"the cluster refuses: {error}", RIGHTS)
        except ApiLost as error:
            return Availability(False, str(error), REMEDY)
        return Availability(True, f"Kubernetes {version} at {api.server}, namespace {api.namespace}")


RIGHTS = "check that the namespace exists; give the account the rights that docs/kubernetes.md lists"


@asynccontextmanager
async def _opened(config: KubernetesConfig) -> AsyncIterator[KubernetesSubstrate]:
    async with AsyncExitStack() as stack:
        try:
            api = await connect(config)
            stack.push_async_callback(api.close)
            version = await _version(api)
            await remove_leftovers(api)
            held = await stack.enter_async_context(lease(api, config.lease_seconds))
            watch = PodWatch(api, f"{OWNER}={held.owner}")
            await watch.start()
            stack.push_async_callback(watch.close)
            substrate = KubernetesSubstrate(api, config, held, watch, version)
            await substrate.start()
        except ApiError as error:
            raise Unavailable(f"kubernetes: the cluster refuses: {error}", remedy=RIGHTS) from error
        except ApiLost as error:
            raise Unavailable(f"kubernetes: {error}", remedy=REMEDY) from error
        try:
            yield substrate
        finally:
            with anyio.CancelScope(shield=True):
                await substrate.close()


async def _version(api: Api) -> str:
    return str((await api.request("GET", "/version")).get("gitVersion", "unknown"))


class KubernetesSubstrate:
    """An open cluster."""

    name = "kubernetes"

    def __init__(
        self, api: Api, config: KubernetesConfig, held: Lease, watch: PodWatch, version: str
    ) -> None:
        self._api = api
        self._config = config
        self._lease = held
        self._version = version
        self._pods = Pods(api, config, held, watch)
        self._ready = ReadyPods(api, held, self._pods, config.pool, config.ready, config.lifetime_seconds)
        self._limits = Limits()
        """Those of the last request: ready pods are made for them."""
        self._images = Images(api, config)
        self._defaults: dict[str, CommandDefaults] = {}
        """By image: how commands run in it."""
        self._program = b""
        self._address: str | None = None
        self._node_pids = 0
        self._policy = ""

    @property
    def owner(self) -> str:
        """The label, ``name=value``, of every pod that this opening owns."""
        return f"{OWNER}={self._lease.owner}"

    @property
    def host_address(self) -> str | None:
        """Where pods reach this machine: known if it is a node."""
        return self._address

    async def start(self) -> None:
        """Raises ApiError, ApiLost, Unavailable."""
        if self._config.actions == "init":
            try:
                self._program = await anyio.to_thread.run_sync(BINARY.read_bytes)
            except OSError as error:
                raise Unavailable(
                    f"{BINARY} is missing", remedy="install a C compiler, and dutyfree again"
                ) from error
        nodes = await _nodes(self._api)
        self._address = _own_address(nodes)
        self._node_pids = await _pids_limit(self._api, nodes)
        self._policy = await self._restrict()
        await self._ready.start()

    async def _restrict(self) -> str:
        """Ask the cluster to close the network of pods that have none. Returns whether it accepted."""
        body = {
            "apiVersion": NETWORKING,
            "kind": "NetworkPolicy",
            "metadata": {"name": POLICY, "labels": {OURS: "1"}},
            "spec": {
                "podSelector": {"matchLabels": {OURS: "1", NETWORK: "off"}},
                "policyTypes": ["Ingress", "Egress"],
            },
        }
        try:
            await self._api.request("POST", self._api.path("networkpolicies", group=NETWORKING), body=body)
        except ApiError as error:
            if error.status == 409:  # there is one
                return "asked for"
            if self._config.isolated_network:
                raise
            return f"refused: {error}"
        return "asked for"

    async def prepare(self, recipe: Recipe | None = None) -> None:
        """Build and push the image if it is ours, and fill the pool. Raises CreateError, StageError."""
        run_stage.refuse_services(recipe, self.name)
        image, _ = await self._images.of(recipe or Recipe())
        if self._config.ready:
            await self._ready.fill(self._kind(image, self._limits))

    async def settle(self) -> None:
        """Wait until all pods of the pool are ready. See ``abilities.Settling``."""
        await self._ready.settle()

    @asynccontextmanager
    async def sandbox(
        self,
        recipe: Recipe | None = None,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AsyncIterator[InitSandbox | PodSandbox]:
        run_stage.refuse_services(recipe, self.name)
        recipe, limits = recipe or Recipe(), limited(limits, Limits())
        check_limits(limits, node_pids=self._node_pids, isolated_network=self._config.isolated_network)
        self._limits = limits
        image, rest = await self._images.of(recipe)
        kind = self._kind(image, limits)
        begun = time.perf_counter()
        name, spans = await self._pod(kind, labels or {}, begun)
        made = self._with_init if self._config.actions == "init" else self._with_exec
        async with self._removed(name), made(name, kind, rest, _Clock(begun, spans)) as sandbox:
            yield sandbox

    @asynccontextmanager
    async def _with_init(
        self, name: str, kind: PodKind, recipe: Recipe, clock: _Clock
    ) -> AsyncIterator[InitSandbox]:
        program = self._program if kind.program == "stream" else b""
        try:
            with anyio.fail_after(self._config.create_seconds):
                joined = await guest.joined(self._api, self._pods, name, program)
        except TimeoutError:
            seconds = self._config.create_seconds
            raise CreateError(f"init of the pod {name} does not answer after {seconds:g} s") from None
        try:
            clock.mark("init")
            known = await self._known(joined, name, kind)
            sandbox = joined.sandbox(known, kind.limits)
            if recipe.stages:
                await run_stage.apply_all(sandbox, recipe)
                clock.mark("stages")
            if variables := recipe.variables(WORKDIR, known.environment.get("PATH", "")):
                sandbox = joined.sandbox(with_variables(known, variables), kind.limits)
            sandbox.spans = clock.spans
            try:
                yield sandbox
            finally:
                sandbox.abandon()
        finally:
            joined.close()

    @asynccontextmanager
    async def _with_exec(
        self, name: str, kind: PodKind, recipe: Recipe, clock: _Clock
    ) -> AsyncIterator[PodSandbox]:
        sandbox = PodSandbox(self._api, self._pods, name, kind.limits)
        try:
            if recipe.stages:
                await run_stage.apply_all(sandbox, recipe)
                clock.mark("stages")
            path = ""
            if recipe.path:
                path = (await sandbox.exec('printf %s "$PATH"')).stdout.decode(errors="surrogateescape")
            sandbox.variables = recipe.variables(WORKDIR, path)
            sandbox.spans = clock.spans
            yield sandbox
        finally:
            sandbox.close()

    def _kind(self, image: str, limits: Limits) -> PodKind:
        if self._config.actions == "exec":
            return PodKind(image, limits, "")
        if self._config.program != "auto":
            return PodKind(image, limits, self._config.program)
        return PodKind(image, limits, "image" if self._images.has_init(image) else "stream")

    async def _pod(
        self, kind: PodKind, labels: Mapping[str, str], begun: float
    ) -> tuple[str, tuple[Span, ...]]:
        """A pod of the pool, or a new one. Only a new one can have labels. Raises CreateError."""
        if self._config.ready and not labels and (name := await self._ready.take(kind)) is not None:
            return name, (Span("ready", 0.0, time.perf_counter() - begun),)
        made = await self._pods.make(kind, "sandbox", labels)
        return made.name, made.spans

    @asynccontextmanager
    async def _removed(self, name: str) -> AsyncIterator[None]:
        """Remove the pod at the end. Raises CleanupError; an earlier error passes instead."""
        succeeded = False
        try:
            yield
            succeeded = True
        finally:
            with nullcontext() if succeeded else suppress(CleanupError):
                await to_the_end(self._pods.remove(name))

    async def _known(self, joined: Guest, name: str, kind: PodKind) -> CommandDefaults:
        """How commands run in an image: init has the environment that the cluster gives to a container."""
        known = self._defaults.get(kind.image)
        if known is None:
            try:
                given = await joined.sandbox(command_defaults(), kind.limits).read("/proc/1/environ")
            except (ActionError, SubstrateError) as error:
                raise CreateError(f"the environment of the pod {name} cannot be read: {error}") from error
            pairs = [entry.partition("=") for entry in os.fsdecode(given).split("\0") if entry]
            env = {key: value for key, _, value in pairs if not key.startswith("KUBERNETES_")}
            known = self._defaults[kind.image] = command_defaults(env)
        return with_variables(known, {"HOSTNAME": name})

    async def close(self) -> None:
        """Remove all pods that are left. What cannot be removed is left to the Lease."""
        await self._images.close()
        await self._ready.close()
        await self._pods.close()

    async def sandboxes(self) -> list[str]:
        """The ids of the sandboxes that exist now. Raises ApiError, ApiLost."""
        found = await listed(self._api, f"{self.owner},{ROLE}=sandbox")
        return [pod["metadata"]["name"] for pod in found if not status.is_removed(pod)]

    async def facts(self) -> dict[str, str]:
        config = self._config
        facts = {
            "kubernetes": self._version,
            "server": self._api.server,
            "namespace": self._api.namespace,
            "actions": config.actions,
            "program": config.program if config.actions == "init" else "",
            "runtime class": config.runtime_class,
            "ready": str(config.ready),
            "enforces": "cpu, memory" + (f", {self._node_pids} pids" if self._node_pids else ""),
            "network policy": self._policy
            + ("" if config.isolated_network else "; whether it is enforced is not known"),
            "image": (await self._images.of(Recipe()))[0],
            "recipes": await self._images.builds(),
        }
        async with self.sandbox() as sandbox:
            pod = self._pods.watch.pods[sandbox.id]
            facts |= await _node_facts(self._api, pod)
            seen = await sandbox.exec("uname -r; stat -f -c %T .")
            lines = [*seen.stdout.decode(errors="replace").splitlines(), "", ""]
            facts |= {"kernel": lines[0], "storage": lines[1]}
            return facts | await run_stage.tools(sandbox)


class _Clock:
    """Adds spans to those of the pod's creation, one after the other."""

    def __init__(self, zero: float, spans: tuple[Span, ...]) -> None:
        self._zero = zero
        self.spans = spans

    def mark(self, name: str) -> None:
        """The time since the last span."""
        last = self.spans[-1]
        start = last.start + last.seconds
        self.spans += (Span(name, start, time.perf_counter() - self._zero - start),)


async def _node_facts(api: Api, pod: Object) -> dict[str, str]:
    """The node of a pod, as far as the account may read it."""
    name = pod["spec"].get("nodeName", "")
    held = (pod["status"].get("containerStatuses") or [{}])[0]
    facts = {"node": name, "image id": held.get("imageID", "")}
    with suppress(ApiError, ApiLost):
        info = (await api.request("GET", f"/api/v1/nodes/{name}"))["status"]["nodeInfo"]
        facts |= {"runtime": info["containerRuntimeVersion"], "kubelet": info["kubeletVersion"]}
    return facts


async def _nodes(api: Api) -> list[Object]:
    """The nodes of the cluster, if the account may list them."""
    with suppress(ApiError, ApiLost):
        return list((await api.request("GET", "/api/v1/nodes"))["items"])
    return []


def _own_address(nodes: list[Object]) -> str | None:
    """The address of this machine as a node of the cluster, if it is one."""
    for node in nodes:
        for each in node["status"].get("addresses") or ():
            if each["type"] == "InternalIP" and _is_local(each["address"]):
                return str(each["address"])
    return None


async def _pids_limit(api: Api, nodes: list[Object]) -> int:
    """How many processes every node grants to a pod; 0 without a limit, or if the account may not ask."""
    found = []
    for node in nodes[:NODES]:
        path = f"/api/v1/nodes/{node['metadata']['name']}/proxy/configz"
        try:
            found.append((await api.request("GET", path))["kubeletconfig"].get("podPidsLimit", 0))
        except (ApiError, ApiLost, KeyError):
            return 0
    return max(found) if found and len(nodes) <= NODES and min(found) > 0 else 0


def _is_local(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
