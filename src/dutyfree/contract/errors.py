"""What can go wrong, split by who must act on it.

::

    DutyfreeError                 every error of ours; carries a remedy where there is one
    ├── ActionError               an action failed because of the agent's request, or of what it did before
    │   ├── FileError             ... as the operating system has it: an OSError with errno and filename
    │   │   ├── PathNotFound      ... and a FileNotFoundError
    │   │   ├── PathIsDirectory   ... and an IsADirectoryError
    │   │   ├── PathNotDirectory  ... and a NotADirectoryError
    │   │   ├── PathForbidden     ... and a PermissionError
    │   │   ├── PathExists        ... and a FileExistsError
    │   │   ├── SpecialFile       ... and a shutil.SpecialFileError
    │   │   ├── InputClosed       ... and a BrokenPipeError
    │   │   └── PortClosed        ... and a ConnectionRefusedError
    │   ├── RequestError          a path, a text or a pattern that no action can have; a ValueError
    │   │   └── EditError         the text to replace does not occur in the file exactly once
    │   ├── ActionTimeout         a search took longer than its timeout; a TimeoutError
    │   └── SandboxGone           the sandbox ended through what ran in it
    ├── UsageError                the program asked for something that makes no sense
    │   ├── PlanError             a plan that cannot be run
    │   ├── RecordsError          records that cannot be read, written or mixed
    │   ├── OptionError           an unknown substrate, or an option it does not take
    │   ├── RecipeError           a recipe with what no recipe can have, such as a variable without a name
    │   ├── UnknownProcess        no background process of that id; a KeyError
    │   ├── ArgumentError         an argument of a wrong type; a TypeError and a ValueError
    │   └── LimitError            a number that cannot be, such as no memory at all, or a file mode of -1
    ├── Unavailable               the substrate cannot be used on this machine now
    └── SubstrateError            the machinery failed, in one phase of a rollout
        ├── PoolError             the pool has no sandbox to give
        │   ├── Exhausted         ... since all are in use; with numbers
        │   ├── Quarantined       ... since a stage of the recipe keeps failing
        │   └── LeaseEnded        ... since this lease was given and given back before
        ├── CreateError           no sandbox came into being
        │   └── StageError        ... since a stage of the recipe failed
        ├── ReadyError            it came into being, but never ran its first command
        ├── DispatchError         an action could not be handed over
        │   └── SandboxClosed     ... because the sandbox is closed or gone
        ├── ExecError             the machinery broke while the action ran
        ├── CollectError          the action ended, its result could not be had
        └── CleanupError          the sandbox could not be removed

``verdict`` says from the type of an error alone whether the agent, the machinery or the program is to blame.
A command that fails is no error: its exit code, signal and output are data in the Observation.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from typing import ClassVar, Literal, TypeAlias

from dutyfree.printable import printable

Phase = Literal["pool", "create", "ready", "dispatch", "exec", "collect", "cleanup"]

Verdict: TypeAlias = Literal["task", "infrastructure", "program"]

ActionKind: TypeAlias = Literal[
    "not_found",
    "is_directory",
    "not_directory",
    "permission",
    "exists",
    "special_file",
    "name_too_long",
    "link_loop",
    "too_large",
    "bad_path",
    "bad_request",
    "edit",
    "pattern",
    "no_space",
    "no_memory",
    "no_processes",
    "no_descriptors",
    "killed",
    "ended",
    "refused",
    "timeout",
    "gone",
]
"""Why an action failed through the agent's doing: docs/contract.md has a row for each."""


class DutyfreeError(Exception):
    """An error with one clear sentence, and what to do about it; it can be printed, whoever it cites."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        message, remedy = printable(message), printable(remedy)
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message

    def __reduce__(self) -> tuple[object, ...]:
        """Errors travel between processes as they are, whatever their constructors take."""
        # OSError keeps the file's name beside its arguments.
        arguments = (*self.args, self.filename) if isinstance(self, FileError) else self.args
        return _restored, (type(self), arguments), self.__dict__


def _restored(kind: type[DutyfreeError], arguments: tuple[object, ...]) -> DutyfreeError:
    error = kind.__new__(kind)
    (OSError if isinstance(error, OSError) else BaseException).__init__(error, *arguments)
    return error


def verdict(error: BaseException) -> Verdict:
    """Who is to blame for an error, by its type alone.

    "task": the agent is, and it counts against the attempt. "infrastructure": the machinery is, the attempt
    has no outcome and may be repeated elsewhere. "program": all other errors; let them raise.
    """
    if isinstance(error, ActionError):
        return "task"
    return "infrastructure" if isinstance(error, SubstrateError | Unavailable) else "program"


# --- The agent's doing ------------------------------------------------------------------------------


class ActionError(DutyfreeError):
    """The agent's request, or the state it made in the sandbox, is why the action failed.

    It counts against the attempt: repeating the attempt elsewhere would give the agent a second try.
    """

    kind: ActionKind = "refused"

    def __init__(self, message: str, *, kind: ActionKind | None = None, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        if kind is not None:
            self.kind = kind


class FileError(ActionError, OSError):
    """The operating system refused: ``errno``, ``strerror`` and ``filename`` say what and why."""

    def __init__(self, number: int, path: str, reason: str = "") -> None:
        reason = reason or os.strerror(number)
        super().__init__(f"{path}: {reason}" if path else reason, kind=_KINDS.get(number))
        OSError.__init__(self, number, reason, path)


class PathNotFound(FileError, FileNotFoundError):  # noqa: N818 (names the state, as its siblings do)
    kind = "not_found"


class PathIsDirectory(FileError, IsADirectoryError):  # noqa: N818
    kind = "is_directory"


class PathNotDirectory(FileError, NotADirectoryError):  # noqa: N818
    kind = "not_directory"


class PathForbidden(FileError, PermissionError):  # noqa: N818
    kind = "permission"


class PathExists(FileError, FileExistsError):  # noqa: N818
    kind = "exists"


class SpecialFile(FileError, shutil.SpecialFileError):  # noqa: N818
    """A pipe, a socket or a device, which is neither a file nor a directory."""

    kind = "special_file"

    def __init__(self, path: str) -> None:
        super().__init__(errno.EINVAL, path, "Neither a file nor a directory")


class InputClosed(FileError, BrokenPipeError):  # noqa: N818
    """The process that was written to reads no more, or has ended."""

    kind = "ended"

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EPIPE, "", reason)


class PortClosed(FileError, ConnectionRefusedError):  # noqa: N818
    """No process in the sandbox listens on the port."""

    kind = "not_found"

    def __init__(self, port: int) -> None:
        reason = f"{os.strerror(errno.ECONNREFUSED)}: no process listens on port {port}"
        super().__init__(errno.ECONNREFUSED, "", reason)


class RequestError(ActionError, ValueError):
    kind: ActionKind = "bad_request"


class EditError(RequestError):
    """The text occurs in the file ``count`` times; ``lines`` are the first of them. Nothing was changed."""

    kind = "edit"

    def __init__(self, path: str, count: int, lines: tuple[int, ...]) -> None:
        where = (
            f"occurs {count} times, on the lines {', '.join(map(str, lines))}" if count else "does not occur"
        )
        more = "…" if count > len(lines) > 0 else ""
        super().__init__(f"{path}: the text to replace {where}{more}")
        self.path = path
        self.count = count
        self.lines = lines


class ActionTimeout(ActionError, TimeoutError):  # noqa: N818
    kind = "timeout"

    def __init__(self, message: str) -> None:
        super().__init__(message)


class SandboxGone(ActionError):  # noqa: N818 (names the state)
    """The sandbox ended through what ran in it; every later action raises this again."""

    kind = "gone"


_KINDS: dict[int, ActionKind] = {
    errno.ENOENT: "not_found",
    errno.EISDIR: "is_directory",
    errno.ENOTDIR: "not_directory",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.EROFS: "permission",
    errno.EEXIST: "exists",
    errno.ENOTEMPTY: "exists",
    errno.ENAMETOOLONG: "name_too_long",
    errno.ELOOP: "link_loop",
    errno.EFBIG: "too_large",
    errno.EOVERFLOW: "too_large",
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.ENOMEM: "no_memory",
    errno.EAGAIN: "no_processes",
    errno.EMFILE: "no_descriptors",
    errno.ETOOMANYREFS: "no_descriptors",
    errno.EOWNERDEAD: "killed",
}

_CLASSES: dict[ActionKind, type[FileError]] = {
    "not_found": PathNotFound,
    "is_directory": PathIsDirectory,
    "not_directory": PathNotDirectory,
    "permission": PathForbidden,
    "exists": PathExists,
}

_REASONS = {
    errno.EAGAIN: f"{os.strerror(errno.EAGAIN)}: the sandbox has no processes left",
    errno.EOWNERDEAD: "the operation was killed, by a process in the sandbox or for its memory",
}

MACHINERY = frozenset(
    {
        errno.EIO,
        errno.EPROTO,
        errno.EUCLEAN,
        errno.EBADMSG,
        errno.ESTALE,
        errno.EREMOTEIO,
        errno.ENFILE,
        errno.EFAULT,
        errno.ENOSYS,
        errno.ECANCELED,
    }
)
"""Errors of the operating system that no process in a sandbox can bring about."""


def file_error(number: int, path: str) -> DutyfreeError:
    """What an action on a path of a sandbox raises for an errno: FileError, or ExecError for MACHINERY's."""
    if number in MACHINERY:
        return ExecError(f"{path}: {os.strerror(number)}")
    kind = _KINDS.get(number, "refused")
    return _CLASSES.get(kind, FileError)(number, path, _REASONS.get(number, ""))


# --- The program's ----------------------------------------------------------------------------------


class UsageError(DutyfreeError):
    pass


class PlanError(UsageError):
    pass


class RecordsError(UsageError):
    pass


class OptionError(UsageError):
    pass


class LimitError(UsageError, ValueError):
    pass


class RecipeError(UsageError, ValueError):
    pass


class ArgumentError(UsageError, TypeError, ValueError):
    pass


class UnknownProcess(UsageError, KeyError):  # noqa: N818 (names the state)
    def __init__(self, name: str) -> None:
        super().__init__(
            f"this sandbox has no process {name!r}",
            remedy="give an id that start() returned; of processes that ended, the oldest are forgotten",
        )


# --- The machinery's --------------------------------------------------------------------------------


class Unavailable(DutyfreeError):  # noqa: N818 (an answer to "can I use it?", read as such)
    pass


class SubstrateError(DutyfreeError):
    """The substrate failed, never the command that it ran."""

    phase: ClassVar[Phase]


class PoolError(SubstrateError):
    phase = "pool"


class Exhausted(PoolError):  # noqa: N818 (names the state)
    """No sandbox within the request's deadline. ``numbers`` has the pool's counts and the estimated wait."""

    def __init__(self, message: str, *, remedy: str = "", numbers: Mapping[str, object]) -> None:
        super().__init__(message, remedy=remedy)
        self.numbers = numbers


class Quarantined(PoolError):  # noqa: N818 (names the state)
    """A stage failed too often in a row; it is tried again in ``retry_in`` seconds."""

    def __init__(
        self, message: str, *, remedy: str = "", stage: str, command: str, output: str, retry_in: float
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.stage = stage
        self.command = command
        self.output = output
        self.retry_in = retry_in


class LeaseEnded(PoolError):  # noqa: N818 (names the state)
    pass


class CreateError(SubstrateError):
    phase = "create"


class StageError(CreateError):
    """``number`` is the stage's place in the recipe, from 1; 0 is the image."""

    def __init__(
        self, message: str, *, remedy: str = "", number: int, command: str = "", output: str = ""
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.number = number
        self.command = command
        self.output = output


class ReadyError(SubstrateError):
    phase = "ready"


class DispatchError(SubstrateError):
    phase = "dispatch"


class SandboxClosed(DispatchError):  # noqa: N818 (names the state, as anyio's ClosedResourceError would)
    pass


class ExecError(SubstrateError):
    phase = "exec"


class CollectError(SubstrateError):
    phase = "collect"


class CleanupError(SubstrateError):
    phase = "cleanup"
