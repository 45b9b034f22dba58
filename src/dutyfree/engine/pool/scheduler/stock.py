"""The stock: idle sandboxes and layers by prefix, what each is worth, and what the budget has left.

A ``Prefix`` object holds all that a decision needs to know about one prefix. One look-up finds all prefixes
of a recipe, so the cost of a decision depends only on the length of the recipe.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from math import exp, inf, log, log1p
from typing import Literal

from dutyfree.engine.pool.scheduler.breaker import Breaker
from dutyfree.engine.pool.scheduler.distance import Costs
from dutyfree.engine.pool.scheduler.priority_queue import PriorityQueue, Score
from dutyfree.engine.pool.scheduler.values import Budget, Policy, PrefixChain


class Instance:
    """One live sandbox, as the scheduler sees it."""

    __slots__ = ("abandoned", "chain", "charge", "copies", "depth", "id", "on_layer", "parked_at", "status")

    def __init__(
        self, identity: str, chain: PrefixChain, depth: int, charge: int, on_layer: Prefix | None
    ) -> None:
        self.id = identity
        self.chain = chain
        self.depth = depth
        self.charge = charge
        """Bytes of memory that it counts for."""
        self.on_layer = on_layer
        self.parked_at = 0.0
        self.copies = 0
        """Copies of it that are being made. Until they are done, it must not be used."""
        self.abandoned = False
        """Its request is gone: it becomes stock when its copies are done."""
        self.status: Literal["idle", "ready", "leased", "resetting", "promoting"] = "ready"


class CachedLayer:
    """A layer on disk. ``references`` counts the sandboxes, jobs and layers that use it."""

    __slots__ = ("parent", "references", "size")

    def __init__(self, size: int, parent: Prefix | None) -> None:
        self.size = size
        self.parent = parent
        self.references = 0


class Prefix:
    """All that is known about one prefix. ``path`` has the shorter prefixes, then itself."""

    __slots__ = (
        "breaker",
        "chain",
        "chains",
        "children",
        "depth",
        "heat",
        "hinted",
        "hints",
        "idle",
        "key",
        "layer",
        "making",
        "maximum",
        "memory",
        "minimum",
        "missed",
        "path",
        "queued",
        "users",
    )

    def __init__(self, chain: PrefixChain, depth: int, above: tuple[Prefix, ...]) -> None:
        self.key = chain.keys[depth]
        self.depth = depth
        self.chain = chain
        self.path: tuple[Prefix, ...] = (*above, self)
        self.chains = 0
        """Known recipes that contain this prefix."""
        self.children = 0
        """Known prefixes that are longer by one stage."""
        self.users = 0
        """Requests and jobs in progress for exactly this prefix."""
        self.idle: dict[str, Instance] = {}
        self.making: dict[int, float] = {}
        """Refills in progress that no request has joined, and when each should be done."""
        self.queued: deque[int] = deque()
        """Jobs for requests of exactly this prefix that have not started."""
        self.memory: int | None = None
        """Bytes of memory of an idle sandbox here, once measured."""
        self.layer: CachedLayer | None = None
        self.breaker: Breaker | None = None
        self.heat = -inf
        """The logarithm of the decayed number of requests that reached this prefix, as of time 0."""
        self.missed = -inf
        """The same for requests that found nothing idle here."""
        self.hints: deque[list[float]] = deque()
        """For each hint, when it ends and how many sandboxes of it are left."""
        self.hinted = 0
        self.minimum = 0
        self.maximum: int | None = None

    @property
    def kind(self) -> str:
        return self.chain.kinds[self.depth]

    @property
    def promised(self) -> int:
        """How many idle sandboxes hints and the minimum ask for."""
        return self.hinted + self.minimum

    @property
    def idle_or_coming(self) -> int:
        return len(self.idle) + len(self.making)

    @property
    def unused(self) -> bool:
        return not (self.idle or self.users or self.promised or self.layer)


def mark_retry(path: tuple[Prefix, ...], start: int, *, retrying: bool) -> None:
    """Note that the failed stages after ``start`` are being retried, or no longer are."""
    for prefix in path[start + 1 :]:
        if prefix.breaker is not None:
            prefix.breaker.probing = retrying


class Stock:
    """All known prefixes, and how much of the budget is in use."""

    def __init__(self, budget: Budget, policy: Policy, costs: Costs) -> None:
        self.budget = budget
        self.costs = costs
        self.alive = 0
        self.memory = 0
        self.disk = 0
        self.idle = 0
        self.idle_memory = 0
        self._policy = policy
        self._decay = log(2) / policy.half_life
        self._prefixes: dict[str, Prefix] = {}
        self._chains: OrderedDict[str, tuple[Prefix, ...]] = OrderedDict()
        self._worst: PriorityQueue[Prefix] = PriorityQueue(self._idle_worth)
        self._worst_layer: PriorityQueue[Prefix] = PriorityQueue(self._layer_worth)

    # --- Prefixes -----------------------------------------------------------------------------------

    def path(self, chain: PrefixChain) -> tuple[Prefix, ...]:
        """The prefixes of a recipe, from the base to all stages. Unknown ones are added."""
        found = self._chains.get(chain.key)
        if found is not None:
            self._chains.move_to_end(chain.key)
            return found
        path: tuple[Prefix, ...] = ()
        for depth, key in enumerate(chain.keys):
            prefix = self._prefixes.get(key)
            if prefix is None:
                prefix = self._prefixes[key] = Prefix(chain, depth, path)
                if path:
                    path[-1].children += 1
            path = prefix.path
            prefix.chains += 1
        if len(self._chains) >= self._policy.recipes:
            self._forget_oldest()
        self._chains[chain.key] = path
        return path

    def prefix(self, key: str) -> Prefix | None:
        return self._prefixes.get(key)

    def _forget_oldest(self) -> None:
        """Forget the least recently used recipe that has no stock; look at a few only."""
        for key in [key for key, _ in zip(self._chains, range(8), strict=False)]:
            path = self._chains[key]
            if not path[-1].unused:
                self._chains.move_to_end(key)
                continue
            del self._chains[key]
            for prefix in path:
                prefix.chains -= 1
            self._prune(path)
            return

    def _prune(self, path: tuple[Prefix, ...]) -> None:
        """Forget prefixes that no recipe and no longer prefix contains."""
        for prefix in reversed(path):
            if prefix.chains or prefix.children or not prefix.unused:
                return
            del self._prefixes[prefix.key]
            self.costs.forget(prefix.key)
            if prefix.depth:
                prefix.path[-2].children -= 1

    # --- Demand -------------------------------------------------------------------------------------

    def count_requests(self, prefix: Prefix, count: int, missed: int, now: float) -> None:
        """Count requests that reached this prefix, and those of them that found nothing idle here."""
        prefix.heat = self._add(prefix.heat, count, now)
        if missed:
            prefix.missed = self._add(prefix.missed, missed, now)

    def _add(self, heat: float, count: int, now: float) -> float:
        """Add a count to a logarithm of decayed counts.

        New counts weigh more, instead of old ones less. So the order of two prefixes does not change with
        time, and the logarithm cannot overflow.
        """
        new = self._decay * now + log(count)
        high, low = (heat, new) if heat > new else (new, heat)
        return high + log1p(exp(low - high))

    def misses(self, prefix: Prefix, now: float) -> float:
        """The rate of requests that find nothing idle here, per second."""
        return self._decay * exp(min(700.0, prefix.missed - self._decay * now))

    # --- Worth --------------------------------------------------------------------------------------

    def layer_under(self, path: tuple[Prefix, ...]) -> int | None:
        """The depth of the longest prefix with a layer."""
        for prefix in reversed(path):
            if prefix.layer is not None:
                return prefix.depth
        return None

    def saved(self, prefix: Prefix) -> float:
        """Seconds that an idle sandbox here saves a request, compared with the layers on disk."""
        start = self.layer_under(prefix.path) or 0
        return self.costs.create() + self.costs.distance(prefix.chain, start, prefix.depth)

    def size(self, prefix: Prefix) -> int:
        """Bytes of memory of an idle sandbox here, measured or estimated."""
        return self.budget.sandbox_memory if prefix.memory is None else prefix.memory

    def worth(self, prefix: Prefix, stock: int) -> float:
        """What one of ``stock`` sandboxes here is worth: log(uses * seconds saved / bytes)."""
        if prefix.heat == -inf:
            return -inf
        return prefix.heat + log(self.saved(prefix) / (max(1, stock) * max(1, self.size(prefix))))

    def _idle_worth(self, prefix: Prefix) -> Score:
        return (float(len(prefix.idle) <= prefix.promised), self.worth(prefix, len(prefix.idle)))

    def _layer_worth(self, prefix: Prefix) -> Score:
        assert prefix.layer is not None
        under = 0 if prefix.layer.parent is None else prefix.layer.parent.depth
        seconds = self.costs.distance(prefix.chain, under, prefix.depth)
        worth = -inf if prefix.heat == -inf else prefix.heat + log(seconds / max(1, prefix.layer.size))
        return (float(bool(prefix.layer.references)), worth)

    def reconsider(self, prefix: Prefix) -> None:
        """Rank a prefix again, since its worth may have fallen."""
        if prefix.idle:
            self._worst.put(prefix)

    # --- Sandboxes ----------------------------------------------------------------------------------

    def reserve(self, count: int, memory: int) -> None:
        """Take room in the budget for new sandboxes."""
        self.alive += count
        self.memory += memory

    def free(self, memory: int) -> None:
        """Give back the room of one sandbox."""
        self.alive -= 1
        self.memory -= memory

    def adopt(self, instance: Instance) -> None:
        """A sandbox was made, in the room that was reserved for it."""
        if instance.on_layer is not None:
            self.pin(instance.on_layer)

    def drop(self, instance: Instance) -> None:
        """A sandbox is gone, or will be."""
        if instance.status == "idle":
            self.take(self._prefixes[instance.chain.keys[instance.depth]], instance)
        if instance.on_layer is not None:
            self.unpin(instance.on_layer)
        self.free(instance.charge)

    def park(self, instance: Instance, prefix: Prefix, now: float) -> None:
        """Make a sandbox idle."""
        instance.status = "idle"
        instance.parked_at = now
        prefix.idle[instance.id] = instance
        self.idle += 1
        self.idle_memory += instance.charge
        self._worst.put(prefix)

    def take(self, prefix: Prefix, instance: Instance | None = None) -> Instance:
        """Take an idle sandbox. By default the last one parked, whose pages are most likely cached."""
        if instance is None:
            _, instance = prefix.idle.popitem()
        else:
            del prefix.idle[instance.id]
        instance.status = "ready"
        self.idle -= 1
        self.idle_memory -= instance.charge
        if not prefix.idle:
            self._worst.drop(prefix)
        return instance

    def recharge(self, instance: Instance, memory: int) -> None:
        """Count a sandbox with another amount of memory."""
        self.memory += memory - instance.charge
        instance.charge = memory

    # --- Room ---------------------------------------------------------------------------------------

    def fits(self, count: int, memory: int) -> bool:
        return self.alive + count <= self.budget.sandboxes and self.memory + memory <= self.budget.memory

    def could_fit(self, count: int, memory: int) -> bool:
        """Whether they would fit if every idle sandbox were evicted."""
        return (
            self.alive - self.idle + count <= self.budget.sandboxes
            and self.memory - self.idle_memory + memory <= self.budget.memory
        )

    def could_ever_fit(self, count: int, prefix: Prefix) -> bool:
        """Whether they would fit into an empty pool."""
        return count <= self.budget.sandboxes and count * self.size(prefix) <= self.budget.memory

    def least_worth(self) -> tuple[Instance, Score] | None:
        """The idle sandbox to evict first: of the prefix worth least, the one idle for longest."""
        found = self._worst.least()
        return None if found is None else (next(iter(found[0].idle.values())), found[1])

    # --- Layers -------------------------------------------------------------------------------------

    def keep_layer(self, prefix: Prefix, size: int) -> None:
        """The prefix has a layer on disk now."""
        if prefix.layer is not None:
            return
        depth = self.layer_under(prefix.path[:-1])
        parent = None if depth is None else prefix.path[depth]
        if parent is not None:
            self.pin(parent)
        prefix.layer = CachedLayer(size, parent)
        self.disk += size
        self._worst_layer.put(prefix)
        self.reconsider(prefix)

    def pin(self, prefix: Prefix) -> None:
        if prefix.layer is not None:
            prefix.layer.references += 1

    def unpin(self, prefix: Prefix) -> None:
        if prefix.layer is not None:
            prefix.layer.references -= 1
            if prefix.layer.references == 0:
                self._worst_layer.put(prefix)

    def forget_layer(self) -> Prefix | None:
        """Drop the unused layer that is worth least, and return its prefix; None if all are in use."""
        found = self._worst_layer.least()
        if found is None or found[1][0]:
            return None
        prefix = found[0]
        assert prefix.layer is not None
        self.disk -= prefix.layer.size
        parent, prefix.layer = prefix.layer.parent, None
        self._worst_layer.drop(prefix)
        if parent is not None:
            self.unpin(parent)
        self._prune(prefix.path)
        return prefix
