"""The result of a command: its output, how it ended, and what its time was spent on."""

from __future__ import annotations

import msgspec

KILLED = 128
"""The exit code of a command that signal n killed is KILLED + n, as in shells."""


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A named piece of time inside an action; ``start`` is in seconds since the request.

    Names: queue, dispatch, spawn, run, collect, return. ``run`` is the command's own time in the sandbox; a
    substrate that cannot measure it leaves it out.
    """

    name: str
    start: float
    seconds: float


class Usage(msgspec.Struct, frozen=True):
    """The resources that a command used, if the substrate knows them."""

    cpu_seconds: float
    peak_memory: int | None = None


class Cut(msgspec.Struct, frozen=True):
    """How many bytes were dropped from the middle of each stream."""

    stdout: int = 0
    stderr: int = 0


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a command. ``exit_code`` is 128 + n if signal n killed it.

    Docker knows only the exit code, and derives ``signal`` from it.
    """

    exit_code: int
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False
    oom: bool = False
    """Whether the memory limit killed a process of the sandbox while this command ran, or since the end of
    the command before it. The process may belong to another command."""
    cut: Cut = Cut()
    seconds: float = 0.0
    spans: tuple[Span, ...] = ()
    usage: Usage | None = None

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    @property
    def started(self) -> bool:
        """Whether a process ran. If not, ``stderr`` has the reason, which the substrate wrote."""
        return len(self.spans) != 1 or self.spans[0].name != "spawn"

    @property
    def command_seconds(self) -> float | None:
        """The command's own time in the sandbox, if the substrate measures it."""
        return next((span.seconds for span in self.spans if span.name == "run"), None)
