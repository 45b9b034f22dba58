"""Simulate a realistic mix of recipes: how soon sandboxes are ready under different policies.

Time is simulated, and decisions are real: every policy is the scheduler of the engine with restrictions. The
arrivals depend on a seed only, so mix_real.py uses the same ones with real sandboxes.

    python bench/mix.py --batches 60
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from rounds import Row, percentile

from dutyfree.engine.pool.scheduler.decide import decide, wake
from dutyfree.engine.pool.scheduler.distance import Costs
from dutyfree.engine.pool.scheduler.state import State
from dutyfree.engine.pool.scheduler.values import (
    Budget,
    Deliver,
    Destroy,
    Fork,
    JobResult,
    LeaseRequest,
    Make,
    Policy,
    PrefixChain,
    Refuse,
    Reset,
)

KINDS = ("base", "image", "repository", "dependencies", "setup")
MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Workload:
    """Batches of groups, as a trainer draws them. The default times are those of T2 on a small machine."""

    recipes: int = 200
    repositories: int = 20
    images: int = 4
    zipf: float = 1.0
    group: int = 8
    groups: int = 8
    """Groups in a batch."""
    batches: int = 60
    between: float = 60.0
    """Seconds from one batch to the next."""
    spread: float = 10.0
    """Seconds within which the groups of a batch arrive."""
    held: float = 30.0
    """Median seconds of a rollout."""
    seconds: tuple[tuple[str, float], ...] = (
        ("create", 0.0015),
        ("fork", 0.0011),
        ("reset", 0.0009),
        ("image", 1.0),
        ("repository", 0.18),
        ("dependencies", 2.1),
        ("setup", 0.05),
    )
    megabytes: tuple[float, ...] = (0.6, 0.6, 8.0, 60.0, 61.0)
    """Memory of an idle sandbox that ran its stages itself, by depth. On layers it takes 0.6."""
    share: float = 1 / 3
    """Share of the recipes that fit into memory beside the leased sandboxes."""
    seed: int = 1


@dataclass(frozen=True)
class Arrival:
    at: float
    batch: int
    recipe: int
    held: tuple[float, ...]
    """Seconds of each rollout of the group."""


def arrivals(load: Workload) -> Iterator[Arrival]:
    """The arrivals of a workload: always the same."""
    chance = random.Random(load.seed)  # noqa: S311 (a workload, not a secret)
    weights = [1 / (rank + 1) ** load.zipf for rank in range(load.recipes)]
    names = list(range(load.recipes))
    chance.shuffle(names)  # popularity does not depend on the repository
    for batch in range(load.batches):
        drawn = chance.choices(names, weights, k=load.groups)
        times = sorted(chance.uniform(0, load.spread) for _ in drawn)
        for at, recipe in zip(times, drawn, strict=True):
            held = tuple(chance.lognormvariate(0, 0.6) * load.held for _ in range(load.group))
            yield Arrival(batch * load.between + at, batch, recipe, held)


def chain(load: Workload, recipe: int) -> PrefixChain:
    repository = recipe % load.repositories
    image = repository % load.images
    return PrefixChain(
        ("base", f"image {image}", f"repository {repository}", f"dependencies {recipe}", f"setup {recipe}"),
        KINDS,
    )


@dataclass
class Outcome:
    ready: list[float] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    stage_seconds: float = 0.0


POLICIES: dict[str, tuple[Policy, bool]] = {
    "no pool": (Policy(park=False, fork=False, deepest_layer=1), False),
    "exact match": (Policy(partial=False, join=False, fork=False, deepest_layer=1), False),
    "exact match, layers": (Policy(partial=False, join=False, fork=False), False),
    "distance, no layers, no forks": (Policy(fork=False, deepest_layer=1), False),
    "distance, no forks": (Policy(fork=False), False),
    "distance, no layers": (Policy(deepest_layer=1), False),
    "distance": (Policy(), False),
    "distance, prefetch": (Policy(), True),
}
"""Name → the restricted scheduler, and whether the next batch is hinted at when one begins.

Exact match is what pools keyed by template do: images are on the disk, sandboxes are kept and refilled
for whole recipes, nothing is promoted or forked. Distance is the scheduler itself.
"""


class Simulation:
    def __init__(self, load: Workload, policy: Policy, prefetch: bool) -> None:
        leased = load.groups * load.group * 2
        stocked = int(load.recipes * load.share)
        memory = int((leased + stocked) * load.megabytes[-1] * MEGABYTE)
        budget = Budget(sandboxes=4 * (leased + stocked), memory=memory, disk=40 << 30)
        self.state = State(budget, policy, Costs())
        self.load = load
        self.prefetch = prefetch
        self.cost = dict(load.seconds)
        self.chance = random.Random(load.seed + 1)  # noqa: S311
        self.outcome = Outcome()
        self.events: list[tuple[float, int, object]] = []
        self.numbers = count(1)
        self.armed = -1.0
        self.arrivals: dict[int, Arrival] = {}

    def later(self, at: float, event: object) -> None:
        heapq.heappush(self.events, (at, next(self.numbers), event))

    def run(self) -> Outcome:
        batches: dict[int, list[Arrival]] = {}
        for arrival in arrivals(self.load):
            batches.setdefault(arrival.batch, []).append(arrival)
            self.later(arrival.at, arrival)
        if self.prefetch:  # a trainer knows its next batch when it starts one
            for batch, coming in batches.items():
                at = max(0.0, (batch - 1) * self.load.between)
                for arrival in coming:
                    self.later(at, ("hint", arrival.recipe))
        last = self.load.batches * self.load.between + 600
        while self.events and self.events[0][0] < last:
            now, _, event = heapq.heappop(self.events)
            self.happen(event, now)
            while operations := decide(self.state, now):
                for operation in operations:
                    self.carry_out(operation, now)
            at = wake(self.state)
            if at is not None and not now < self.armed <= at:
                self.armed = at
                self.later(at, None)
        return self.outcome

    def happen(self, event: object, now: float) -> None:
        match event:
            case Arrival():
                number = next(self.numbers)
                self.arrivals[number] = event
                path = chain(self.load, event.recipe)
                self.state.arrive(LeaseRequest(number, path, now + 300, self.load.group), now)
            case ("hint", int(recipe)):
                self.state.hint(chain(self.load, recipe), self.load.group, now)
            case ("made", Make() as make, dict() as learnt):
                self.state.made(make.job, make.origin or f"s{make.job}", now, JobResult(**learnt))
            case ("forked", Fork() as fork):
                copied = JobResult(create_seconds=self.cost["fork"], memory=600_000)
                for job in fork.jobs:
                    self.state.made(job, f"s{job}", now, copied)
            case ("returned", int(request)):
                self.state.returned(request, now)
            case ("clean", str(sandbox), int(depth)):
                self.state.reset_done(sandbox, depth, now)
            case ("gone", str(sandbox)):
                self.state.destroyed(sandbox)

    def carry_out(self, operation: object, now: float) -> None:
        match operation:
            case Make():
                stages = [
                    self.cost[kind] * self.chance.lognormvariate(0, 0.2)
                    for kind in KINDS[operation.start + 1 : operation.depth + 1]
                ]
                create = 0.0 if operation.origin else self.cost["create"]
                self.outcome.stage_seconds += sum(stages)
                learnt = {
                    "create_seconds": create or None,
                    "stage_seconds": stages,
                    "layers": dict.fromkeys(range(operation.start + 1, operation.keep + 1), 40 * MEGABYTE),
                    "memory": self.memory(operation),
                }
                self.later(now + create + sum(stages), ("made", operation, learnt))
            case Fork():
                self.later(now + self.cost["fork"] * len(operation.jobs), ("forked", operation))
            case Deliver():
                arrival = self.arrivals[operation.request]
                self.outcome.ready += [now - arrival.at] * len(operation.members)
                for member in operation.members:
                    stage = KINDS[member.start] if member.start else "none"
                    self.outcome.kinds[f"{member.kind} {stage}"] += 1
                self.later(now + max(arrival.held), ("returned", operation.request))
            case Refuse():
                self.outcome.refused += 1
            case Reset():
                depth = self.state.instances[operation.sandbox].depth
                self.later(now + self.cost["reset"], ("clean", operation.sandbox, depth))
            case Destroy():
                self.later(now + 0.001, ("gone", operation.sandbox))

    def memory(self, make: Make) -> int:
        """What stages wrote stays in the memory of the sandbox, unless it became a layer."""
        on_layer = max(make.start if make.origin is None else 1, min(make.keep, make.depth))
        inside = self.load.megabytes[make.depth] - self.load.megabytes[min(on_layer, make.depth)]
        return int((0.6 + inside) * MEGABYTE)


def simulate(load: Workload) -> dict[str, Outcome]:
    return {
        name: Simulation(load, policy, prefetch=prefetch).run()
        for name, (policy, prefetch) in POLICIES.items()
    }


def rows(load: Workload | None = None) -> list[Row]:
    """Mean readiness by policy, and the ratio of exact match to the distance scheduler."""
    found = simulate(load or Workload())
    table = []
    for number, (name, outcome) in enumerate(found.items()):
        table.append(_row(f"mix-{number}", f"mix: mean readiness, {name}, ms", outcome, None))
    gain = statistics.fmean(found["exact match"].ready) / statistics.fmean(found["distance"].ready)
    table.append(_row("mix", "mix: exact match ÷ distance, mean readiness", found["distance"], gain))
    bare = statistics.fmean(found["exact match"].ready) / statistics.fmean(found["distance, no layers"].ready)
    table.append(
        _row("mix-bare", "mix: exact match ÷ distance, without layers", found["distance, no layers"], bare)
    )
    return table


def _row(identity: str, what: str, outcome: Outcome, gain: float | None) -> Row:
    value = statistics.fmean(outcome.ready) * 1e3 if gain is None else gain
    return {
        "id": identity,
        "what": what,
        "value": round(value, 4),
        "target": None if gain is None else 2.0,
        "holds": None if gain is None else gain >= 2.0,
        "n": len(outcome.ready),
        "p50": statistics.median(outcome.ready),
        "p95": percentile(outcome.ready, 0.95),
    }


def _stored(name: str, outcome: Outcome) -> dict[str, Any]:
    return {
        "id": name,
        "mean": statistics.fmean(outcome.ready),
        "p50": statistics.median(outcome.ready),
        "p95": percentile(outcome.ready, 0.95),
        "n": len(outcome.ready),
        "warm": outcome.kinds["warm setup"] / outcome.kinds.total(),
        "stage_seconds": outcome.stage_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--batches", type=int, default=Workload.batches)
    parser.add_argument("--seed", type=int, default=Workload.seed)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    arguments = parser.parse_args()
    load = replace(Workload(), batches=arguments.batches, seed=arguments.seed)
    found = simulate(load)
    if arguments.json:
        print(json.dumps([_stored(name, outcome) for name, outcome in found.items()], indent=1))
        return
    for name, outcome in found.items():
        ready, total = outcome.ready, outcome.kinds.total()
        print(
            f"{name}: mean {statistics.fmean(ready) * 1e3:.1f} ms, p50 {statistics.median(ready) * 1e3:.1f}, "
            f"p95 {percentile(ready, 0.95) * 1e3:.1f}; {len(ready)} sandboxes, {outcome.refused} refused, "
            f"{outcome.stage_seconds:.0f} s of stages run"
        )
        print("    " + ", ".join(f"{kind} {n / total:.1%}" for kind, n in outcome.kinds.most_common()))


if __name__ == "__main__":
    main()
