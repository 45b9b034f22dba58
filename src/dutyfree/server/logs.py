"""The log of a server: one line for each thing that happened, as logfmt or JSON, on standard error.

``info`` has what happens to sandboxes, calls that failed because of the infrastructure, and refused requests;
``debug`` also every call. A line never has a token, the content of a file, input or output. It has the text
of a command only if the operator asks for it.
"""

from __future__ import annotations

import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from starlette.requests import HTTPConnection

from dutyfree.server.sandboxes import Held

Format = Literal["logfmt", "json"]
Level = Literal["debug", "info", "warning", "error"]

EVENT = "event"
"""The field that names what happened."""

log = logging.getLogger("dutyfree.server")

_PLAIN = re.compile(r"[A-Za-z0-9_./:@+,-]+")
_LONGEST = 500


class Fields(dict[str, Any]):
    """The fields of a line, as the argument of a logging call."""


class LineFormatter(logging.Formatter):
    """Makes a line of a record: time, level, event, and its fields."""

    def __init__(self, kind: Format) -> None:
        super().__init__()
        self._kind = kind

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": at.replace("+00:00", "Z"), "level": record.levelname.lower()}
        if isinstance(record.args, Fields):
            line[EVENT] = record.msg
            line.update((name, value) for name, value in record.args.items() if value not in (None, ""))
        else:
            line[EVENT] = "message"
            line["message"] = record.getMessage()
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        if self._kind == "json":
            return msgspec.json.encode(line, enc_hook=str).decode()
        return " ".join(f"{name}={_quoted(value)}" for name, value in line.items())


def _quoted(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    if _PLAIN.fullmatch(text):
        return text
    return msgspec.json.encode(text).decode()  # its escapes keep a line one line


def configure(kind: Format, level: Level) -> None:
    """Write the log of the whole process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(kind))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("dutyfree").setLevel(level.upper())


def event(level: int, name: str, **fields: object) -> None:
    """Log what happened."""
    if log.isEnabledFor(level):
        short = {key: value[:_LONGEST] if isinstance(value, str) else value for key, value in fields.items()}
        log.log(level, name, Fields(short))


def refused(connection: HTTPConnection, status: int, code: str) -> None:
    """Log that a client was not let in."""
    address = connection.client.host if connection.client else "unix"
    event(logging.INFO, "refused", address=address, path=connection.url.path, status=status, code=code)


def sandbox_changed(what: str, held: Held) -> None:
    """Log what happened to a sandbox. That its lease was extended is no news."""
    level = logging.DEBUG if what == "extended" else logging.INFO
    if log.isEnabledFor(level):
        served = held.sandbox.served
        kind = served.kind if what == "created" and served is not None else None
        event(level, f"sandbox {what}", sandbox=held.id, tenant=held.tenant, served=kind)
