"""The distance between two prefixes: estimated seconds of stages, learned from measured ones."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, log

from dutyfree.engine.pool.scheduler.values import PrefixChain

PRIOR: Mapping[str, float] = {
    "base": 0.001,
    "image": 1.0,
    "repository": 0.2,
    "dependencies": 2.0,
    "files": 0.05,
    "setup": 0.05,
    "create": 0.0015,
    "fork": 0.001,
}
"""Seconds before anything was measured. "create" is a sandbox on a layer, "fork" one copy."""

_LEAST = 1e-6
_WEIGHT = 0.3
"""The weight of a new measurement."""
_OUTLIER = log(8)
"""A measurement that is further off than this factor counts as if it were this far off."""


class Costs:
    """Estimated seconds by prefix key; for unknown keys by kind of stage; for unknown kinds by the prior.

    The estimate is an exponentially weighted mean of logarithms, with outliers clipped. For the skewed times
    of stages it is close to the median, and one slow download does not distort it for hours.
    """

    def __init__(self, prior: Mapping[str, float] = PRIOR) -> None:
        self._prior = dict(PRIOR) | dict(prior)
        self._learned: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def learn(self, key: str, kind: str, seconds: float) -> None:
        value = log(max(seconds, _LEAST))
        for name in (key, f"kind {kind}"):
            before = self._learned.get(name)
            if before is not None:
                value = before + _WEIGHT * max(-_OUTLIER, min(_OUTLIER, value - before))
            self._learned[name] = value
            self._seconds[name] = exp(value)
            value = log(max(seconds, _LEAST))

    def forget(self, key: str) -> None:
        self._learned.pop(key, None)
        self._seconds.pop(key, None)

    def seconds(self, key: str, kind: str) -> float:
        found = self._seconds.get(key)
        if found is None:
            found = self._seconds.get(f"kind {kind}")
        return self._prior.get(kind, 0.1) if found is None else found

    def create(self) -> float:
        return self.seconds("create", "create")

    def fork(self) -> float:
        return self.seconds("fork", "fork")

    def distance(self, chain: PrefixChain, start: int, end: int) -> float:
        """Estimated seconds to run the stages after depth ``start`` up to depth ``end``."""
        total = 0.0
        for depth in range(start + 1, end + 1):
            total += self.seconds(chain.keys[depth], chain.kinds[depth])
        return total

    def cold(self, chain: PrefixChain) -> float:
        """Estimated seconds of a cold start."""
        return self.create() + self.distance(chain, 0, chain.depth)
