"""The nouns of the system.

A *substrate* gives *sandboxes*. An agent's *action* in a sandbox yields an *observation*, with the
timing *spans* inside it. A *recipe* says in what state the sandbox must be when it is handed out.

Paths are those of the sandbox: relative ones start at its working directory. Everything a program may
not be able to do everywhere is an *ability*: a small Protocol to be asked for with ``isinstance``.
"""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from dutyfree.errors import LimitError

if TYPE_CHECKING:
    from anyio.abc import ByteStream

Command: TypeAlias = str | Sequence[str]
"""A string runs in ``/bin/sh -c``; a sequence is an argument vector and runs without a shell."""

NetworkPolicy: TypeAlias = Literal["off", "on"] | tuple[str, ...]
"""What a sandbox may reach: nothing; whatever this machine reaches; or what a list names.

An entry is a host (``example.org``), all names below a domain (``*.example.org``), an address or a range
of them (``10.0.0.0/8``), or ``host``: this machine, by the substrate's ``host_address``. Each may end in a
port (``example.org:443``).
"""

KILLED = 128
"""Exit codes of a command killed by signal n are KILLED + n, as shells have it."""


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A named stretch of time, in seconds since the action was asked for.

    Names: queue, dispatch, spawn, run, collect, return. ``run`` is the command's own time inside the
    environment; a substrate that cannot tell it leaves it out.
    """

    name: str
    start: float
    seconds: float


class Usage(msgspec.Struct, frozen=True):
    """What the command consumed, where the substrate knows."""

    cpu_seconds: float
    peak_memory: int | None = None


class Cut(msgspec.Struct, frozen=True):
    """Bytes dropped from the middle of each stream."""

    stdout: int = 0
    stderr: int = 0


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What came back from a command. ``exit_code`` is 128 + n for a command killed by signal n.

    A substrate that sees only such codes (Docker) derives ``signal`` from them.
    """

    exit_code: int
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False
    cut: Cut = Cut()
    seconds: float = 0.0
    spans: tuple[Span, ...] = ()
    usage: Usage | None = None

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    @property
    def command_seconds(self) -> float | None:
        """The command's own time inside the environment, if the substrate tells."""
        return next((span.seconds for span in self.spans if span.name == "run"), None)


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a sandbox may use. None leaves a resource to the substrate's default.

    A substrate that cannot enforce a limit it is asked for refuses with CreateError. Raises LimitError for
    one that is none: zero, or less.
    """

    cpus: float | None = None
    memory: int | None = None
    """Bytes."""
    pids: int | None = None
    disk: int | None = None
    """Bytes that may be written."""
    network: NetworkPolicy | None = None
    """Off by default wherever the substrate isolates at all."""
    output: int = 16 << 20
    """Bytes kept of each stream: the head and the tail; the middle is counted and dropped."""

    def __post_init__(self) -> None:
        for name in ("cpus", "memory", "pids", "disk"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise LimitError(f"{name} must be more than nothing, not {value}")
        if self.output < 0:
            raise LimitError(f"output must not be less than nothing: {self.output}")


class Entry(msgspec.Struct, frozen=True):
    """One name in a directory."""

    name: str
    kind: Literal["file", "directory", "link", "other"]
    size: int
    mode: int


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step towards the wanted state: host files copied in, then commands run, which must succeed."""

    kind: Literal["repository", "dependencies", "files", "setup"]
    commands: tuple[str | tuple[str, ...], ...] = ()
    files: Mapping[str, Path] = {}
    """Path in the sandbox (relative to the working directory) → file or directory on this host."""
    secrets: tuple[str, ...] = ()
    """Variables of the caller's environment that the commands get; they enter no key and no layer."""


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state a sandbox must be in: an image, then stages upon it. Every prefix has a content key."""

    image: str | None = None
    """None is the substrate's own default: the host for bare, the study's image for Docker."""
    stages: tuple[Stage, ...] = ()

    def key(self, length: int | None = None) -> str:
        """The content key of the first ``length`` stages (all of them by default)."""
        import hashlib  # it takes longer to load than all of this module

        digest = hashlib.sha256(repr(self.image).encode())
        for stage in self.stages[:length]:
            digest.update(repr((stage.kind, stage.commands, sorted(stage.files))).encode())
            for _, source in sorted(stage.files.items()):
                digest.update(tree_digest(source))
        return digest.hexdigest()[:32]


def tree_digest(root: Path) -> bytes:
    """A digest of names, modes and contents under ``root``, independent of times and owners."""
    import hashlib

    digest = hashlib.sha256()
    paths = [root, *sorted(root.rglob("*"))] if root.is_dir() and not root.is_symlink() else [root]
    for path in paths:
        name = "" if path == root else str(path.relative_to(root))
        if path.is_symlink():
            digest.update(f"l{name}\0{os.readlink(path)}\0".encode(errors="surrogateescape"))
        elif path.is_dir():
            digest.update(f"d{name}\0{path.stat().st_mode:o}\0".encode(errors="surrogateescape"))
        else:
            stat = path.stat()
            digest.update(f"f{name}\0{stat.st_mode:o}\0{stat.st_size}\0".encode(errors="surrogateescape"))
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.digest()


class Exec(msgspec.Struct, frozen=True, tag="exec", omit_defaults=True):
    command: str | tuple[str, ...]
    cwd: str | None = None
    env: Mapping[str, str] | None = None
    stdin: bytes | None = None
    timeout: float | None = None
    user: str | None = None


class Read(msgspec.Struct, frozen=True, tag="read"):
    path: str


class Write(msgspec.Struct, frozen=True, tag="write"):
    path: str
    data: bytes
    mode: int = 0o644


class Edit(msgspec.Struct, frozen=True, tag="edit"):
    """Replace ``old``, which must stand in the file exactly once, by ``new``."""

    path: str
    old: bytes
    new: bytes


class List(msgspec.Struct, frozen=True, tag="list"):
    path: str


class Search(msgspec.Struct, frozen=True, tag="search", omit_defaults=True):
    """Look for lines that hold ``text``, or without it for names, under ``path``."""

    path: str = "."
    text: str | None = None
    regex: bool = False
    """``text`` is an extended regular expression of POSIX."""
    ignore_case: bool = False
    names: tuple[str, ...] = ()
    """Only files whose name, or whose path below ``path`` where a pattern has a slash, fits one of these."""
    skip: tuple[str, ...] = (".git",)
    """Names of directories that are not entered; patterns too."""
    binary: bool = False
    """Look also into files that hold NUL bytes."""
    limit: int = 1000
    """At most so many matches."""
    width: int = 500
    """At most so many bytes of a line."""
    timeout: float | None = 60.0


class Match(msgspec.Struct, frozen=True):
    """One line that fits, or one name (``line`` 0). The path can be given to ``read`` as it is."""

    path: str
    line: int = 0
    text: bytes = b""
    cut: bool = False


class Found(msgspec.Struct, frozen=True):
    matches: tuple[Match, ...]
    """By path, then by line."""
    truncated: bool = False
    """There were more than the limit."""
    unseen: int = 0
    """Files that were not looked into: binary, too large, or closed to us."""


Action: TypeAlias = Exec | Read | Write | Edit | List | Search
"""What an agent asks, as data: trajectories are made of these."""

Result: TypeAlias = Observation | bytes | tuple[Entry, ...] | Found | None
"""What an action brings: of Exec, Read, List, Search; None of Write and Edit."""


@runtime_checkable
class Sandbox(Protocol):
    """One environment. Safe to use from many tasks of one event loop at once.

    Every method raises SandboxClosed after the sandbox was closed, and DispatchError, ExecError or
    CollectError when the substrate fails.
    """

    @property
    def id(self) -> str: ...

    @property
    def workdir(self) -> str:
        """Where commands start and relative paths begin; writable."""
        ...

    @property
    def spans(self) -> tuple[Span, ...]:
        """Where the time of the creation went."""
        ...

    async def exec(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout: float | None = None,
        user: str | None = None,
    ) -> Observation:
        """Run a command to its end. ``env`` adds to the sandbox's environment.

        A timeout kills the command's whole process tree, and the observation keeps what was printed.
        A child left in the background does not hold the call. Without ``stdin`` the command reads
        an empty stream. A program that cannot be started is a result too: 127 when it does not
        exist, 126 when it may not be run, with the reason on stderr.
        """
        ...

    async def read(self, path: str) -> bytes:
        """The whole file. Raises FileNotFoundError, IsADirectoryError, PermissionError.

        A pipe, a socket or a device raises shutil.SpecialFileError, here and in the methods below.
        """
        ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write the whole file, making missing parents. Raises IsADirectoryError, PermissionError."""
        ...

    async def list(self, path: str) -> tuple[Entry, ...]:
        """Entries by name. Raises FileNotFoundError, NotADirectoryError, PermissionError."""
        ...

    async def remove(self, path: str) -> None:
        """Remove a file or a whole tree. Raises FileNotFoundError, PermissionError."""
        ...

    async def upload(self, source: Path, path: str) -> None:
        """Copy a local file or tree to exactly ``path``; modes are kept.

        Links stay links, also when the source itself is one; pipes, sockets and devices in a tree are
        left out. Raises FileNotFoundError for a missing source.
        """
        ...

    async def download(self, path: str, target: Path) -> None:
        """Copy a file or tree of the sandbox to exactly ``target``, as ``upload`` does the other way.

        Nothing is written outside: a link at ``target`` or below is replaced, never followed. Raises
        FileNotFoundError for a missing path.
        """
        ...


@runtime_checkable
class Substrate(Protocol):
    """Where sandboxes run. Given by ``dutyfree.open``; use it inside its context."""

    @property
    def name(self) -> str: ...

    @property
    def host_address(self) -> str | None:
        """Where a sandbox whose network is on reaches services of this host; None if it cannot.

        One of this host's addresses is where such a service has to listen; any other one stands for the
        host's loopback.
        """
        ...

    def sandbox(
        self,
        recipe: Recipe | None = None,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AbstractAsyncContextManager[Sandbox]:
        """A sandbox in the recipe's state, gone when the context is left.

        Raises CreateError on entering, and CleanupError on leaving, unless the body raised: then that.
        """
        ...

    async def prepare(self, recipe: Recipe | None = None) -> None:
        """Do all that can be done for the recipe before a sandbox is wanted. Raises CreateError."""
        ...

    async def facts(self) -> dict[str, str]:
        """Versions, image digests and settings that a reader of the measurements should know."""
        ...


class Availability(msgspec.Struct, frozen=True):
    """Whether a substrate can be used here; if not, why, and how to enable it."""

    available: bool
    detail: str
    remedy: str = ""


class Provider(Protocol):
    """What a registry entry names: a class made from its frozen ``Config``, entered to open it."""

    summary: ClassVar[str]
    Config: ClassVar[type[msgspec.Struct]]

    def __call__(self, config: msgspec.Struct, /) -> AbstractAsyncContextManager[Substrate]: ...

    async def probe(self, config: msgspec.Struct, /) -> Availability:
        """A cheap look at whether it would open; raises nothing. A classmethod."""
        ...


# --- Abilities -------------------------------------------------------------------------------------


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
class Resettable(Protocol):
    async def reset(self) -> None:
        """Back to the state of the hand-out: no process, file or variable of the former use is left."""
        ...


@runtime_checkable
class Snapshottable(Protocol):
    async def snapshot(self) -> Recipe:
        """Keep the present files; the recipe gives sandboxes that start from them."""
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

        A reset keeps it. Raises UsageError for a policy that makes no sense, DispatchError with the
        former one still in force.
        """
        ...


@runtime_checkable
class Ports(Protocol):
    async def connect(self, port: int) -> ByteStream:
        """A connection to a server in the sandbox, whatever its network policy; close it after use.

        Raises ConnectionRefusedError if nobody listens there. ``dutyfree.ports.forward`` makes an
        address on this machine of it.
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
        """To its stdin, if it was started with one. Raises BrokenPipeError, ValueError."""
        ...

    async def close_stdin(self) -> None: ...

    async def signal(self, number: int) -> None:
        """Send a signal to it and its process group; nothing happens if it has ended."""
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
        """The process of this id. Raises KeyError."""
        ...


class Terminal(Protocol):
    """A command in a terminal of its own."""

    @property
    def id(self) -> str: ...

    async def read(self) -> bytes:
        """What it printed since; waits until there is something. Empty when no more comes."""
        ...

    async def write(self, data: bytes) -> None:
        """As if typed. Waits while the command takes nothing. Raises BrokenPipeError after its end."""
        ...

    async def resize(self, rows: int, columns: int) -> None:
        """Raises ValueError for a size that cannot be."""
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

        The file is replaced as a whole, with its mode and owner; links are followed. Raises EditError,
        FileNotFoundError, IsADirectoryError, PermissionError, and OSError (EFBIG) for a huge file.
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

        Raises ValueError for a bad expression, FileNotFoundError, NotADirectoryError, TimeoutError.
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

        The iteration ends when the path itself is deleted. Raises FileNotFoundError on entering.
        """
        ...


@runtime_checkable
class Batching(Protocol):
    async def batch(
        self, actions: Sequence[Action], *, stop_on_failure: bool = True
    ) -> tuple[Result | Exception, ...]:
        """Several actions, one after the other, in one round trip; a result for each that was carried out.

        What an action would raise stands in its place. With ``stop_on_failure`` the first that fails (a
        command whose observation is not ``ok``, or an error) is the last result. Errors of the substrate
        are raised. A cancellation kills what runs, and what follows is not begun.
        """
        ...
