"""Warm processes: what a recipe leaves running beside the actions (docs/warm-processes.md)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from dutyfree.contract.errors import RecipeError


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """When a service is ready: by one of these; by none of them, as soon as it runs. Raises RecipeError."""

    line: str | None = None
    """It prints this text, on either stream."""
    file: str | None = None
    """This path exists."""
    socket: str | None = None
    """Somebody listens to this Unix socket."""

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
        return f"nobody listens to {self.socket}" if self.socket is not None else "it does not run"


class Service(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A process that is started when a sandbox stands, before it is handed out, and lives as long as it does.

    It sees the files of all stages, and gets no secrets. Raises RecipeError.
    """

    name: str
    command: str | tuple[str, ...]
    ready: Ready = Ready()
    seconds: float = 60.0
    """So long it may take until it is ready."""
    cwd: str | None = None
    env: Mapping[str, str] = {}
    forks: bool = False
    """It forks for calls, by the protocol of docs/warm-processes.md; ``recipes.python`` gives such a one."""

    def __post_init__(self) -> None:
        if not self.name or not self.command:
            raise RecipeError("a service needs a name and a command")
        if not isinstance(self.command, str):
            if not all(isinstance(word, str) for word in self.command):
                raise RecipeError(f"the command of the service {self.name!r} must be strings alone")
            msgspec.structs.force_setattr(self, "command", tuple(self.command))
        if not self.seconds > 0:
            raise RecipeError(f"the service {self.name!r} needs time to become ready, not {self.seconds:g} s")

    def __hash__(self) -> int:
        return hash(self.identity())

    def identity(self) -> str:
        """All that makes it what it is, as text."""
        fields = msgspec.structs.asdict(self)
        return repr(sorted({**fields, "env": sorted(self.env.items())}.items()))


class ServiceState(msgspec.Struct, frozen=True):
    """How a service of a sandbox fares."""

    name: str
    running: bool
    starts: int
    """How often it was started since the sandbox was made or reset: once, if it never ended."""
    exit_code: int | None = None
    """Of its last end, if it does not run; 128 + n if signal n killed it."""
    output: bytes = b""
    """The end of what it printed lately."""
