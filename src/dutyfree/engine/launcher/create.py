"""Create a sandbox: check the limits, and send the request to the launcher."""

from __future__ import annotations

import os
import socket
from time import perf_counter

from dutyfree.contract import Limits, Span
from dutyfree.contract.errors import CreateError, LimitError
from dutyfree.engine.host import capacity
from dutyfree.engine.host.features import HostFeatures
from dutyfree.engine.launcher import disk_storage, protocol
from dutyfree.engine.launcher.client import Launcher, LauncherError
from dutyfree.engine.launcher.disk_storage import DiskStorage
from dutyfree.engine.launcher.handle import SandboxHandle
from dutyfree.engine.launcher.isolation import FULL_ISOLATION, Isolation
from dutyfree.engine.launcher.protocol import CreateFlag, Request, Tree
from dutyfree.engine.launcher.timeouts import DEFAULT_TIMEOUTS, Timeouts

DEFAULT_PIDS = 2048
"""Limit on processes by default: enough for builds, and a fork bomb does not reach the host's limit."""
LEAST_MEMORY = 1 << 20
"""Bytes that the smallest program needs."""
LEAST_CPUS = 0.01
"""The smallest share of a CPU that the kernel can enforce."""

CACHED_REQUESTS = 256


class SandboxCreator:
    """Creates the sandboxes of one launcher."""

    def __init__(
        self,
        launcher: Launcher,
        features: HostFeatures,
        isolation: Isolation = FULL_ISOLATION,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        storage: DiskStorage | None = None,
    ) -> None:
        self._launcher = launcher
        self._storage = storage
        self._features = features
        self._isolation = isolation
        self._timeouts = timeouts
        self._requests: dict[tuple[tuple[Tree, ...], Limits, bool], bytes] = {}

    def body(self, trees: tuple[Tree, ...], limits: Limits, *, building: bool = False) -> bytes:
        """The request for a sandbox on these layers, without its label. Raises LimitError, CreateError.

        ``building``: for one in which stages run. They may write everywhere.
        """
        key = (trees, limits, building)
        body = self._requests.get(key)
        if body is None:
            body = encode_request(
                self._features,
                trees,
                limits,
                self._isolation,
                building=building,
                on_disk=self._storage is not None,
            )
            # Snapshots come and go, and each is used a few times only.
            if len(self._requests) >= CACHED_REQUESTS:
                self._requests.clear()
            self._requests[key] = body
        return body

    async def start(self, identity: str, body: bytes, limits: Limits) -> tuple[socket.socket, SandboxHandle]:
        """Start a sandbox: the connection to its init, and the handle that ends it. Raises CreateError."""
        disk = disk_storage.limit_of(limits.disk)
        if self._storage is not None:
            await self._storage.provide(disk)
        try:
            reply = await self._launcher.ask(Request.CREATE, 0, body)
        except LauncherError as error:
            if self._storage is not None and error.message.startswith(disk_storage.NOT_RESERVED):
                raise await self._storage.refusal(error, disk) from error
            raise CreateError(
                f"no sandbox could be made: {error.message}", remedy=capacity.remedy(error.number)
            ) from error
        if len(reply.descriptors) < 2:  # the kernel drops descriptors above our limit
            for descriptor in reply.descriptors:
                os.close(descriptor)
            self._launcher.tell(Request.DESTROY, reply.value)
            raise CreateError(
                f"no sandbox could be made: this process has too many open files, {capacity.open_files()}",
                remedy=capacity.RAISE_OPEN_FILES,
            )
        connected, pidfd = reply.descriptors
        os.close(pidfd)  # the launcher has one too, and reaps the process
        handle = SandboxHandle(
            self._launcher, reply.value, identity, freezer=self._features.freezer, timeouts=self._timeouts
        )
        return socket.socket(fileno=connected), handle

    async def adopt(self, identity: str, number: int) -> tuple[socket.socket, SandboxHandle, float]:
        """A sandbox of a former owner, and when its lease ends (``time.monotonic``). Raises CreateError."""
        try:
            reply = await self._launcher.ask(Request.ADOPT, number)
        except LauncherError as error:
            raise CreateError(f"sandbox {identity} cannot be adopted: {error.message}") from error
        connected, *rest = reply.descriptors
        for descriptor in rest:
            os.close(descriptor)
        (until,) = protocol.NANOSECONDS.unpack(reply.text)
        handle = SandboxHandle(
            self._launcher, number, identity, freezer=self._features.freezer, timeouts=self._timeouts
        )
        return socket.socket(fileno=connected), handle, until / 1e9


def spans(asked: float, begun: float, times: tuple[int, ...]) -> tuple[Span, ...]:
    """The spans of a creation; ``times`` are those that init reports."""
    ordered, mounted = times[-2:]
    at = [max(0.0, moment / 1e9 - asked) for moment in (ordered, mounted)]
    done = perf_counter() - asked
    return (
        Span("prepare", 0.0, begun - asked),
        Span("dispatch", begun - asked, at[0] - (begun - asked)),
        Span("mount", at[0], at[1] - at[0]),
        Span("return", at[1], done - at[1]),
    )


def next_span(asked: float, spans: tuple[Span, ...], name: str) -> Span:
    """A span from the end of the last one until now."""
    start = spans[-1].start + spans[-1].seconds
    return Span(name, start, perf_counter() - asked - start)


def check_limits(limits: Limits, *, on_disk: bool = False) -> None:
    """Raises LimitError for limits that no host can enforce. ``on_disk``: written files go to disk."""
    if limits.memory is not None and limits.memory < LEAST_MEMORY:
        raise LimitError(f"no program runs in {limits.memory} bytes", remedy="allow at least 1M")
    if limits.cpus is not None and limits.cpus < LEAST_CPUS:
        raise LimitError(f"the kernel cannot limit to {limits.cpus} cpus", remedy="allow at least 0.01")
    if on_disk or limits.disk is None or limits.memory is None:
        return
    if limits.disk > limits.memory // 2:
        raise LimitError(
            f"a disk of {limits.disk} bytes does not fit into a memory of {limits.memory}",
            remedy="written files are kept in memory: allow at least twice as much memory as disk, or use"
            ' storage="disk"',
        )


def encode_request(
    features: HostFeatures,
    trees: tuple[Tree, ...],
    limits: Limits,
    isolation: Isolation = FULL_ISOLATION,
    *,
    building: bool = False,
    on_disk: bool = False,
) -> bytes:
    """The body of a Request.CREATE, without its label. Raises LimitError, CreateError."""
    check_limits(limits, on_disk=on_disk)
    isolation.refuse_limits(limits)
    _check_enforceable(features, limits)
    pids = limits.pids if limits.pids is not None else DEFAULT_PIDS
    # Without a limit, one sandbox could take all memory. Its files count as memory too.
    files = 0 if on_disk else limits.disk or 0
    memory = max(capacity.share_of_memory(), 2 * files) if limits.memory is None else limits.memory
    flags = CreateFlag.SHARED_NETWORK if shares_network(features, limits, isolation) else CreateFlag(0)
    if on_disk:
        disk = disk_storage.limit_of(limits.disk)
        flags |= CreateFlag.DISK
    else:
        disk = memory // 2 if limits.disk is None else limits.disk
    return protocol.create(
        flags,
        trees,
        memory=memory if "memory" in features.controllers else 0,
        disk=disk,
        shm=memory // 2,
        pids=0 if "cgroups" in isolation.without else pids,
        cpu_quota=0 if limits.cpus is None else int(limits.cpus * 100_000),
        places=isolation.places(building=building),
    )


def shares_network(features: HostFeatures, limits: Limits, isolation: Isolation = FULL_ISOLATION) -> bool:
    """Whether it uses the host's network: without root, its own has no way out. Raises CreateError."""
    if isolation.shares_network:
        isolation.refuse_limits(limits)
        return True
    if features.mode == "root" or limits.network in (None, "off"):
        return False
    if limits.network != "on":
        raise CreateError(
            "native cannot enforce a list of allowed hosts without root",
            remedy='run as root, or let the sandbox reach nothing ("off") or everything ("on")',
        )
    return True


def _check_enforceable(features: HostFeatures, limits: Limits) -> None:
    """Raises CreateError for a limit that this host cannot enforce."""
    enforced = {
        "cpus": (limits.cpus, "cpu" in features.controllers),
        "memory": (limits.memory, "memory" in features.controllers),
        "pids": (limits.pids, features.counts_processes),
    }
    for name, (limit, possible) in enforced.items():
        if limit is not None and not possible:
            raise CreateError(f"native cannot limit {name} here", remedy="see `dutyfree doctor`")
