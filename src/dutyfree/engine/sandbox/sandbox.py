"""``NativeSandbox``: one sandbox of the native engine, as the contract and its abilities describe it.

``init_sandbox`` has the commands and files; here is what needs the launcher, or descriptors that travel:
terminals, services, snapshots and forks, the network. Its parts are ``terminal``, ``services`` and
``snapshot``.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import NamedTuple

import msgspec
from anyio.abc import SocketStream

from dutyfree.contract import (
    Command,
    Limits,
    NetworkPolicy,
    Observation,
    Recipe,
)
from dutyfree.contract.arguments import check_count
from dutyfree.contract.errors import ExecError, UsageError
from dutyfree.contract.served import Served
from dutyfree.contract.services import ServiceState
from dutyfree.engine.launcher import network_policy, protocol
from dutyfree.engine.launcher.handle import SandboxHandle
from dutyfree.engine.launcher.network import SandboxNetwork
from dutyfree.engine.launcher.protocol import Frame, Tree
from dutyfree.engine.layers.kept_state import KeptState
from dutyfree.engine.layers.memory_layers import MemorySnapshots
from dutyfree.engine.layers.named_snapshots import NamedSnapshots
from dutyfree.engine.layers.start_state import StartState
from dutyfree.engine.sandbox.channel import Channel, SetupError
from dutyfree.engine.sandbox.init_sandbox import InitSandbox, as_exec
from dutyfree.engine.sandbox.kept import KeptSandbox
from dutyfree.engine.sandbox.lifecycle import NativeLifecycle
from dutyfree.engine.sandbox.observation import REASON_MAX
from dutyfree.engine.sandbox.services import Services
from dutyfree.engine.sandbox.snapshot import Create, SandboxLayers, enter_all, served_fork, unusable
from dutyfree.engine.sandbox.terminal import NativeTerminal, open_terminal


class SandboxHost(NamedTuple):
    """What the engine does for one of its sandboxes."""

    snapshots: MemorySnapshots
    named: NamedSnapshots
    resolvers: Sequence[network_policy.Resolver]
    """The name servers that sandboxes with a network use."""
    create: Create
    child: Callable[[Recipe], AbstractAsyncContextManager[NativeSandbox]]
    """A sandbox with the same limits and the same network, in the state of the recipe."""


class NativeSandbox(InitSandbox):
    """A sandbox with all abilities that do not depend on the host. See ``dutyfree.contract.abilities``."""

    def __init__(
        self,
        identity: str,
        recipe: Recipe,
        limits: Limits,
        start: StartState,
        channel: Channel,
        handle: SandboxHandle,
        network: SandboxNetwork,
        host: SandboxHost,
    ) -> None:
        lifecycle = NativeLifecycle(identity, channel, handle)
        super().__init__(identity, lifecycle, start.defaults.with_recipe(recipe), limits.output)
        self._lifecycle: NativeLifecycle = lifecycle
        self.program = start.defaults.program
        """The entry point and command of the image. Nothing runs it, unless you pass it to ``exec``."""
        self.without_overlay: tuple[str, ...] = ()
        """The directories of the options ``plain`` and ``fixed`` that are no overlay in this sandbox."""
        self.served: Served | None = None
        """How it was served: from what, in how many seconds, and what a cold start would have cost."""
        self.own_stages: tuple[tuple[str, float], ...] = ()
        """The stages that ran for this sandbox alone: the kind and the seconds of each."""
        self.services_memory = 0
        """Bytes of memory that its services use, as last measured; 0 without control groups."""
        self._recipe = recipe
        self._limits = limits
        self._born_offline = limits.network in (None, "off")
        self._network = network
        self._host = host
        self._services = Services(
            self._lifecycle, self._commands, self._files.encode_path, self.workdir, recipe.services
        )
        self._layers = SandboxLayers(self._lifecycle, start, host.snapshots.layers, host.create)

    # --- Terminals ----------------------------------------------------------------------------------

    def terminal(
        self,
        command: Command | None = None,
        *,
        rows: int = 24,
        columns: int = 80,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> AbstractAsyncContextManager[NativeTerminal]:
        """Run a command, by default a shell, in a terminal."""
        action = as_exec(("/bin/sh", "-i") if command is None else command, cwd, env, user=user)
        term = self._recipe.env.get("TERM", "xterm-256color")
        return open_terminal(self._lifecycle, self._commands, action, rows, columns, term)

    # --- Services -----------------------------------------------------------------------------------

    async def services(self) -> tuple[ServiceState, ...]:
        """The state of each service, in the order of the recipe."""
        return self._services.states()

    async def restart(self, service: str) -> None:
        """End a service if it runs, and start it. Raises UsageError, ActionError."""
        await self._services.restart(service)

    async def call(
        self,
        service: str,
        arguments: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout: float | None = None,
    ) -> Observation:
        """Run a fork of a service to its end, as ``exec`` runs a command. Raises UsageError, ActionError."""
        return await self._services.call(service, as_exec(arguments, cwd, env, stdin, timeout))

    # --- Network ------------------------------------------------------------------------------------

    async def connect(self, port: int) -> SocketStream:
        """A connection to a server in the sandbox. Raises PortClosed."""
        if not 0 < port < 65536:
            raise UsageError(f"there is no port {port}")
        with self._lifecycle.launcher_request():
            return await self._network.connect(port)

    # --- Snapshot, fork, reset ----------------------------------------------------------------------

    async def snapshot(self, name: str | None = None) -> Recipe:
        """Keep the present files, and return a recipe that starts from them.

        Without a name they stay in memory, until ``Native.forget`` or the end of the substrate; with a name
        they are stored on disk. Sandboxes of the recipe have the same variables and start the same services.

        Raises ExecError if there is no room or the sandbox cannot be frozen; UsageError for a name that is
        not valid, or is taken.
        """
        if name is not None:
            await self._host.named.check(name)
        state = await self._layers.capture()
        if name is None:
            kept = self._host.snapshots.add(state)
        else:
            try:
                kept = await self._host.named.keep(name, state)
            finally:
                self._host.snapshots.layers.release(state.trees)
        mine = self._recipe
        return msgspec.structs.replace(kept, services=mine.services, env=mine.env, path=mine.path)

    @asynccontextmanager
    async def fork(self, count: int) -> AsyncIterator[Sequence[NativeSandbox]]:
        """Start ``count`` sandboxes from the present files.

        Raises UsageError; CreateError if one of them cannot be created, and then none exists; ActionError if
        processes in this sandbox left files that no sandbox can start from.
        """
        count = check_count(count, 0)
        recipe = await self.snapshot()
        try:
            async with AsyncExitStack() as stack:
                entering = enter_all([self._host.child(recipe) for _ in range(count)])
                try:
                    children = await stack.enter_async_context(entering)
                except SetupError as error:
                    raise unusable(error) from error
                for child in children:
                    child.served = served_fork(child.served, self.served)
                yield children
        finally:
            self._host.snapshots.forget(recipe)

    async def reset(self) -> None:
        """Replace the sandbox by a new one in its first state; nothing of the old one is kept.

        The old one is killed first, and ends while the new one starts. Raises CreateError, and then the
        sandbox is not usable any more.
        """
        self._lifecycle.channel().abandon()
        self._lifecycle.replace(*await self._host.create(self._layers.start.trees))
        self._layers.reset()
        self._processes.clear()
        await self._services.start_again()

    async def verify(self) -> None:
        """Check that it is as it was before its first command. Raises ExecError, which says what is left."""
        offline = protocol.NUMBER.pack(self._born_offline and not self._network.policy)
        answer = await self._lifecycle.channel().ask(Frame.VERIFY, offline, timeout=0.0)
        _, left = await self._lifecycle.handle.audit()
        if error := answer.done.result():
            said = b"".join(answer.data)[:REASON_MAX].decode(errors="replace") or os.strerror(error)
            left = f"{said}, {left}" if left else said
        if left:
            raise ExecError(f"sandbox {self.id} is not as new: {left}")

    # --- For the pool and the substrate -------------------------------------------------------------

    @property
    def start_state(self) -> StartState:
        """The state in which it was handed out."""
        return self._layers.start

    @property
    def trees(self) -> tuple[Tree, ...]:
        """The layers that it uses now."""
        return self._layers.trees

    @property
    def alive(self) -> bool:
        """Whether, as far as we know, it and all its services that became ready still run."""
        return self._lifecycle.alive and self._services.alive

    def limit_output(self, limit: int) -> None:
        """Keep at most ``limit`` bytes of each stream of a command, from now on."""
        self._commands.limit_output(limit)

    def use_recipe(self, recipe: Recipe) -> None:
        """Use the variables of this recipe, which has the same files and services, from now on."""
        if recipe is not self._recipe:
            self._recipe = recipe
            self._commands.defaults = self.start_state.defaults.with_recipe(recipe)

    def set_background(self, background: bool) -> None:
        """Give the processes of the sandbox the lowest CPU priority, or the normal one."""
        self._lifecycle.channel().tell(Frame.BACKGROUND, 0, protocol.NUMBER.pack(background))

    async def start_services(self) -> None:
        """Start all services, each when the one before it is ready. Raises CreateError."""
        await self._services.start()

    async def measure_services(self) -> None:
        """Measure the memory of the services, from outside the sandbox. Raises ExecError."""
        if self._services:
            self.services_memory, _ = await self._lifecycle.handle.audit()

    def kept(self, labels: Mapping[str, str]) -> KeptSandbox:
        """It on record, for a new owner of the launcher."""
        start, recipe, layers = self.start_state, self._recipe, self._host.snapshots.layers
        return KeptSandbox(
            id=self.id,
            number=self._lifecycle.handle.number,
            limits=self._limits,
            trees=self.trees,
            start=KeptState.of(start),
            in_memory=layers.sizes_of((*self.trees, *start.trees)),
            policy=self._network.policy,
            image=recipe.image,
            services=recipe.services,
            variables=dict(recipe.env),
            path=recipe.path,
            labels=dict(labels),
            served=self.served,
            spans=self.spans,
            without_overlay=self.without_overlay,
            paused_at=self._lifecycle.paused_at,
            processes=self._processes.kept(),
            running=self._services.kept(),
        )

    def adopt(self, kept: KeptSandbox) -> None:
        """Take over what the record says that a former owner had started and changed."""
        self.served, self.spans, self.without_overlay = kept.served, kept.spans, kept.without_overlay
        self._network.number = kept.number
        self._layers.adopt(kept.trees)
        for process in kept.processes:
            self._processes.adopt(process)
        for service in kept.running:
            self._services.adopt(service)
        if kept.paused_at is not None:
            self._lifecycle.adopt_pause(kept.paused_at)

    def set_lease(self, until: float) -> None:
        """Let it outlive its owner until then, as ``time.monotonic`` counts."""
        self._lifecycle.handle.set_lease(until)

    @property
    def limits(self) -> Limits:
        return self._limits

    async def final_state(self) -> StartState:
        """Kill all processes and keep the files, as the last action on this sandbox. Raises ExecError."""
        return await self._layers.final()

    async def close(self) -> None:
        """Destroy the sandbox, and wait until nothing of it is left. Raises CleanupError."""
        self._layers.reset()
        await super().close()


class NetworkedSandbox(NativeSandbox):
    """A sandbox whose network policy can change: the substrate runs as root.

    A class of its own, because ``isinstance(sandbox, NetworkControl)`` only asks for the method.
    """

    async def set_network(self, policy: NetworkPolicy) -> None:
        """Change what the sandbox may reach. Raises UsageError, ActionError, DispatchError."""
        try:
            body = network_policy.encode(policy, self._host.resolvers)
        except ValueError as error:
            raise UsageError(str(error)) from error
        with self._lifecycle.launcher_request():
            await self._network.change(body)
