"""The sandbox: one environment in which an agent acts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from dutyfree.contract.action import Command, Entry
from dutyfree.contract.observation import Observation, Span


@runtime_checkable
class Sandbox(Protocol):
    """One environment. Many tasks of one event loop may use it at once.

    Every method raises SandboxClosed after the sandbox was closed; DispatchError, ExecError or CollectError
    if the substrate fails; SandboxGone if a process in the sandbox ended it.
    """

    @property
    def id(self) -> str: ...

    @property
    def workdir(self) -> str:
        """The directory in which commands start and relative paths begin. It is writable."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """The parts of the time that the creation took."""

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
        """Run a command to its end. ``env`` adds to the variables of the image and the recipe.

        A timeout kills the command's whole process tree; the observation keeps what it printed. A timeout ≤ 0
        kills the command as soon as it runs. A child in the background does not delay the result. Without
        ``stdin`` the command reads an empty stream. A command that cannot start is a result too, with the
        reason on stderr: exit code 127 if its program or ``cwd`` does not exist, otherwise 126 (it is not
        executable, has a NUL byte or is too long, the user does not exist, no process or memory is left).
        Raises ArgumentError for wrong types.
        """

    async def read(self, path: str) -> bytes:
        """Read the whole file.

        This and the following methods raise ActionError if something is wrong with the path in the sandbox.
        Most are also Python's FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError, or
        OSError with an errno; shutil.SpecialFileError for a pipe, a socket or a device.
        """

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write the whole file, and make missing parent directories.

        Raises ActionError, LimitError for a mode out of range, ArgumentError for data that is not bytes.
        """

    async def list(self, path: str) -> tuple[Entry, ...]:
        """The entries of a directory, sorted by name. Raises ActionError."""

    async def remove(self, path: str) -> None:
        """Remove a file or a directory tree. Raises ActionError."""

    async def upload(self, source: Path, path: str) -> None:
        """Copy a local file or tree to exactly ``path``, with its modes.

        Links stay links, also if the source itself is a link. Pipes, sockets and devices in a tree are left
        out. Raises ActionError for ``path``, and Python's own FileNotFoundError for a missing source.
        """

    async def download(self, path: str, target: Path, *, outside_links: bool = False) -> tuple[str, ...]:
        """Copy a file or tree of the sandbox to exactly ``target``, in the way of ``upload``.

        Nothing is written outside of ``target``: a link at ``target`` or below is replaced, never followed.
        Links that point out of the tree would point to files of this host. They are left out, and their names
        are returned (the first 10,000), unless ``outside_links`` is true. Files are never set-id. Raises
        ActionError for ``path``, also if it is such a link, and for its contents; Python's own OSError for
        ``target``.
        """
