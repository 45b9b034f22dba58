"""How long the engine waits for the launcher and for init."""

from __future__ import annotations

import msgspec


class Timeouts(msgspec.Struct, frozen=True):
    """Seconds. A substrate takes one of these, so that tests can wait for less."""

    answer: float = 5.0
    """Init must answer within this time after the action's own timeout. Processes in a sandbox can block
    their init for ever, so the engine then destroys the sandbox from outside."""
    connect: float = 5.0
    """A server in a sandbox must accept a connection within this time."""
    launcher: float = 5.0
    """A launcher that works answers within this time."""
    end: float = 30.0
    """The kernel must freeze, or end, all processes of a sandbox within this time."""
    warm_up: float = 60.0
    """The first command in a new idle sandbox must end within this time. The shell is the recipe's."""


DEFAULT_TIMEOUTS = Timeouts()
