"""Abilities: what a substrate or a sandbox may be able to do beyond the contract.

Each is a small Protocol, asked for with ``isinstance``. The values that they give stand beside them.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import msgspec

from dutyfree.contract.action import Action, Command, Found, Result
from dutyfree.contract.limits import Limits, NetworkPolicy
from dutyfree.contract.observation import Observation
from dutyfree.contract.recipe import Recipe
from dutyfree.contract.sandbox import Sandbox
from dutyfree.contract.services import ServiceState

if TYPE_CHECKING:
    from anyio.abc import ByteStream


@runtime_checkable
class Countable(Protocol):
    """Of a substrate."""

    async def sandboxes(self) -> Sequence[str]:
        """The ids of its sandboxes that exist now."""
        ...


@runtime_checkable
class Pooling(Protocol):
    """Of a substrate that keeps sandboxes warm."""

    async def prefetch(self, recipes: Iterable[Recipe], count: int = 1) -> None:
        """``count`` sandboxes of each recipe will be asked for soon: make them ready in the background."""
        ...

    def group(
        self,
        recipe: Recipe,
        count: int,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AbstractAsyncContextManager[Sequence[Sandbox]]:
        """``count`` sandboxes in the same state: all of them, or (raising as ``sandbox`` does) none."""
        ...


@runtime_checkable
class Leasing(Protocol):
    """Of a pool: sandboxes for a time (docs/pools.md)."""

    async def acquire(self, recipe: Recipe, size: int = 1) -> object:
        """A lease of so many sandboxes; further terms by name."""
        ...

    def release(self, lease: Any) -> None: ...


@runtime_checkable
class Warmed(Protocol):
    """Of a substrate that brings sandboxes through a workload's set-up itself, from where it is warm."""

    @property
    def warmth(self) -> str:
        """What is ready before a sandbox is asked for: up to which stage."""
        ...


@runtime_checkable
class Resettable(Protocol):
    async def reset(self) -> None:
        """Back to the state of the hand-out: no process, file or variable of the former use is left."""
        ...


@runtime_checkable
class Snapshottable(Protocol):
    async def snapshot(self) -> Recipe:
        """Keep the present files; the recipe gives sandboxes that start from them, with the variables."""
        ...


@runtime_checkable
class Forkable(Protocol):
    def fork(self, count: int) -> AbstractAsyncContextManager[Sequence[Sandbox]]:
        """``count`` sandboxes that start from the present state of this one."""
        ...


@runtime_checkable
class Pausable(Protocol):
    async def pause(self) -> None:
        """Stop every process where it stands. Until the resumption, actions raise DispatchError.

        The time of the pause counts for no command's timeout.
        """
        ...

    async def resume(self) -> None:
        """All goes on."""
        ...


@runtime_checkable
class NetworkControl(Protocol):
    async def set_network(self, policy: NetworkPolicy) -> None:
        """What the sandbox may reach from now on; connections that it has to elsewhere are cut, at once.

        A reset keeps it. Raises UsageError for a policy that makes no sense; ActionError (a process in the
        sandbox is in the way) and DispatchError with the former one still in force.
        """
        ...


@runtime_checkable
class Ports(Protocol):
    async def connect(self, port: int) -> ByteStream:
        """A connection to a server in the sandbox, whatever its network policy; close it after use.

        Raises PortClosed, a ConnectionRefusedError, if no process listens there.
        ``dutyfree.port_forward.forward`` makes an address on this machine of it.
        """
        ...


class Shell(Protocol):
    """A held shell: variables, functions and the working directory live on between commands."""

    async def run(self, command: str, *, timeout: float | None = None) -> Observation: ...


@runtime_checkable
class ShellSessions(Protocol):
    def shell(self) -> AbstractAsyncContextManager[Shell]: ...


class Process(Protocol):
    """A command in the background."""

    @property
    def id(self) -> str: ...

    async def wait(self) -> Observation: ...

    async def kill(self) -> None:
        """Kill its whole tree."""
        ...


@runtime_checkable
class BackgroundProcesses(Protocol):
    async def start(
        self, command: Command, *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> Process: ...


class Chunk(msgspec.Struct, frozen=True):
    stream: Literal["stdout", "stderr"]
    data: bytes


@runtime_checkable
class Programmed(Protocol):
    """A sandbox whose image says what it runs."""

    @property
    def program(self) -> tuple[str, ...]:
        """The image's entry point and command; nothing if it has none."""
        ...


@runtime_checkable
class Streaming(Protocol):
    def stream(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | AsyncIterable[bytes] | None = None,
        timeout: float | None = None,
        user: str | None = None,
    ) -> AsyncIterator[Chunk | Observation]:
        """Output as it comes; the last item is the Observation, its streams empty.

        An iterable as ``stdin`` is read at the command's own pace, and no further once it has ended.
        """
        ...


class Piece(msgspec.Struct, frozen=True):
    """A part of what a process printed, and where in the whole of it, both streams together, it begins."""

    position: int
    stream: Literal["stdout", "stderr"]
    data: bytes


class ManagedProcess(Process, Protocol):
    """A command in the background that can be talked to."""

    @property
    def command(self) -> Command: ...

    @property
    def running(self) -> bool: ...

    def output(self, after: int = 0) -> AsyncIterator[Piece]:
        """What it printed from position ``after`` on, and what it prints, until it ends.

        As much as ``Limits.output`` is kept: if what is asked for is gone, it begins with the oldest that
        is there. Whoever goes on gives ``position + len(data)`` of the last piece.
        """
        ...

    async def write(self, data: bytes) -> None:
        """To its stdin, if it was started with one. Raises InputClosed (a BrokenPipeError), ArgumentError."""
        ...

    async def close_stdin(self) -> None: ...

    async def signal(self, number: int) -> None:
        """Send a signal to it and its process group; nothing happens if it has ended.

        Raises LimitError for a number that is no signal's.
        """
        ...


@runtime_checkable
class ManagedProcesses(Protocol):
    """As BackgroundProcesses, and a process can be found again by its id."""

    async def start(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bool = False,
    ) -> ManagedProcess:
        """With ``stdin`` its input is kept open, to be written to; else it is empty."""
        ...

    async def processes(self) -> Sequence[ManagedProcess]:
        """All that were started here: those that run, and the latest of those that ended."""
        ...

    async def attach(self, id: str) -> ManagedProcess:  # noqa: A002
        """The process of this id. Raises UnknownProcess, a KeyError."""
        ...


class Terminal(Protocol):
    """A command in a terminal of its own."""

    @property
    def id(self) -> str: ...

    async def read(self) -> bytes:
        """What it printed since; waits until there is something. Empty when no more comes."""
        ...

    async def write(self, data: bytes) -> None:
        """As if typed. Waits while the command takes nothing. Raises InputClosed after its end."""
        ...

    async def resize(self, rows: int, columns: int) -> None:
        """Raises LimitError for a size that cannot be."""
        ...

    async def wait(self) -> Observation:
        """The end of the command; its streams are empty."""
        ...

    async def kill(self) -> None:
        """Kill its whole tree."""
        ...


@runtime_checkable
class Terminals(Protocol):
    def terminal(
        self,
        command: Command | None = None,
        *,
        rows: int = 24,
        columns: int = 80,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> AbstractAsyncContextManager[Terminal]:
        """A terminal that runs the command, or a shell. Leaving it hangs it up and kills what is left."""
        ...


@runtime_checkable
class Editing(Protocol):
    async def edit(self, path: str, old: bytes, new: bytes) -> None:
        """Replace ``old``, which must stand in the file exactly once, by ``new``.

        The file is replaced as a whole, with its mode and owner; links are followed. Raises EditError, and
        other ActionErrors as ``read`` and ``write`` do.
        """
        ...


@runtime_checkable
class Searching(Protocol):
    async def search(
        self,
        path: str = ".",
        text: str | None = None,
        *,
        regex: bool = False,
        ignore_case: bool = False,
        names: Sequence[str] = (),
        skip: Sequence[str] = (".git",),
        binary: bool = False,
        limit: int = 1000,
        width: int = 500,
        timeout: float | None = 60.0,
    ) -> Found:
        """See ``Search``. Links are not followed.

        Raises ActionError: for a bad expression (``pattern``), the path, or a search that takes too long.
        """
        ...


class Change(msgspec.Struct, frozen=True):
    """Something happened to a path below the watched one; "" is that one itself.

    ``lost``: more happened than could be kept, or more directories are there than can be watched.
    """

    kind: Literal["created", "modified", "closed", "attributes", "deleted", "moved_from", "moved_to", "lost"]
    path: str = ""
    directory: bool = False


@runtime_checkable
class Watching(Protocol):
    def watch(
        self, path: str = ".", *, recursive: bool = False
    ) -> AbstractAsyncContextManager[AsyncIterator[Change]]:
        """Changes under ``path`` from the entering on. Whoever reads too slowly gets ``lost``.

        The iteration ends when the path itself is deleted. Raises ActionError on entering.
        """
        ...


@runtime_checkable
class Batching(Protocol):
    async def batch(
        self, actions: Sequence[Action], *, stop_on_failure: bool = True
    ) -> tuple[Result | Exception, ...]:
        """Several actions, one after the other, in one round trip; a result for each that was carried out.

        An ActionError that an action would raise stands in its place. With ``stop_on_failure`` the first that
        fails (a command whose observation is not ``ok``, or an error) is the last result. Errors of the
        substrate are raised. A cancellation kills what runs, and what follows is not begun.
        """
        ...


@runtime_checkable
class Serving(Protocol):
    """Of a sandbox whose recipe's services run."""

    async def services(self) -> Sequence[ServiceState]:
        """How each of them fares, in the recipe's order."""
        ...

    async def restart(self, service: str) -> None:
        """End it if it runs, and start it. Raises UsageError, and ActionError if it does not become ready."""
        ...

    async def call(
        self,
        service: str,
        arguments: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout: float | None = None,
    ) -> Observation:
        """Run a fork of a service that forks, to its end, as ``exec`` runs a command.

        ``env`` adds to that of the service. One that has ended is started again before. Raises UsageError if
        there is none of this name that forks, and ActionError if it does not become ready.
        """
        ...
