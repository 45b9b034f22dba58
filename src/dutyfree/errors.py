"""What can go wrong, split by who must act on it.

::

    DutyfreeError                 every error of ours; carries a remedy where there is one
    ├── UsageError                the caller asked for something that makes no sense
    │   ├── PlanError             a plan that cannot be run
    │   ├── RecordsError          records that cannot be read, written or mixed
    │   ├── OptionError           an unknown substrate, or an option it does not take
    │   ├── RecipeError           a recipe with what no recipe can have, such as a variable without a name
    │   ├── LimitError            a number that cannot be, such as no memory at all, or a file mode of -1
    │   └── EditError             the text to replace does not stand in the file exactly once
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

A command that fails is no error: its exit code, signal and output are data in the Observation.
A path that is missing, a directory, or forbidden raises Python's own FileNotFoundError,
IsADirectoryError, NotADirectoryError or PermissionError, as it would on the local disk.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

Phase = Literal["pool", "create", "ready", "dispatch", "exec", "collect", "cleanup"]


def plain(text: str) -> str:
    """The text with nothing in it that a terminal would take for an order: such characters are spelt out.

    Sandboxes, servers and peers say what they like.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in text
    )


class DutyfreeError(Exception):
    """An error with one clear sentence, and what to do about it; it can be printed, whoever it cites."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        message, remedy = plain(message), plain(remedy)
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


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


class EditError(UsageError, ValueError):
    """The text stands in the file ``count`` times; ``lines`` are the first of them. Nothing was changed."""

    def __init__(self, path: str, count: int, lines: tuple[int, ...]) -> None:
        where = f" {count} times, on the lines {', '.join(map(str, lines))}" if count else " nowhere"
        more = "…" if count > len(lines) > 0 else ""
        super().__init__(f"{path}: the text to replace stands there{where}{more}")
        self.path = path
        self.count = count
        self.lines = lines


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
