"""Abilities: what only some substrates or sandboxes can do.

Each ability is a small Protocol. Ask for it with ``isinstance``. Its result types are beside it.
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
    """A substrate that can list its sandboxes."""

    async def sandboxes(self) -> Sequence[str]:
        """The ids of the sandboxes that exist now."""


@runtime_checkable
class Pooling(Protocol):
    """A substrate with a pool: it prepares sandboxes in advance, and gives groups."""

    async def prefetch(self, recipes: Iterable[Recipe], count: int = 1) -> None:
        """Prepare ``count`` sandboxes of each recipe in the background, for requests that will come soon."""

    def group(
        self,
        recipe: Recipe,
        count: int,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AbstractAsyncContextManager[Sequence[Sandbox]]:
        """``count`` sandboxes in the same state, or none. Raises the errors of ``sandbox``."""


@runtime_checkable
class Leasing(Protocol):
    """A pool that gives leases: sandboxes with a deadline (docs/pools.md)."""

    async def acquire(self, recipe: Recipe, size: int = 1) -> object:
        """A lease of ``size`` sandboxes. A pool may take further keyword arguments."""

    def release(self, lease: Any) -> None:
        """Give the sandboxes of a lease back."""


@runtime_checkable
class Warmed(Protocol):
    """A substrate that runs a workload's set-up itself, as stages of a recipe, from a fixed warmth."""

    @property
    def warmth(self) -> str:
        """The stage up to which it prepares sandboxes in advance."""


@runtime_checkable
class Settling(Protocol):
    """A substrate that works in the background, for example to keep sandboxes ready."""

    async def settle(self) -> None:
        """Wait until there is nothing to do in the background."""


@runtime_checkable
class Resettable(Protocol):
    """A sandbox that can be put back into its first state."""

    async def reset(self) -> None:
        """Return to the state in which it was handed out: no process, file or variable of its use is left."""


@runtime_checkable
class Snapshottable(Protocol):
    """A sandbox whose files can be kept."""

    async def snapshot(self) -> Recipe:
        """Keep the files. Sandboxes of the returned recipe start from them, with the same variables."""


@runtime_checkable
class Forkable(Protocol):
    """A sandbox that can be copied."""

    def fork(self, count: int) -> AbstractAsyncContextManager[Sequence[Sandbox]]:
        """``count`` new sandboxes that start from the files of this one."""


@runtime_checkable
class Pausable(Protocol):
    """A sandbox whose processes can be frozen."""

    async def pause(self) -> None:
        """Freeze all processes. Until ``resume``, actions raise DispatchError.

        Timeouts do not run during the pause.
        """

    async def resume(self) -> None:
        """Let the processes go on."""


@runtime_checkable
class NetworkControl(Protocol):
    """A sandbox whose network policy can change."""

    async def set_network(self, policy: NetworkPolicy) -> None:
        """Change what the sandbox may reach. Connections that the new policy does not allow are cut at once.

        A reset keeps the policy. Raises UsageError for a policy that is not valid. Raises ActionError if a
        process in the sandbox prevents the change, and DispatchError; then the former policy stays in force.
        """


@runtime_checkable
class Ports(Protocol):
    """A sandbox whose servers can be reached from this machine."""

    async def connect(self, port: int) -> ByteStream:
        """Connect to a server in the sandbox, with any network policy. Close the stream after use.

        Raises PortClosed, a ConnectionRefusedError, if no process listens on the port.
        ``dutyfree.port_forward.forward`` gives the port an address on this machine.
        """


class Shell(Protocol):
    """A shell that keeps its variables, functions and working directory between commands."""

    async def run(self, command: str, *, timeout: float | None = None) -> Observation:
        """Run a command in the shell."""


@runtime_checkable
class ShellSessions(Protocol):
    """A sandbox that can keep a shell open."""

    def shell(self) -> AbstractAsyncContextManager[Shell]:
        """A shell; the end of the context ends it."""


class Process(Protocol):
    """A command in the background."""

    @property
    def id(self) -> str: ...

    async def wait(self) -> Observation:
        """Wait for its end."""

    async def kill(self) -> None:
        """Kill its whole process tree."""


@runtime_checkable
class BackgroundProcesses(Protocol):
    """A sandbox that can run commands in the background."""

    async def start(
        self, command: Command, *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> Process:
        """Start a command and return at once."""


class Chunk(msgspec.Struct, frozen=True):
    """A piece of a command's output."""

    stream: Literal["stdout", "stderr"]
    data: bytes


@runtime_checkable
class Programmed(Protocol):
    """A sandbox whose image names a program to run."""

    @property
    def program(self) -> tuple[str, ...]:
        """The image's entry point and command; empty if it has none."""


@runtime_checkable
class Streaming(Protocol):
    """A sandbox that gives output while the command runs."""

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
        """Yield output as it arrives. The last item is the Observation, without the output.

        An iterable as ``stdin`` is read as fast as the command reads, and not after the command has ended.
        """


class Piece(msgspec.Struct, frozen=True):
    """A piece of a process's output; ``position`` counts the bytes of both streams before it."""

    position: int
    stream: Literal["stdout", "stderr"]
    data: bytes


class ManagedProcess(Process, Protocol):
    """A command in the background with input, output and signals."""

    @property
    def command(self) -> Command: ...

    @property
    def running(self) -> bool: ...

    def output(self, after: int = 0) -> AsyncIterator[Piece]:
        """Yield its output from position ``after`` on, until it ends.

        The last ``Limits.output`` bytes are kept. If ``after`` is older, it begins with the oldest piece. To
        continue later, pass ``position + len(data)`` of the last piece.
        """

    async def write(self, data: bytes) -> None:
        """Write to its stdin. Raises InputClosed (a BrokenPipeError), and ArgumentError if it has none."""

    async def close_stdin(self) -> None:
        """End its input."""

    async def signal(self, number: int) -> None:
        """Send a signal to its process group; nothing happens if it has ended.

        Raises LimitError for a number that is not a signal.
        """


@runtime_checkable
class ManagedProcesses(Protocol):
    """A sandbox whose background processes have input and output, and can be found again by their ids."""

    async def start(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bool = False,
    ) -> ManagedProcess:
        """Start a command. With ``stdin`` you can write to its input; otherwise its input is empty."""

    async def processes(self) -> Sequence[ManagedProcess]:
        """All processes that run, and the latest of those that have ended."""

    async def attach(self, id: str) -> ManagedProcess:  # noqa: A002
        """The process with this id. Raises UnknownProcess, a KeyError."""


class Terminal(Protocol):
    """A command in its own terminal."""

    @property
    def id(self) -> str: ...

    async def read(self) -> bytes:
        """Wait for output and return it; empty after the end."""

    async def write(self, data: bytes) -> None:
        """Send input, as if typed; waits until the command reads it. Raises InputClosed after its end."""

    async def resize(self, rows: int, columns: int) -> None:
        """Change the size. Raises LimitError for a size out of range."""

    async def wait(self) -> Observation:
        """Wait for the end of the command. The observation has no output."""

    async def kill(self) -> None:
        """Kill its whole process tree."""


@runtime_checkable
class Terminals(Protocol):
    """A sandbox that can run a command in a terminal."""

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
        """A terminal that runs a command, or a shell. The end of the context kills its processes."""


@runtime_checkable
class Editing(Protocol):
    """A sandbox that can edit a file in one action."""

    async def edit(self, path: str, old: bytes, new: bytes) -> None:
        """Replace ``old``, which must occur exactly once in the file, by ``new``.

        The file is replaced as a whole and keeps its mode and owner. Links are followed. Raises EditError,
        and the ActionErrors of ``read`` and ``write``.
        """


@runtime_checkable
class Searching(Protocol):
    """A sandbox that can search its files in one action."""

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
        """Search lines or names; ``Search`` describes the arguments. Links are not followed.

        Raises ActionError for a bad expression (kind ``pattern``), for the path, and after the timeout.
        """


class Change(msgspec.Struct, frozen=True):
    """A change of a path, relative to the watched one; "" is the watched path itself.

    ``lost``: there were more changes than the buffer holds, or more directories than can be watched.
    """

    kind: Literal["created", "modified", "closed", "attributes", "deleted", "moved_from", "moved_to", "lost"]
    path: str = ""
    directory: bool = False


@runtime_checkable
class Watching(Protocol):
    """A sandbox that can report changes of files."""

    def watch(
        self, path: str = ".", *, recursive: bool = False
    ) -> AbstractAsyncContextManager[AsyncIterator[Change]]:
        """The changes below ``path`` since the context was entered. A reader that is too slow gets ``lost``.

        The iteration ends if the path itself is deleted. Entering raises ActionError.
        """


@runtime_checkable
class Batching(Protocol):
    """A sandbox that can perform several actions in one round trip."""

    async def batch(
        self, actions: Sequence[Action], *, stop_on_failure: bool = True
    ) -> tuple[Result | Exception, ...]:
        """Perform actions one after the other; one result for each action that ran.

        An ActionError is returned as the result of its action. With ``stop_on_failure`` the batch ends after
        the first failure: an error, or a command whose observation is not ``ok``. Errors of the substrate are
        raised. A cancellation kills the running action, and the following ones do not start.
        """


@runtime_checkable
class Serving(Protocol):
    """A sandbox that runs the services of its recipe."""

    async def services(self) -> Sequence[ServiceState]:
        """The state of each service, in the order of the recipe."""

    async def restart(self, service: str) -> None:
        """End a service, if it runs, and start it.

        Raises UsageError for an unknown name, and ActionError if it does not become ready.
        """

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
        """Run a fork of a service to its end, as ``exec`` runs a command.

        ``env`` adds to the service's variables. A service that has ended is started again first. Raises
        UsageError if no service of this name forks, and ActionError if it does not become ready.
        """
