"""What is there: idle sandboxes and layers by the key of their prefix, their worth, and the budgets.

One *node* for each prefix that is known. A recipe's nodes are found by one look-up, and everything a
decision needs is on them, so that its cost depends on the length of the recipe alone.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from math import exp, inf, log, log1p
from typing import Literal

from dutyfree.engine.pool.scheduler.breaker import Breaker
from dutyfree.engine.pool.scheduler.costs import Costs
from dutyfree.engine.pool.scheduler.ranking import Ranking, Score
from dutyfree.engine.pool.scheduler.values import Budget, Chain, Policy


class Held:
    """A sandbox that is alive."""

    __slots__ = ("abandoned", "chain", "charge", "copies", "depth", "id", "parked_at", "stands_on", "status")

    def __init__(self, identity: str, chain: Chain, depth: int, charge: int, stands_on: Node | None) -> None:
        self.id = identity
        self.chain = chain
        self.depth = depth
        self.charge = charge
        self.stands_on = stands_on
        self.parked_at = 0.0
        self.copies = 0
        """Being made of it now; until they are done, nobody may touch it."""
        self.abandoned = False
        """Nobody waits for it; it becomes stock once it was copied."""
        self.status: Literal["idle", "ready", "leased", "resetting", "promoting"] = "ready"


class Layer:
    """State on the disk. ``pins`` counts the sandboxes and layers that stand on it."""

    __slots__ = ("parent", "pins", "size")

    def __init__(self, size: int, parent: Node | None) -> None:
        self.size = size
        self.parent = parent
        self.pins = 0


class Node:
    """All that is known about one prefix. ``path`` has the shorter ones, and itself at the end."""

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

    def __init__(self, chain: Chain, depth: int, above: tuple[Node, ...]) -> None:
        self.key = chain.keys[depth]
        self.depth = depth
        self.chain = chain
        self.path: tuple[Node, ...] = (*above, self)
        self.chains = 0
        self.children = 0
        self.users = 0
        """Requests and jobs under way for exactly this state."""
        self.idle: dict[str, Held] = {}
        self.making: dict[int, float] = {}
        """Refills under way that nobody claimed, and when each is expected to be done."""
        self.queued: deque[int] = deque()
        """Jobs for requests of exactly this state that were not started yet."""
        self.memory: int | None = None
        self.layer: Layer | None = None
        self.breaker: Breaker | None = None
        self.heat = -inf
        """Logarithm of the decayed count of requests that got as far as here, at time 0."""
        self.missed = -inf
        """The same of those that found nothing idle here."""
        self.hints: deque[list[float]] = deque()
        self.hinted = 0
        self.minimum = 0
        self.maximum: int | None = None

    @property
    def kind(self) -> str:
        return self.chain.kinds[self.depth]

    @property
    def promised(self) -> int:
        return self.hinted + self.minimum

    @property
    def idle_or_coming(self) -> int:
        return len(self.idle) + len(self.making)

    @property
    def needless(self) -> bool:
        return not (self.idle or self.users or self.promised or self.layer)


def probe(path: tuple[Node, ...], start: int, *, under_way: bool) -> None:
    """Stages after ``start`` that failed before are being tried again, or no longer are."""
    for node in path[start + 1 :]:
        if node.breaker is not None:
            node.breaker.probing = under_way


class Stock:
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
        self._nodes: dict[str, Node] = {}
        self._chains: OrderedDict[str, tuple[Node, ...]] = OrderedDict()
        self._worst: Ranking[Node] = Ranking(self._idle_worth)
        self._worst_layer: Ranking[Node] = Ranking(self._layer_worth)

    # --- Nodes --------------------------------------------------------------------------------------

    def nodes(self, chain: Chain) -> tuple[Node, ...]:
        found = self._chains.get(chain.key)
        if found is not None:
            self._chains.move_to_end(chain.key)
            return found
        path: tuple[Node, ...] = ()
        for depth, key in enumerate(chain.keys):
            node = self._nodes.get(key)
            if node is None:
                node = self._nodes[key] = Node(chain, depth, path)
                if path:
                    path[-1].children += 1
            path = node.path
            node.chains += 1
        if len(self._chains) >= self._policy.recipes:
            self._forget_oldest()
        self._chains[chain.key] = path
        return path

    def node(self, key: str) -> Node | None:
        return self._nodes.get(key)

    def _forget_oldest(self) -> None:
        """Forget one recipe that nothing is kept for; a few are looked at."""
        for key in [key for key, _ in zip(self._chains, range(8), strict=False)]:
            path = self._chains[key]
            if not path[-1].needless:
                self._chains.move_to_end(key)
                continue
            del self._chains[key]
            for node in path:
                node.chains -= 1
            self._prune(path)
            return

    def _prune(self, path: tuple[Node, ...]) -> None:
        """Forget nodes that no recipe and no longer node needs."""
        for node in reversed(path):
            if node.chains or node.children or not node.needless:
                return
            del self._nodes[node.key]
            self.costs.forget(node.key)
            if node.depth:
                node.path[-2].children -= 1

    # --- Demand -------------------------------------------------------------------------------------

    def warm_up(self, node: Node, count: int, missed: int, now: float) -> None:
        """Count requests that got as far as this node, and those of them that found nothing idle."""
        node.heat = self._grown(node.heat, count, now)
        if missed:
            node.missed = self._grown(node.missed, missed, now)

    def _grown(self, heat: float, count: int, now: float) -> float:
        """One count more.

        Logarithms of weights that grow with time, instead of weights that shrink: the order of two nodes
        does not change while time passes, and no overflow ever comes.
        """
        new = self._decay * now + log(count)
        high, low = (heat, new) if heat > new else (new, heat)
        return high + log1p(exp(low - high))

    def misses(self, node: Node, now: float) -> float:
        """Requests a second that find nothing idle here."""
        return self._decay * exp(min(700.0, node.missed - self._decay * now))

    # --- Worth --------------------------------------------------------------------------------------

    def layer_under(self, path: tuple[Node, ...]) -> int | None:
        """The depth of the longest layer."""
        for node in reversed(path):
            if node.layer is not None:
                return node.depth
        return None

    def saved(self, node: Node) -> float:
        """Seconds that an idle sandbox here spares a request, against the disk alone."""
        start = self.layer_under(node.path) or 0
        return self.costs.create() + self.costs.stages(node.chain, start, node.depth)

    def size(self, node: Node) -> int:
        """Bytes of memory of an idle sandbox here."""
        return self.budget.sandbox_memory if node.memory is None else node.memory

    def worth(self, node: Node, stock: int) -> float:
        """Of one among ``stock``: the logarithm of uses times seconds saved over bytes, to compare."""
        if node.heat == -inf:
            return -inf
        return node.heat + log(self.saved(node) / (max(1, stock) * max(1, self.size(node))))

    def _idle_worth(self, node: Node) -> Score:
        return (float(len(node.idle) <= node.promised), self.worth(node, len(node.idle)))

    def _layer_worth(self, node: Node) -> Score:
        assert node.layer is not None
        under = 0 if node.layer.parent is None else node.layer.parent.depth
        seconds = self.costs.stages(node.chain, under, node.depth)
        worth = -inf if node.heat == -inf else node.heat + log(seconds / max(1, node.layer.size))
        return (float(bool(node.layer.pins)), worth)

    def reconsider(self, node: Node) -> None:
        """Its worth may have sunk."""
        if node.idle:
            self._worst.put(node)

    # --- Sandboxes ----------------------------------------------------------------------------------

    def reserve(self, count: int, memory: int) -> None:
        self.alive += count
        self.memory += memory

    def free(self, memory: int) -> None:
        self.alive -= 1
        self.memory -= memory

    def adopt(self, held: Held) -> None:
        """A sandbox has come into being, within what was reserved for it."""
        if held.stands_on is not None:
            self.pin(held.stands_on)

    def drop(self, held: Held) -> None:
        """It is no more."""
        if held.status == "idle":
            self.take(self._nodes[held.chain.keys[held.depth]], held)
        if held.stands_on is not None:
            self.unpin(held.stands_on)
        self.free(held.charge)

    def park(self, held: Held, node: Node, now: float) -> None:
        held.status = "idle"
        held.parked_at = now
        node.idle[held.id] = held
        self.idle += 1
        self.idle_memory += held.charge
        self._worst.put(node)

    def take(self, node: Node, held: Held | None = None) -> Held:
        """The one parked last, whose pages are warmest, unless another is meant."""
        if held is None:
            _, held = node.idle.popitem()
        else:
            del node.idle[held.id]
        held.status = "ready"
        self.idle -= 1
        self.idle_memory -= held.charge
        if not node.idle:
            self._worst.drop(node)
        return held

    def recharge(self, held: Held, memory: int) -> None:
        self.memory += memory - held.charge
        held.charge = memory

    # --- Room ---------------------------------------------------------------------------------------

    def fits(self, count: int, memory: int) -> bool:
        return self.alive + count <= self.budget.sandboxes and self.memory + memory <= self.budget.memory

    def could_fit(self, count: int, memory: int) -> bool:
        """If every idle sandbox went."""
        return (
            self.alive - self.idle + count <= self.budget.sandboxes
            and self.memory - self.idle_memory + memory <= self.budget.memory
        )

    def could_ever_fit(self, count: int, node: Node) -> bool:
        """If nothing else were there."""
        return count <= self.budget.sandboxes and count * self.size(node) <= self.budget.memory

    def least_worth(self) -> tuple[Held, Score] | None:
        """Of the least valuable state, the one idle for longest."""
        found = self._worst.least()
        return None if found is None else (next(iter(found[0].idle.values())), found[1])

    # --- Layers -------------------------------------------------------------------------------------

    def keep_layer(self, node: Node, size: int) -> None:
        if node.layer is not None:
            return
        depth = self.layer_under(node.path[:-1])
        parent = None if depth is None else node.path[depth]
        if parent is not None:
            self.pin(parent)
        node.layer = Layer(size, parent)
        self.disk += size
        self._worst_layer.put(node)
        self.reconsider(node)

    def pin(self, node: Node) -> None:
        if node.layer is not None:
            node.layer.pins += 1

    def unpin(self, node: Node) -> None:
        if node.layer is not None:
            node.layer.pins -= 1
            if node.layer.pins == 0:
                self._worst_layer.put(node)

    def forget_layer(self) -> Node | None:
        """The least valuable layer that nothing stands on, no longer counted; None if there is none."""
        found = self._worst_layer.least()
        if found is None or found[1][0]:
            return None
        node = found[0]
        assert node.layer is not None
        self.disk -= node.layer.size
        parent, node.layer = node.layer.parent, None
        self._worst_layer.drop(node)
        if parent is not None:
            self.unpin(parent)
        self._prune(node.path)
        return node
