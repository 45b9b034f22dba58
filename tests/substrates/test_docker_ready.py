"""Ready containers, without an engine."""

from __future__ import annotations

import anyio
import pytest

from dutyfree.substrates.docker.containers import Container
from dutyfree.substrates.docker.ready import ReadyContainers

pytestmark = pytest.mark.anyio


class Made(Container):
    """A container that never says whether it works."""

    def __init__(self, removed: list[Container]) -> None:
        self._removed = removed
        self.asked = anyio.Event()

    async def works(self) -> bool:
        self.asked.set()
        await anyio.sleep_forever()
        return True

    async def remove(self) -> None:
        self._removed.append(self)


async def test_a_cancelled_request_leaves_no_container() -> None:
    removed: list[Container] = []
    made: list[Made] = []

    async def make(kind: str) -> Container:
        made.append(Made(removed))
        return made[-1]

    ready = ReadyContainers(1, make)
    await ready.fill("kind")
    async with anyio.create_task_group() as group:
        group.start_soon(ready.take, "kind")
        await made[0].asked.wait()
        group.cancel_scope.cancel()
    await ready.settle()
    assert removed == made[:1]
    await ready.close()
