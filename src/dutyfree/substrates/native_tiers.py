"""The isolation tiers of ``native`` beyond namespaces: the same recipes and layers, another wall around them.

With ``isolation="gvisor"`` or ``"microvm"``, the native engine opens images and builds stages as always, and
another substrate of ours makes the sandboxes on these layers. Actions go to the same init. The pool, groups,
snapshots, forks, resets, services, terminals and the network need the engine's own launcher, so these tiers
do not have them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from dutyfree.contract import Availability, Limits, Recipe, Sandbox, limited
from dutyfree.contract.errors import OptionError
from dutyfree.engine.node import NativeConfig, Node
from dutyfree.substrates.oci.config import OciConfig
from dutyfree.substrates.oci.substrate import Oci
from dutyfree.substrates.vm.config import VmConfig
from dutyfree.substrates.vm.substrate import Vm, VmSubstrate, opened_with


class NativeTier:
    """``native`` at a tier: a substrate without the abilities of the launcher."""

    name = "native"

    def __init__(self, config: NativeConfig, behind: Oci | VmSubstrate) -> None:
        self._config = config
        self._behind = behind
        self.host_address = behind.host_address

    def __repr__(self) -> str:
        return f"<native with isolation {self._config.isolation!r}>"

    def sandbox(
        self,
        recipe: Recipe | None = None,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AbstractAsyncContextManager[Sandbox]:
        merged = limited(limits, self._config.limits)
        return self._behind.sandbox(recipe, limits=merged, labels=labels)

    async def prepare(self, recipe: Recipe | None = None) -> None:
        await self._behind.prepare(recipe)

    async def sandboxes(self) -> Sequence[str]:
        """The ids of the sandboxes that exist now."""
        return await self._behind.sandboxes()

    async def facts(self) -> dict[str, str]:
        return {**await self._behind.facts(), "tier": self._config.isolation}


def check(config: NativeConfig) -> None:
    """Raises OptionError if the options contradict."""
    if config.isolation == "microvm" and config.image == "host":
        raise OptionError(
            "native: a microvm would need a disk with all of this host's /usr",
            remedy="name an image, such as the tar that `dutyfree image build` makes",
        )
    if config.isolation == "gvisor" and config.limits.network not in (None, "off"):
        raise OptionError(
            f"native: sandboxes of {config.isolation} have no network", remedy="leave the limit network out"
        )


async def probe(config: NativeConfig) -> Availability:
    if config.isolation == "microvm":
        return await Vm.probe(_machine(config))
    return await Oci.probe(_container(config))


@asynccontextmanager
async def opened(config: NativeConfig, node: Node) -> AsyncIterator[NativeTier]:
    """The tier of these options on a node. Raises Unavailable."""
    if config.isolation == "microvm":
        async with opened_with(_machine(config), node) as vm:
            yield NativeTier(config, vm)
    else:
        async with Oci(_container(config), node) as oci:
            yield NativeTier(config, oci)


def _machine(config: NativeConfig) -> VmConfig:
    return VmConfig(image=config.image, storage=config.storage)


def _container(config: NativeConfig) -> OciConfig:
    return OciConfig(runtime="runsc", image=config.image, storage=config.storage)
