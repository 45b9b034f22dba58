"""What the event stream costs a call on the server, if nobody listens and if somebody does.

::

    bench/events.py [CALLS]

One process, no sandbox: a handler that returns at once, alone and with its events.
"""

from __future__ import annotations

import asyncio
import sys
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

from dutyfree.contract import Exec, Observation, Span
from dutyfree.server.events import Events, recorded
from dutyfree.server.sandboxes import Held, Sandboxes

ROUNDS = 15
PHASES = ("dispatch", "spawn", "run", "collect", "return")
SEEN = Observation(exit_code=0, stdout=b"hello\n", spans=tuple(Span(name, 0.0, 0.001) for name in PHASES))


async def exec_(_context: Any, _arguments: Any) -> Observation:
    return SEEN


async def timed(handler: Any, context: Any, calls: int) -> float:
    """Seconds of one call."""
    action = Exec("python3 -m pytest -q tests/unit")
    start = perf_counter()
    for _ in range(calls):
        await handler(context, action)
    return (perf_counter() - start) / calls


async def main(calls: int) -> None:
    sandboxes = Sandboxes()
    events = Events(sandboxes, lambda: None)
    creation: Any = SimpleNamespace(members=[], sandboxes=())
    held = Held("local", SimpleNamespace(paused=False), creation, {}, 3600.0)  # type: ignore[arg-type]
    sandboxes._held[held.id] = held
    context = SimpleNamespace(service=SimpleNamespace(events=events), tenant="local", sandbox_id=held.id)
    with_events = recorded(exec_)
    alone, quiet, heard = [], [], []
    for _ in range(ROUNDS):
        alone.append(await timed(exec_, context, calls))
        quiet.append(await timed(with_events, context, calls))
        with events.listening("local"):
            heard.append(await timed(with_events, context, calls))
    added = [one - other for one, other in zip(quiet, alone, strict=True)]
    also = [one - other for one, other in zip(heard, alone, strict=True)]
    print(f"added to a call, µs: {median(added) * 1e6:.2f} if nobody listens")
    print(f"added to a call, µs: {median(also) * 1e6:.2f} if somebody does, without encoding")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if sys.argv[1:] else 20_000))
