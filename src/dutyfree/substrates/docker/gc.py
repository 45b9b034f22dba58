"""Find and remove containers and images by their labels, also those of dead owners."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, Literal

import anyio
import anyio.to_thread
import msgspec

from dutyfree.contract.errors import CleanupError
from dutyfree.substrates.docker import images
from dutyfree.substrates.docker.engine import Engine, EngineError, EngineLost, EngineSilent
from dutyfree.substrates.local.owner import is_dead

OWNER = "dutyfree.owner"
PROCESS = "dutyfree.process"
ROLE = "dutyfree.role"
REMOVE_ATTEMPTS = 6
BAKED_SECONDS = 7 * 86400.0
"""How long a baked image stays. It is built again when it is needed."""


async def listed(engine: Engine, kind: Literal["containers", "images"], label: str) -> list[dict[str, Any]]:
    """The containers or images with the label, as the engine lists them."""
    query = {"filters": msgspec.json.encode({"label": [label]}).decode()}
    if kind == "containers":
        query["all"] = "1"
    found: list[dict[str, Any]] = await engine.request(
        "GET", f"/{kind}/json", query=query, deadline=engine.answer_seconds
    )
    return found


async def leftovers(engine: Engine, kind: Literal["containers", "images"]) -> list[str]:
    """The ids of containers or images whose owner is dead. Raises EngineError, EngineLost.

    Those whose owner cannot be checked from here (another machine, another pid namespace) are skipped.
    """

    def orphaned(found: dict[str, Any]) -> bool:
        return is_dead((found["Labels"] or {}).get(PROCESS, ""))

    found = await listed(engine, kind, "dutyfree=1")
    return await anyio.to_thread.run_sync(lambda: [each["Id"] for each in found if orphaned(each)])


async def baked_leftovers(engine: Engine, seconds: float = BAKED_SECONDS) -> list[str]:
    """The ids of baked images that were made more than ``seconds`` ago, and that no container uses.

    Raises EngineError, EngineLost.
    """
    found = await listed(engine, "images", f"{images.BAKED}=1")
    used = {each["ImageID"] for each in await listed(engine, "containers", "dutyfree=1")}
    old = (each for each in found if time.time() - each["Created"] >= seconds)
    return [each["Id"] for each in old if each["Id"] not in used]


async def remove_leftovers(engine: Engine) -> int:
    """Remove the leftovers. Returns how many containers there were."""
    containers = await leftovers(engine, "containers")
    for container in containers:
        with suppress(CleanupError):
            await remove(engine, container)
    await images.remove(engine, await leftovers(engine, "images"))
    return len(containers)


async def remove(engine: Engine, container: str) -> None:
    """Remove a container, running or not, if it exists. Raises CleanupError."""
    delay = 0.05
    query = {"force": "1", "v": "1"}
    for attempt in range(1, REMOVE_ATTEMPTS + 1):
        try:
            await engine.request(
                "DELETE", f"/containers/{container}", query=query, deadline=engine.remove_seconds
            )
            return
        except (EngineError, EngineLost) as error:
            if isinstance(error, EngineError) and error.status == 404:
                return
            if attempt == REMOVE_ATTEMPTS or isinstance(error, EngineSilent):
                raise CleanupError(
                    f"the container {container[:12]} could not be removed: {error}",
                    remedy=f"once the engine works again: docker rm -f {container[:12]}",
                ) from error
        # "Removal in progress", or the engine restarts: it does not report the end of either.
        await anyio.sleep(delay)
        delay *= 2
