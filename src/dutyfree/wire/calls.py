"""All calls of the channel, with the types of their arguments, results and items.

The names are those of the contract. ``CALLS`` is the table from which the server checks what arrives, and the
client what comes back. Items of the type ``bytes`` travel as they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import msgspec

from dutyfree.contract import (
    Action,
    Edit,
    Entry,
    Exec,
    Found,
    Limits,
    List,
    Observation,
    Read,
    Search,
    Span,
    Write,
)
from dutyfree.contract.abilities import Change, Chunk, Piece
from dutyfree.contract.limits import NetworkPolicy
from dutyfree.contract.served import Served
from dutyfree.contract.services import ServiceState
from dutyfree.wire.errors import WireError
from dutyfree.wire.recipes import WireRecipe


class Nothing(msgspec.Struct, frozen=True):
    """No arguments."""


class Create(msgspec.Struct, frozen=True):
    """Ask for a sandbox, or for a group of ``count`` in the same state."""

    key: str
    """The idempotency key: a request with the same key gets the same sandboxes."""
    recipe: WireRecipe = WireRecipe()
    limits: Limits | None = None
    labels: dict[str, str] = {}
    lease: float = 60.0
    """Seconds after which the sandboxes end, unless they are kept alive."""
    count: int | None = None
    """The size of the group; None for one sandbox that is no group."""
    patience: float | None = None
    """Seconds to wait for them at most; None to leave it to the server."""


class SandboxInfo(msgspec.Struct, frozen=True):
    """A sandbox, as its creation returns it."""

    id: str
    workdir: str
    spans: tuple[Span, ...]
    program: tuple[str, ...]
    served: Served | None
    can_set_network: bool
    labels: dict[str, str]
    created: float
    """Unix time."""
    expires: float
    """Unix time of the end of its lease."""


class KeepAlive(msgspec.Struct, frozen=True):
    """Let the leases of these sandboxes end ``lease`` seconds from now. Returns those that are gone."""

    sandboxes: tuple[str, ...]
    lease: float


class Files(msgspec.Struct, frozen=True):
    """Files of recipes, by their digests."""

    digests: tuple[str, ...]


class Prefetch(msgspec.Struct, frozen=True):
    recipes: tuple[WireRecipe, ...]
    count: int = 1


class Stream(msgspec.Struct, frozen=True):
    """A command whose output comes as items. With ``fed``, items of the client are its input."""

    action: Exec
    fed: bool = False


class Batch(msgspec.Struct, frozen=True):
    actions: tuple[Action, ...]
    stop_on_failure: bool = True


class BatchResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of one action: the field that it has; none of them for an action without a result."""

    observation: Observation | None = None
    data: bytes | None = None
    entries: tuple[Entry, ...] | None = None
    found: Found | None = None
    error: WireError | None = None


class Location(msgspec.Struct, frozen=True):
    path: str


class Watch(msgspec.Struct, frozen=True):
    path: str
    recursive: bool = False


class ShellCommand(msgspec.Struct, frozen=True):
    """An item that a shell runs. ``interrupt`` kills the command that runs instead."""

    command: str
    timeout: float | None = None
    interrupt: bool = False


class ShellAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    observation: Observation | None = None
    error: WireError | None = None


class TerminalStart(msgspec.Struct, frozen=True):
    command: str | tuple[str, ...] | None = None
    rows: int = 24
    columns: int = 80
    cwd: str | None = None
    env: dict[str, str] | None = None
    user: str | None = None


class TerminalInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a client does with a terminal: type, change its size, or kill its command."""

    data: bytes = b""
    size: tuple[int, int] | None = None
    kill: bool = False


class Start(msgspec.Struct, frozen=True):
    command: str | tuple[str, ...]
    cwd: str | None = None
    env: dict[str, str] | None = None
    stdin: bool = False


class ProcessInfo(msgspec.Struct, frozen=True):
    id: str
    command: str | tuple[str, ...]
    running: bool


class ProcessCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call for one background process. ``after`` is for its output."""

    process: str
    after: int = 0
    signal: int = 0
    data: bytes = b""


class Snapshot(msgspec.Struct, frozen=True):
    name: str | None = None


class Fork(msgspec.Struct, frozen=True):
    key: str
    count: int
    lease: float = 60.0
    patience: float | None = None


class SetNetwork(msgspec.Struct, frozen=True):
    policy: NetworkPolicy


class ServiceCall(msgspec.Struct, frozen=True):
    service: str
    arguments: tuple[str, ...] = ()
    cwd: str | None = None
    env: dict[str, str] | None = None
    stdin: bytes | None = None
    timeout: float | None = None


class Port(msgspec.Struct, frozen=True):
    port: int


class CallType(NamedTuple):
    """The types of a call; ``received`` and ``sent`` are its items, from and to the client."""

    arguments: Any
    result: Any = None
    received: Any = None
    sent: Any = None


Infos: TypeAlias = tuple[SandboxInfo, ...]

CALLS: dict[str, CallType] = {
    # For the whole node.
    "create": CallType(Create, Infos),
    "keep_alive": CallType(KeepAlive, tuple[str, ...]),
    "sandboxes": CallType(Nothing, tuple[str, ...]),
    "prepare": CallType(WireRecipe),
    "prefetch": CallType(Prefetch),
    "facts": CallType(Nothing, dict[str, str]),
    "missing": CallType(Files, tuple[str, ...]),
    "put_files": CallType(Files, None, bytes),
    "forget": CallType(WireRecipe),
    # For one sandbox.
    "release": CallType(Nothing),
    "exec": CallType(Exec, Observation),
    "stream": CallType(Stream, Observation, bytes, Chunk),
    "read": CallType(Read, bytes),
    "write": CallType(Write),
    "list": CallType(List, tuple[Entry, ...]),
    "remove": CallType(Location),
    "edit": CallType(Edit),
    "search": CallType(Search, Found),
    "batch": CallType(Batch, tuple[BatchResult, ...]),
    "upload": CallType(Location, None, bytes),
    "download": CallType(Location, None, None, bytes),
    "watch": CallType(Watch, None, None, tuple[Change, ...]),
    "shell": CallType(Nothing, None, ShellCommand, ShellAnswer),
    "terminal": CallType(TerminalStart, Observation, TerminalInput, bytes),
    "start": CallType(Start, ProcessInfo),
    "processes": CallType(Nothing, tuple[ProcessInfo, ...]),
    "attach": CallType(ProcessCall, ProcessInfo),
    "process_wait": CallType(ProcessCall, Observation),
    "process_kill": CallType(ProcessCall),
    "process_signal": CallType(ProcessCall),
    "process_write": CallType(ProcessCall),
    "process_close": CallType(ProcessCall),
    "process_output": CallType(ProcessCall, None, None, Piece),
    "reset": CallType(Nothing),
    "pause": CallType(Nothing),
    "resume": CallType(Nothing),
    "snapshot": CallType(Snapshot, WireRecipe),
    "fork": CallType(Fork, Infos),
    "set_network": CallType(SetNetwork),
    "services": CallType(Nothing, tuple[ServiceState, ...]),
    "restart": CallType(ServiceCall),
    "call": CallType(ServiceCall, Observation),
    "connect": CallType(Port, None, bytes, bytes),
}
"""By name. docs/service.md describes each."""

REPEATABLE = (
    *("create", "fork"),  # they have an idempotency key
    *("keep_alive", "sandboxes", "prepare", "prefetch", "facts", "missing", "release"),
    *("read", "write", "list", "search", "processes", "attach", "process_wait", "services"),
    *("reset", "pause", "resume", "set_network"),
)
"""Calls that a client may make again if it does not know whether the server has carried them out."""
