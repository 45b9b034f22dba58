"""The ledger: counters and histograms of how requests were served."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

from dutyfree.contract.served import Served, ServedKind

BOUNDS = tuple(base * 10.0**power for power in range(-5, 3) for base in (1, 2.5, 5))
"""The upper bounds of the histogram buckets in seconds: 10 µs to 500 s."""


class Histogram:
    """Counts by bucket. ``cumulative`` adds them up as Prometheus expects."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def cumulative(self) -> list[tuple[float, int]]:
        """Pairs of an upper bound and the number of hand-outs within it; the last bound is infinite."""
        pairs, seen = [], 0
        for bound, count in zip((*BOUNDS, float("inf")), self.counts, strict=True):
            seen += count
            pairs.append((bound, seen))
        return pairs


class Ledger:
    """Counters and histograms of one pool."""

    def __init__(self) -> None:
        self.served: Counter[tuple[ServedKind, str]] = Counter()
        self.seconds: dict[tuple[ServedKind, str], Histogram] = {}
        self.saved_seconds = 0.0
        self.waited_seconds = 0.0
        """Seconds that all requests together waited for room in the budget."""
        self.events: Counter[str] = Counter()
        """made, refills, resets, discarded, failures, refused, layers forgotten, cleanup failures; and why
        sandboxes were destroyed: returned, evicted, expired, stale, died."""

    def record(self, served: Served) -> None:
        key = (served.kind, served.stage)
        self.served[key] += 1
        self.seconds.setdefault(key, Histogram()).add(served.seconds)
        self.saved_seconds += served.cold_seconds - (served.seconds - served.waited)
        self.waited_seconds += served.waited

    def __repr__(self) -> str:
        return f"<Ledger: {self.served.total()} served, {self.saved_seconds:.1f} s saved>"

    def __str__(self) -> str:
        """A table, as text."""
        lines = [f"{'kind':<10}{'found ready':<14}{'served':>8}{'share':>8}{'mean':>12}"]
        for (kind, stage), share in self.shares().items():
            mean = self.seconds[kind, stage].mean
            count = self.served[kind, stage]
            digits = 1 if mean >= 0.001 else 3
            lines.append(f"{kind:<10}{stage:<14}{count:>8}{share:>8.1%}{mean * 1e3:>9.{digits}f} ms")
        lines.append(f"{self.saved_seconds:.1f} s saved, compared with cold starts")
        if self.waited_seconds:
            lines.append(f"{self.waited_seconds:.1f} s waited for room in the budget")
        lines += [f"{name}: {count}" for name, count in sorted(self.events.items())]
        return "\n".join(lines)

    def figures(self) -> dict[str, float]:
        """All numbers under flat names, for experiment trackers: ``served/warm/setup`` and so on."""
        found: dict[str, float] = {
            "served": self.served.total(),
            "saved_seconds": self.saved_seconds,
            "waited_seconds": self.waited_seconds,
        }
        for (kind, stage), count in sorted(self.served.items()):
            found[f"served/{kind}/{stage}"] = count
            found[f"seconds/{kind}/{stage}"] = self.seconds[kind, stage].mean
        return found | {f"events/{name}": count for name, count in sorted(self.events.items())}

    def prometheus(self) -> str:
        """All numbers in the text format of Prometheus, with full histograms."""
        name = "dutyfree_pool_served_seconds"
        lines = [f"# TYPE {name} histogram"]
        for (kind, stage), histogram in sorted(self.seconds.items()):
            of = f'kind="{kind}",stage="{stage}"'
            for bound, count in histogram.cumulative():
                at = "+Inf" if bound == float("inf") else f"{bound:g}"
                lines.append(f'{name}_bucket{{{of},le="{at}"}} {count}')
            lines.append(f"{name}_sum{{{of}}} {histogram.total:g}")
            lines.append(f"{name}_count{{{of}}} {histogram.count}")
        # A gauge, since a request that was slower than a cold start lowers it.
        lines.append("# TYPE dutyfree_pool_saved_seconds gauge")
        lines.append(f"dutyfree_pool_saved_seconds {self.saved_seconds:g}")
        lines.append("# TYPE dutyfree_pool_waited_seconds_total counter")
        lines.append(f"dutyfree_pool_waited_seconds_total {self.waited_seconds:g}")
        lines.append("# TYPE dutyfree_pool_events_total counter")
        for event, count in sorted(self.events.items()):
            lines.append(f'dutyfree_pool_events_total{{event="{event}"}} {count}')
        return "\n".join(lines) + "\n"

    def shares(self) -> Mapping[tuple[ServedKind, str], float]:
        """The share of each kind and stage."""
        total = self.served.total()
        return {of: count / total for of, count in sorted(self.served.items())}
