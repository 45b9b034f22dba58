"""Pods at their best, compared with pods as people use them: P17, KP1 to KP5.

P17: an action through our init, over one kept exec, against an exec of the cluster for each action. The
others: the round trip alone, an edit, and a pod that is made on demand or was ready.

    make k8s-up && .venv/bin/python bench/run.py pods
"""

from __future__ import annotations

from action_path import Archetype, measure
from rounds import Row

KUBERNETES = Archetype("kubernetes", "P17", 0.05, "KP", "exec websocket of the cluster")


async def best(rounds: int) -> list[Row]:
    return await measure(rounds, KUBERNETES)
