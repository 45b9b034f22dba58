"""The nouns of the system.

A *substrate* gives *sandboxes*. An agent's *action* in a sandbox yields an *observation*, with the
timing *spans* inside it. A *recipe* says in what state the sandbox must be when it is handed out.

Paths are those of the sandbox: relative ones start at its working directory. Everything a program may
not be able to do everywhere is an *ability*: see ``dutyfree.abilities``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from dutyfree.errors import LimitError
from dutyfree.recipe import Recipe as Recipe
from dutyfree.recipe import Stage as Stage

Command: TypeAlias = str | Sequence[str]
"""A string runs in ``/bin/sh -c``; a sequence is an argument vector and runs without a shell."""

NetworkPolicy: TypeAlias = Literal["off", "on"] | tuple[str, ...]
"""What a sandbox may reach: nothing; whatever this machine reaches; or what a list names.

An entry is a host (``example.org``), all names below a domain (``*.example.org``), an address or a range
of them (``10.0.0.0/8``), or ``host``: this machine, by the substrate's ``host_address``. Each may end in a
port (``example.org:443``).
"""

Bytes: TypeAlias = Annotated[int, msgspec.Meta(description="a number of bytes or a size such as '512M'")]

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
    oom: bool = False
    """The memory limit killed a process in the sandbox, of this command or of another one, while this command
    ran or since the command before it ended."""
    cut: Cut = Cut()
    seconds: float = 0.0
    spans: tuple[Span, ...] = ()
    usage: Usage | None = None

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    @property
    def started(self) -> bool:
        """Whether a process ran at all; if not, ``stderr`` has the reason, and no process has written it."""
        return len(self.spans) != 1 or self.spans[0].name != "spawn"

    @property
    def command_seconds(self) -> float | None:
        """The command's own time inside the environment, if the substrate tells."""
        return next((span.seconds for span in self.spans if span.name == "run"), None)


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a sandbox may use. None leaves a resource to the substrate's default.

    Sizes may be given as texts: ``Limits(memory="512M")``. A substrate that cannot enforce a limit it is
    asked for refuses with CreateError. Raises LimitError for one that is none: zero or less, or more than
    any machine has.
    """

    cpus: float | None = None
    memory: Bytes | None = None
    pids: int | None = None
    disk: Bytes | None = None
    """That may be written."""
    network: NetworkPolicy | None = None
    """Off by default wherever the substrate isolates at all."""
    output: Bytes = 16 << 20
    """Kept of each stream: the head and the tail; the middle is counted and dropped."""

    if TYPE_CHECKING:
        # Sizes may be texts, such as "512M"; the attributes are numbers all the same.
        def __init__(
            self,
            cpus: float | None = None,
            memory: int | str | None = None,
            pids: int | None = None,
            disk: int | str | None = None,
            network: NetworkPolicy | None = None,
            output: int | str = 16 << 20,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is None:
                continue
            if type(value) is not int:
                value = _number(name, value)
                msgspec.structs.force_setattr(self, name, value)
            least, bound = (-1, "≥ 0") if name == "output" else (0, "> 0")
            if not least < value <= most:
                raise LimitError(f"{name} must be {bound} and ≤ {most}, not {value}")
        if self.network not in (None, "off", "on"):
            msgspec.structs.force_setattr(self, "network", _allow_list(self.network))


_MOST = {"cpus": 1 << 17, "memory": 1 << 62, "pids": 4_000_000, "disk": 1 << 60, "output": (1 << 32) - 1}
"""What the kernel can count."""

SIZES = ("memory", "disk", "output")
"""Limits in bytes."""


def _number(name: str, value: object) -> float:
    """A limit that is no int. Raises LimitError."""
    if name in SIZES and isinstance(value, str):
        return size(value, name)
    if name == "cpus" and isinstance(value, float):
        return value
    wanted = "a number" if name == "cpus" else "a whole number"
    remedy = f'write {name}="512M", or the bytes' if name in SIZES else ""
    raise LimitError(f"{name} must be {wanted}, not {value!r}", remedy=remedy)


def _allow_list(network: object) -> tuple[str, ...]:
    """A network policy that is neither "on" nor "off". Raises LimitError."""
    if isinstance(network, tuple | list) and all(isinstance(entry, str) for entry in network):
        return tuple(network)
    raise LimitError(
        f'network must be "on", "off" or a list of strings, not {network!r}',
        remedy='to allow one host, write network=("example.org:443",)',
    )


def size(text: str, of: str) -> int:
    """Bytes as people write them: ``512M``, ``1.5G``, ``4096``. Raises LimitError."""
    import re

    units = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    found = re.fullmatch(
        r"(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE | re.ASCII
    )
    if found is None:
        raise LimitError(f"{of}: {text!r} is not a size", remedy="write it as 512M or 1.5G")
    return int(float(found[1]) * units[found[2].upper()])


def limited(given: Limits | Mapping[str, object] | None, usual: Limits) -> Limits:
    """The limits that a caller gives, also as a table such as ``{"memory": "512M"}``; else the usual ones.

    Raises LimitError.
    """
    if given is None:
        return usual
    if isinstance(given, Limits):
        return given
    if not isinstance(given, Mapping):
        raise LimitError(f"limits must be Limits, not {given!r}", remedy='write Limits(memory="512M")')
    table = sized(given)
    try:
        return msgspec.convert(table, Limits)
    except msgspec.ValidationError as error:
        from dutyfree import validation  # only for an error

        mistake = validation.explain(error, table, Limits)
        raise LimitError(f"limits: {mistake.message}", remedy=mistake.remedy) from error


def sized(table: Mapping[str, object]) -> dict[str, object]:
    """A table of limits, or of a budget, with numbers for the sizes; what is no size stays as it is."""
    found = dict(table)
    for name in SIZES:
        value = table.get(name)
        if isinstance(value, str):
            with suppress(LimitError):
                found[name] = size(value, name)
    return found


class Entry(msgspec.Struct, frozen=True):
    """One name in a directory."""

    name: str
    kind: Literal["file", "directory", "link", "other"]
    size: int
    mode: int


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

    Every method raises SandboxClosed after the sandbox was closed; DispatchError, ExecError or CollectError
    when the substrate fails; SandboxGone when the sandbox ended through what ran in it.
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
        """Run a command to its end. ``env`` adds to what the image and the recipe give.

        A timeout kills the command's whole process tree, and the observation keeps what was printed.
        One of nothing or less does so as soon as it runs, if it has not ended by then.
        A child left in the background does not hold the call. Without ``stdin`` the command reads
        an empty stream. A command that cannot be started is a result too, with the reason on stderr: 127
        when its program or ``cwd`` does not exist, 126 otherwise (it may not be run, has a NUL byte, is too
        long, the user does not exist, no process or memory is left). Raises ArgumentError for wrong types.
        """
        ...

    async def read(self, path: str) -> bytes:
        """The whole file.

        This and the methods below raise ActionError for what is wrong with the path in the sandbox. Most are
        also Python's FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError, or OSError
        with an errno; shutil.SpecialFileError for a pipe, a socket or a device.
        """
        ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write the whole file, making missing parents.

        Raises ActionError, LimitError for a mode that is none, ArgumentError for data that is not bytes.
        """
        ...

    async def list(self, path: str) -> tuple[Entry, ...]:
        """Entries by name. Raises ActionError."""
        ...

    async def remove(self, path: str) -> None:
        """Remove a file or a whole tree. Raises ActionError."""
        ...

    async def upload(self, source: Path, path: str) -> None:
        """Copy a local file or tree to exactly ``path``; modes are kept.

        Links stay links, also when the source itself is one; pipes, sockets and devices in a tree are
        left out. Raises ActionError for ``path``, and Python's plain FileNotFoundError for a missing source.
        """
        ...

    async def download(self, path: str, target: Path, *, outside_links: bool = False) -> tuple[str, ...]:
        """Copy a file or tree of the sandbox to exactly ``target``, as ``upload`` does the other way.

        Nothing is written outside: a link at ``target`` or below is replaced, never followed. Links that
        lead out of the tree would lead to files of this host: they are left out, and their names returned
        (the first 10,000), unless ``outside_links`` asks for them. Files are never set-id. Raises ActionError
        for ``path``, also if it is such a link itself, and for what it holds, and Python's plain OSError for
        ``target`` itself.
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

        Raises CreateError on entering (PoolError where a pool has none to give), and CleanupError on leaving,
        unless the body raised: then that.
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
