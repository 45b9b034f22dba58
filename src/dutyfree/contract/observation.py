"""What a command returns: its output, how it ended, and where the time went."""

from __future__ import annotations

import msgspec

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
