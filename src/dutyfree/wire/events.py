"""What happens on a server, as its event stream tells it.

``GET /v1/events`` sends each event as a server-sent event, whose name is the ``kind`` and whose data is the
event as JSON. docs/service.md describes the stream.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from dutyfree.contract import Span
from dutyfree.contract.served import Served
from dutyfree.wire.errors import WireError

Outcome: TypeAlias = Literal["ok", "failed", "timeout", "cancelled", "task", "infrastructure", "program"]
"""How a call ended. failed: its command had another exit code than 0. timeout: its command was killed. The
last three are verdicts on an error: who caused it."""


class Event(
    msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag_field="kind", tag=str.lower, gc=False
):
    """What all events have."""

    at: float
    """Unix time."""
    tenant: str


class Created(Event, frozen=True, kw_only=True):
    """A sandbox was created; in ``State``, a sandbox that exists."""

    sandbox: str
    labels: dict[str, str] = {}
    """At most a few, and shortened."""
    group: str = ""
    """The same for all sandboxes of one creation, or with the same label ``group``; empty if none."""
    served: Served | None = None
    """From what it was made, in how many seconds, and what a cold start would have cost."""
    spans: tuple[Span, ...] = ()
    expires: float = 0.0
    """Unix time of the end of its lease."""
    paused: bool = False


class Began(Event, frozen=True, kw_only=True):
    """A call has been running for longer than a second. Sent while somebody listens; an Action follows."""

    sandbox: str
    call: str
    label: str = ""
    number: int = 0
    """Of the call, among those of its tenant. The same as in its Action or Failure."""


class Action(Event, frozen=True, kw_only=True):
    """A call in a sandbox has returned."""

    sandbox: str
    call: str
    label: str = ""
    """The beginning of the command, or the path."""
    seconds: float
    """From the arrival of the call at the server to its result."""
    outcome: Outcome
    exit_code: int | None = None
    signal: int | None = None
    oom: bool = False
    spans: tuple[Span, ...] = ()
    number: int = 0


class Failure(Event, frozen=True, kw_only=True):
    """A call has raised an error: in a sandbox, or, if ``sandbox`` is empty, one for the whole server."""

    sandbox: str = ""
    call: str
    label: str = ""
    seconds: float
    outcome: Outcome
    error: WireError
    number: int = 0


class Lease(Event, frozen=True, kw_only=True):
    """Leases were extended, are about to end, or have ended."""

    change: Literal["extended", "ending", "expired"]
    sandboxes: dict[str, float]
    """Unix time of the end of each lease."""


class Paused(Event, frozen=True, kw_only=True):
    """A sandbox was paused or resumed. Sent while somebody listens."""

    sandbox: str
    paused: bool


class Released(Event, frozen=True, kw_only=True):
    """A sandbox has ended."""

    sandbox: str


class ServedCount(msgspec.Struct, frozen=True):
    """How many sandboxes were made from this kind of start, and the mean seconds that it took."""

    kind: str
    stage: str
    count: int
    seconds: float


class Pool(Event, frozen=True, kw_only=True):
    """How sandboxes were served since the server started. Sent when it has changed, without an id."""

    served: tuple[ServedCount, ...] = ()
    saved_seconds: float = 0.0
    """Compared with cold starts."""
    waited_seconds: float = 0.0
    sandboxes: dict[str, int] = {}
    """Sandboxes of the pool by what they do now. For the operator only."""
    events: dict[str, int] = {}
    """The pool's counters. For the operator only."""


class State(Event, frozen=True, kw_only=True):
    """All that exists now. The first event of a stream, and the one after lost events."""

    version: str
    started: float
    """Unix time."""
    sees_all: bool = False
    """Whether the stream has the events of all tenants."""
    sandboxes: tuple[Created, ...] = ()
    pool: Pool


class Lost(Event, frozen=True, kw_only=True):
    """Events are missing here: the reader was too slow, or came back too late. A State follows."""

    events: int | None = None
    """How many; null if that is not known, since the server was started again."""


class Bye(Event, frozen=True, kw_only=True):
    """The server ends the stream."""

    reason: str


Kept: TypeAlias = Created | Began | Action | Failure | Lease | Paused | Released
"""Events that a server keeps for a while, for readers who come back."""
