"""Publish how the calls of clients end, as events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from dutyfree.contract import Observation
from dutyfree.server.events import SHORT, Events
from dutyfree.server.sandboxes import Held
from dutyfree.wire.calls import BatchResult
from dutyfree.wire.events import Outcome

if TYPE_CHECKING:
    from dutyfree.server.handlers import Context, Handler

T = TypeVar("T")

_WORDS = 16
"""Words of a command in a label."""

QUIET = frozenset({"keep_alive", "sandboxes", "facts", "missing", "release"})
"""Calls that have an event of their own, or that change nothing."""
NODE = frozenset({"create", "prepare", "prefetch", "put_files", "forget"})
"""Calls for the whole server. They have an event if they fail."""

_SUBJECTS: dict[str, Callable[[Any], object]] = {
    **dict.fromkeys(("exec", "start", "terminal"), attrgetter("command")),
    "stream": attrgetter("action.command"),
    **dict.fromkeys(
        ("read", "write", "list", "remove", "edit", "upload", "download", "watch"), attrgetter("path")
    ),
    "search": attrgetter("text"),
    **dict.fromkeys(("call", "restart"), attrgetter("service")),
    **dict.fromkeys(
        ("attach", "process_wait", "process_kill", "process_signal", "process_write", "process_close"),
        attrgetter("process"),
    ),
    "batch": lambda wanted: f"{len(wanted.actions)} actions",
    "fork": lambda wanted: f"{wanted.count} copies",
    "connect": lambda wanted: f"port {wanted.port}",
    **dict.fromkeys(("create", "prepare"), lambda wanted: _image(wanted)),
}
"""What the label of a call shows of its arguments."""


def _image(wanted: Any) -> object:
    """The image that a creation names, or the recipe itself."""
    return getattr(wanted, "recipe", wanted).image or "the usual image"


def label_of(call: str, arguments: object) -> str:
    """What the label of a call shows of its arguments."""
    subject = _SUBJECTS.get(call)
    return "" if subject is None else short(subject(arguments))


def recorded(function: Handler) -> Handler:
    """The same handler, which also publishes how its calls end."""
    call = function.__name__.rstrip("_")
    of_sandbox = call not in NODE
    if call in QUIET:
        return function

    async def run(context: Context, arguments: Any) -> Any:
        events = context.service.events
        label = label_of(call, arguments)
        running = events.begin(call, label, context.tenant, events.held(context) if of_sandbox else None)
        try:
            result = await function(context, arguments)
        except BaseException as error:
            events.fail(running, error)
            raise
        if of_sandbox:
            events.end(running, result, outcome_of(result))
        else:
            events.forget(running)
        return result

    return run


async def acted(events: Events, call: str, command: object, held: Held, work: Awaitable[T]) -> T:
    """Carry out a call in a sandbox that has no handler, and publish how it ends."""
    running = events.begin(call, short(command), held.tenant, held)
    try:
        result = await work
    except BaseException as error:
        events.fail(running, error)
        raise
    events.end(running, result, outcome_of(result))
    return result


def short(subject: object) -> str:
    """The beginning of a command or a path."""
    if isinstance(subject, str):
        return subject[:SHORT]
    if isinstance(subject, tuple | list):
        return " ".join([str(part)[:SHORT] for part in subject[:_WORDS]])[:SHORT]
    return ""


def outcome_of(result: object) -> Outcome:
    """How a call ended that has returned this."""
    if isinstance(result, Observation):
        if result.timed_out:
            return "timeout"
        return "ok" if result.exit_code == 0 else "failed"
    if isinstance(result, list) and result and isinstance(result[-1], BatchResult):
        return max((_batch_outcome(one) for one in result), key=lambda one: one != "ok")
    return "ok"


def _batch_outcome(result: BatchResult) -> Outcome:
    return result.error.verdict if result.error is not None else outcome_of(result.observation)
