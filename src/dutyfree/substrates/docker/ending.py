"""Why a container has ended, as the engine knows it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any

from dutyfree.contract.errors import DispatchError, ExecError, SandboxClosed, SandboxGone
from dutyfree.substrates.docker.engine import Engine, EngineError, EngineLost

STOP_SECONDS = 3.0
"""How long a container whose init has ended may still count as running."""


async def require_running(engine: Engine, container: str) -> None:
    """Raises what ``reason`` returns if the container has ended, ExecError if the engine is gone."""
    try:
        facts = await engine.request("GET", f"/containers/{container}/json")
    except EngineError as error:
        raise refusal(error, container) from error
    except EngineLost as error:
        raise ExecError(f"the Docker engine closed the connection: {error}") from error
    if not (state := facts["State"])["Running"]:
        raise await reason(engine, container, state)


async def reason(engine: Engine, container: str, state: Mapping[str, Any]) -> SandboxClosed | SandboxGone:
    """Why the container has ended. Only if the engine is sure, it is the agent's doing."""
    name = f"the container {container[:12]}"
    if state.get("OOMKilled"):
        return SandboxGone(f"{name} was killed by its memory limit")
    events = await _last_events(engine, container)
    if "kill" in events:
        return SandboxClosed(f"{name} was killed or stopped from outside")
    if "die" not in events:
        return SandboxClosed(f"{name} has ended, and the Docker engine does not know why")
    return SandboxGone(f"{name} ended with code {state.get('ExitCode')}")


async def stream_reason(engine: Engine, container: str, said: str) -> Exception:
    """Why the stream to a container's init ended; ``said`` is what init wrote to its stderr."""
    name = f"the stream to the container {container[:12]} ended"
    try:
        # The engine notices the end of a process a moment later than we notice that of its stream.
        with contextlib.suppress(EngineLost):
            await engine.request("POST", f"/containers/{container}/wait", deadline=STOP_SECONDS)
        await require_running(engine, container)
    except (SandboxGone, SandboxClosed) as error:
        return type(error)(f"{error}: {said}") if said else error
    except (DispatchError, ExecError) as error:
        return ExecError(f"{name}: {error}")
    except (EngineError, EngineLost) as error:
        return ExecError(f"{name}, and the Docker engine does not work: {error}")
    return ExecError(f"{name}, though the container still runs: the Docker engine closed the connection")


def refusal(error: EngineError, container: str) -> DispatchError:
    """The error that the caller gets if the engine refuses an action."""
    if error.status == 404 or "is not running" in error.message:
        return SandboxClosed(f"the container {container[:12]} is gone: {error}")
    return DispatchError(f"the Docker engine refused: {error}")


async def _last_events(engine: Engine, container: str) -> set[str]:
    """Which of the events "kill" (a signal by the engine) and "die" the engine remembers.

    It keeps a few hundred events of all containers, and none after a restart. A kill comes before the
    death: if it remembers the death and no kill, there was no kill.
    """
    filters = json.dumps({"container": [container], "event": ["kill", "die"]})
    query = {"since": "1", "until": f"{time.time():.9f}", "filters": filters}
    said = b""
    with contextlib.suppress(EngineError, EngineLost):
        async with engine.stream("GET", "/events", query=query) as response:
            said = b"".join([piece async for piece in response.pieces()])
    return {json.loads(line)["Action"] for line in said.splitlines() if line.strip()}
