"""The caller's place in a trace of OpenTelemetry, if the program uses that."""

from __future__ import annotations

import sys

_API = "opentelemetry.trace"


def traceparent() -> str:
    """The current span as W3C's ``traceparent``; empty if there is none. Imports nothing."""
    trace = sys.modules.get(_API)
    if trace is None:
        return ""
    found = trace.get_current_span().get_span_context()
    if not found.is_valid:
        return ""
    return f"00-{found.trace_id:032x}-{found.span_id:016x}-{int(found.trace_flags):02x}"
