"""What is recorded of every call: counts and times for Prometheus, a line of the log, a span of a trace."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import NamedTuple, TypeVar

from dutyfree.contract.errors import DutyfreeError, verdict
from dutyfree.server import logs
from dutyfree.server.metrics import Metrics
from dutyfree.server.tracing import Tracing
from dutyfree.wire.errors import describe

T = TypeVar("T")

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


class Origin(NamedTuple):
    """Where a call comes from."""

    tenant: str
    sandbox: str = ""
    request: str = ""
    """The id of the request, for the log."""
    traceparent: str = ""
    """The client's place in a trace, as in W3C's Trace Context."""
    command: str = ""
    """The text of the command, if there is one."""


def request_id(given: str | None) -> str:
    """The id that a client has given, if it is one that can be logged; otherwise a new one."""
    return given if given is not None and _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)


def command_of(arguments: object) -> str:
    """The text of the command that a call runs."""
    return str(getattr(getattr(arguments, "action", arguments), "command", ""))


class CallObserver:
    """Observes all calls of a server."""

    def __init__(self, metrics: Metrics, tracing: Tracing | None = None, *, commands: bool = False) -> None:
        """``commands``: whether the log has the text of commands."""
        self._metrics = metrics
        self.tracing = tracing
        self.commands = commands

    @property
    def idle(self) -> bool:
        """Whether nothing is recorded of calls that succeed, except counts."""
        return self.tracing is None and not logs.log.isEnabledFor(logging.DEBUG)

    async def call(self, name: str, tenant: str, where: Callable[[], Origin], work: Awaitable[T]) -> T:
        """Carry out a call of a tenant. ``where`` it comes from is asked only if something is recorded."""
        start = perf_counter()
        if not self.idle:
            return await self._recorded(name, where(), work, start)
        try:
            return await self._metrics.measured(name, tenant, work)
        except Exception as error:
            self.note_failure(name, where, error, perf_counter() - start)
            raise

    def note_failure(self, name: str, where: Callable[[], Origin], error: Exception, seconds: float) -> None:
        """Write a call to the log that failed because of the infrastructure."""
        outcome = verdict(error)
        if outcome == "infrastructure":
            self._write(name, where(), outcome, error, seconds)

    async def _recorded(self, name: str, origin: Origin, work: Awaitable[T], start: float) -> T:
        span = None
        if self.tracing is not None:
            known = {"tenant": origin.tenant, "sandbox": origin.sandbox, "request": origin.request}
            span = self.tracing.start(name, origin.traceparent, known)
        outcome, result, failure = "cancelled", None, None
        try:
            result = await self._metrics.measured(name, origin.tenant, work)
            outcome = "ok"
            return result
        except Exception as error:
            outcome, failure = verdict(error), error
            raise
        finally:
            if span is not None and self.tracing is not None:
                self.tracing.end(span, outcome, result)
            self._write(name, origin, outcome, failure, perf_counter() - start)

    def _write(
        self, name: str, origin: Origin, outcome: str, failure: Exception | None, seconds: float
    ) -> None:
        level = logging.WARNING if outcome == "infrastructure" else logging.DEBUG
        if not logs.log.isEnabledFor(level):
            return
        code = describe(failure).code if failure is not None else None
        message = failure.message if isinstance(failure, DutyfreeError) and level > logging.DEBUG else None
        logs.event(
            level,
            "call",
            call=name,
            tenant=origin.tenant,
            sandbox=origin.sandbox,
            request=origin.request,
            outcome=outcome,
            code=code,
            message=message,
            seconds=seconds,
            command=origin.command if self.commands else None,
        )
