"""Errors, split by who caused them.

::

    DutyfreeError                  every error of dutyfree; ``remedy`` says what to do, if we know it
    │
    ├── ActionError                verdict "task": the agent's request, or what it did before, is the cause
    │   ├── FileError              an OSError with errno and filename
    │   │   ├── PathNotFound       also a FileNotFoundError
    │   │   ├── PathIsDirectory    also an IsADirectoryError
    │   │   ├── PathNotDirectory   also a NotADirectoryError
    │   │   ├── PathForbidden      also a PermissionError
    │   │   ├── PathExists         also a FileExistsError
    │   │   ├── SpecialFile        also a shutil.SpecialFileError: a pipe, a socket or a device
    │   │   ├── InputClosed        also a BrokenPipeError: the process does not read its stdin any more
    │   │   └── PortClosed         also a ConnectionRefusedError: no process listens on the port
    │   ├── RequestError           a ValueError: a path, text or pattern that is not valid for any action
    │   │   ├── EditError          the text to replace does not occur exactly once in the file
    │   │   └── Unrunnable         (contract.arguments) no process can have this command
    │   ├── ActionTimeout          a TimeoutError: a search took longer than its timeout
    │   └── SandboxGone            a process in the sandbox ended the sandbox
    │
    ├── UsageError                 verdict "program": the calling program made a mistake
    │   ├── PlanError              the plan of a study is not valid
    │   ├── RecordsError           records cannot be read, written or mixed
    │   ├── OptionError            an unknown substrate, or an option that it does not have
    │   ├── RecipeError            a ValueError: a recipe that is not valid
    │   ├── LimitError             a ValueError: a number out of range, such as memory=0 or mode=-1
    │   ├── ArgumentError          a TypeError and a ValueError: an argument of a wrong type
    │   └── UnknownProcess         a KeyError: no background process has this id
    │
    ├── Unavailable                verdict "infrastructure": the substrate does not work on this machine now
    │
    └── SubstrateError             verdict "infrastructure": the machinery failed; ``phase`` says where
        ├── PoolError              pool: the pool cannot give a sandbox
        │   ├── Exhausted          all are in use until the deadline; ``numbers`` has the counts
        │   ├── Quarantined        a stage of the recipe failed several times in a row
        │   └── LeaseEnded         the lease of this idempotency key was already given back
        ├── CreateError            create: the sandbox could not be created
        │   └── StageError         a stage of the recipe failed
        ├── ReadyError             ready: the sandbox was created, but its first command never ran
        ├── DispatchError          dispatch: the action could not be delivered, so it did not run
        │   ├── Overloaded         the machine has more actions to run than it can: try again later
        │   ├── Restarting         the server is being replaced: ask the next one
        │   └── SandboxClosed      the sandbox or its substrate is closed
        ├── ExecError              exec: the machinery failed while the action ran
        ├── CollectError           collect: the action ended, and its result was lost
        └── CleanupError           cleanup: the sandbox could not be removed

``verdict`` tells from the type of an error who caused it. A command that fails is not an error: its exit
code, signal and output are data in the Observation.
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
"""Why an action of the agent failed. docs/contract.md has a row for each kind."""


class DutyfreeError(Exception):
    """An error with a message and a remedy. Both are safe to print, also if they quote foreign text."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        message, remedy = printable(message), printable(remedy)
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle errors as they are, whatever arguments their constructors take."""
        # OSError keeps the file name beside its arguments.
        arguments = (*self.args, self.filename) if isinstance(self, FileError) else self.args
        return _restored, (type(self), arguments), self.__dict__


def _restored(kind: type[DutyfreeError], arguments: tuple[object, ...]) -> DutyfreeError:
    error = kind.__new__(kind)
    (OSError if isinstance(error, OSError) else BaseException).__init__(error, *arguments)
    return error


def verdict(error: BaseException) -> Verdict:
    """Tell from the type of an error who caused it.

    "task": the agent; the error is the outcome of the attempt. "infrastructure": the machinery; the attempt
    has no outcome, so repeat it in another sandbox. "program": every other error; let it raise.
    """
    if isinstance(error, ActionError):
        return "task"
    return "infrastructure" if isinstance(error, SubstrateError | Unavailable) else "program"


# --- Verdict: task ----------------------------------------------------------------------------------


class ActionError(DutyfreeError):
    """An action failed because of the agent's request, or of the state that it made in the sandbox.

    It is an outcome of the attempt. To repeat the attempt would give the agent a second try.
    """

    kind: ActionKind = "refused"

    def __init__(self, message: str, *, kind: ActionKind | None = None, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        if kind is not None:
            self.kind = kind


class FileError(ActionError, OSError):
    """The operating system refused the action. It has ``errno``, ``strerror`` and ``filename``."""

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
    """The path is a pipe, a socket or a device."""

    kind = "special_file"

    def __init__(self, path: str) -> None:
        super().__init__(errno.EINVAL, path, "Neither a file nor a directory")


class InputClosed(FileError, BrokenPipeError):  # noqa: N818
    """The process does not read its input any more, or has ended."""

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
    """A path, a text or a pattern is not valid for any action."""

    kind: ActionKind = "bad_request"


class EditError(RequestError):
    """The text to replace occurs ``count`` times, not once, first on ``lines``. Nothing was changed."""

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
    """A search took longer than its timeout."""

    kind = "timeout"

    def __init__(self, message: str) -> None:
        super().__init__(message)


class SandboxGone(ActionError):  # noqa: N818 (names the state)
    """A process in the sandbox ended the sandbox. Every later action raises this error again."""

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
"""Error numbers that no process in a sandbox can cause."""


def file_error(number: int, path: str) -> DutyfreeError:
    """The error of an action on a path for an errno: a FileError, or ExecError for those of MACHINERY."""
    if number in MACHINERY:
        return ExecError(f"{path}: {os.strerror(number)}")
    kind = _KINDS.get(number, "refused")
    return _CLASSES.get(kind, FileError)(number, path, _REASONS.get(number, ""))


# --- Verdict: program -------------------------------------------------------------------------------


class UsageError(DutyfreeError):
    """The calling program made a mistake."""


class PlanError(UsageError):
    """The plan of a study is not valid."""


class RecordsError(UsageError):
    """Records cannot be read, written or mixed."""


class OptionError(UsageError):
    """The substrate is unknown, or does not have the option."""


class LimitError(UsageError, ValueError):
    """A number is out of range."""


class RecipeError(UsageError, ValueError):
    """A recipe is not valid."""


class ArgumentError(UsageError, TypeError, ValueError):
    """An argument has a wrong type."""


class UnknownProcess(UsageError, KeyError):  # noqa: N818 (names the state)
    """No background process of the sandbox has this id."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"this sandbox has no process {name!r}",
            remedy="give an id that start() returned; of processes that ended, the oldest are forgotten",
        )


# --- Verdict: infrastructure ------------------------------------------------------------------------


class Unavailable(DutyfreeError):  # noqa: N818 (names the state)
    """The substrate does not work on this machine now."""


class SubstrateError(DutyfreeError):
    """The machinery failed, not the command. ``phase`` says in which part of the rollout."""

    phase: ClassVar[Phase]


class PoolError(SubstrateError):
    """The pool cannot give a sandbox."""

    phase = "pool"


class Exhausted(PoolError):  # noqa: N818 (names the state)
    """No sandbox was free before the deadline. ``numbers`` has the pool's counts and the estimated wait."""

    def __init__(self, message: str, *, remedy: str = "", numbers: Mapping[str, object]) -> None:
        super().__init__(message, remedy=remedy)
        self.numbers = numbers


class Quarantined(PoolError):  # noqa: N818 (names the state)
    """A stage failed several times in a row. The pool tries it again in ``retry_in`` seconds."""

    def __init__(
        self, message: str, *, remedy: str = "", stage: str, command: str, output: str, retry_in: float
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.stage = stage
        self.command = command
        self.output = output
        self.retry_in = retry_in


class LeaseEnded(PoolError):  # noqa: N818 (names the state)
    """The lease of this idempotency key was already given back."""


class CreateError(SubstrateError):
    """The sandbox could not be created."""

    phase = "create"


class StageError(CreateError):
    """A stage of the recipe failed. ``number`` is its place in the recipe, from 1; 0 is the image."""

    def __init__(
        self, message: str, *, remedy: str = "", number: int, command: str = "", output: str = ""
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.number = number
        self.command = command
        self.output = output


class ReadyError(SubstrateError):
    """The sandbox was created, but its first command never ran."""

    phase = "ready"


class DispatchError(SubstrateError):
    """The action could not be delivered, so it did not run."""

    phase = "dispatch"


class Overloaded(DispatchError):  # noqa: N818 (names the state)
    """The machine has more actions to run than it can. This one did not begin; try again later."""

    def __init__(self, message: str, *, remedy: str = "", retry_after: float = 1.0) -> None:
        super().__init__(message, remedy=remedy)
        self.retry_after = retry_after
        """Seconds to wait before the next try."""


class Restarting(DispatchError):  # noqa: N818 (names the state)
    """The server is being replaced by another one, which goes on with the sandboxes. Ask that one."""


class SandboxClosed(DispatchError):  # noqa: N818 (names the state)
    """The sandbox or its substrate is closed."""


class ExecError(SubstrateError):
    """The machinery failed while the action ran."""

    phase = "exec"


class CollectError(SubstrateError):
    """The action ended, and its result was lost."""

    phase = "collect"


class CleanupError(SubstrateError):
    """The sandbox could not be removed."""

    phase = "cleanup"
