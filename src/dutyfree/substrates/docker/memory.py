"""Count how often the memory limit of a container killed a process."""

from __future__ import annotations

import contextlib
from pathlib import Path

import anyio.to_thread

from dutyfree.substrates.docker.engine import Engine, EngineError, EngineLost

_HIERARCHIES = (("/sys/fs/cgroup/memory", "memory.oom_control"), ("/sys/fs/cgroup", "memory.events"))
"""For both versions of control groups: the mount point, and the file with the count."""


class OutOfMemory:
    """Counts kills by the container's control group, or by the engine, which reports only the first."""

    def __init__(self, engine: Engine, container: str, *, limited: bool) -> None:
        self._engine = engine
        self._container = container
        self._limited = limited
        self._counter: Path | None = None
        self._sought = False
        self._count = 0

    async def grew(self, killed: bool) -> bool:
        """Whether there were kills since the last call; ``killed``: SIGKILL killed the last command."""
        if not self._limited:
            return False
        if not self._sought:
            self._sought = True
            state = await self._state()
            self._counter = await anyio.to_thread.run_sync(_counter, self._container, state.get("Pid", 0))
        if self._counter is not None:
            count = await anyio.to_thread.run_sync(_read, self._counter)
        else:
            count = int(killed and bool((await self._state()).get("OOMKilled")))
        grew, self._count = count > self._count, max(count, self._count)
        return grew

    async def _state(self) -> dict[str, object]:
        with contextlib.suppress(EngineError, EngineLost, KeyError):
            facts = await self._engine.request("GET", f"/containers/{self._container}/json")
            return dict(facts["State"])
        return {}


def _counter(container: str, pid: object) -> Path | None:
    """The file with the count; None if the engine is on another host, or its groups are not visible."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            if container not in place or controllers not in ("", "memory"):
                continue
            for mount, name in _HIERARCHIES:
                path = Path(f"{mount}{place}/{name}")
                if path.exists():
                    return path
    return None


def _read(counter: Path) -> int:
    with contextlib.suppress(OSError):
        for line in counter.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
