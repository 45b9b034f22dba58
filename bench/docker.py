"""Docker at its best, compared with Docker as it comes: P16, K1 to K5.

P16: an action through our init, over one kept stream, against an exec of Docker's API for each action. The
others: the round trip alone, an edit, and a container that is made on demand or was ready.

    scripts/with-docker .venv/bin/python bench/run.py docker
"""

from __future__ import annotations

from action_path import Archetype, measure
from rounds import Row

DOCKER = Archetype("docker", "P16", 0.03, "K", "exec of Docker's API")


async def best(rounds: int) -> list[Row]:
    return await measure(rounds, DOCKER)
