"""The sandbox: one environment that an agent acts in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from dutyfree.contract.action import Command, Entry
from dutyfree.contract.observation import Observation, Span


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
