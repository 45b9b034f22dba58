"""Services: the processes that a recipe starts and leaves running (docs/warm-processes.md)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from dutyfree.contract.errors import RecipeError


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The condition for a service to be ready: one of these; with none, as soon as it runs.

    Raises RecipeError.
    """

    line: str | None = None
    """It has printed this text, on stdout or stderr."""
    file: str | None = None
    """This path exists."""
    socket: str | None = None
    """A process listens on this Unix socket."""

    def __post_init__(self) -> None:
        given = [value for value in (self.line, self.file, self.socket) if value is not None]
        if len(given) > 1:
            raise RecipeError("a service is ready by a line, a file or a socket: give one of them")
        if "" in given:
            raise RecipeError("what a service is ready by cannot be empty")

    def __str__(self) -> str:
        if self.line is not None:
            return f"it did not print {self.line!r}"
        if self.file is not None:
            return f"there is no {self.file}"
        return f"no process listens on {self.socket}" if self.socket is not None else "it does not run"


class Service(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A process that starts before the sandbox is handed out, and ends with the sandbox.

    It sees the files of all stages, and gets no secrets. Raises RecipeError.
    """

    name: str
    command: str | tuple[str, ...]
    ready: Ready = Ready()
    seconds: float = 60.0
    """How long it may take to become ready."""
    cwd: str | None = None
    env: Mapping[str, str] = {}
    forks: bool = False
    """Whether it forks for each call, as ``recipes.python`` does (protocol: docs/warm-processes.md)."""

    def __post_init__(self) -> None:
        if not self.name or not self.command:
            raise RecipeError("a service needs a name and a command")
        if not isinstance(self.command, str):
            if not all(isinstance(word, str) for word in self.command):
                raise RecipeError(f"the command of the service {self.name!r} must consist of strings")
            msgspec.structs.force_setattr(self, "command", tuple(self.command))
        if not self.seconds > 0:
            raise RecipeError(f"the service {self.name!r} needs time to become ready, not {self.seconds:g} s")

    def __hash__(self) -> int:
        return hash(self.identity())

    def identity(self) -> str:
        """All fields as text, independent of the order of ``env``."""
        fields = msgspec.structs.asdict(self)
        return repr(sorted({**fields, "env": sorted(self.env.items())}.items()))


class ServiceState(msgspec.Struct, frozen=True):
    """The state of a service in a sandbox."""

    name: str
    running: bool
    starts: int
    """How often it was started since the creation or the last reset of the sandbox."""
    exit_code: int | None = None
    """The exit code of its last run, if it does not run now; 128 + n if signal n killed it."""
    output: bytes = b""
    """The end of its output."""
