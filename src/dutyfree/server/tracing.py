"""OpenTelemetry traces: a span for each call, with a child for each of its phases.

The package ``opentelemetry`` is optional, and imported only if the standard variables (``OTEL_…``) ask for
traces. Without them, ``Tracing.from_environment`` returns None and no call pays for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dutyfree.contract import Observation, Span
from dutyfree.contract.errors import UsageError
from dutyfree.wire.calls import BatchResult, SandboxInfo

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OpenSpan

_NAME = "dutyfree.server"


class Tracing:
    """Makes the spans of calls."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation import tracecontext

        self._provider = provider
        self._tracer = provider.get_tracer(_NAME)
        self._propagator = tracecontext.TraceContextTextMapPropagator()
        self._in_context = trace.set_span_in_context
        self._kind = trace.SpanKind.SERVER
        self._failed = trace.StatusCode.ERROR

    @staticmethod
    def from_environment() -> Tracing | None:
        """Traces as the standard variables configure them; None if they ask for none. Raises UsageError."""
        exporter = os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
        endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
        if not exporter and any(os.environ.get(name) for name in endpoints):
            exporter = "otlp"
        disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        if disabled or exporter in ("", "none"):
            return None
        if exporter not in ("otlp", "console"):
            raise UsageError(
                f"OTEL_TRACES_EXPORTER={exporter[:40]!r} is not supported", remedy="use otlp, console or none"
            )
        try:
            return Tracing(_provider(exporter))
        except ImportError as error:
            raise UsageError(
                f"the variables OTEL_… ask for traces, and {error.name} is not installed",
                remedy="install dutyfree with the extra 'otel', or unset them",
            ) from error

    def start(self, call: str, traceparent: str, attributes: dict[str, str]) -> OpenSpan:
        """The span of a call, as a child of the client's span if that is known."""
        parent = self._propagator.extract({"traceparent": traceparent}) if traceparent else None
        named = {f"dutyfree.{name}": value for name, value in attributes.items() if value}
        return self._tracer.start_span(
            f"dutyfree.{call}", parent, self._kind, named, start_time=time.time_ns()
        )

    def end(self, span: OpenSpan, outcome: str, result: object) -> None:
        """End the span of a call, and add its phases."""
        span.set_attribute("dutyfree.outcome", outcome)
        if outcome != "ok":
            span.set_status(self._failed, outcome)
        elif span.is_recording():
            start: int = getattr(span, "start_time", 0)
            for phases, at in _phases(result):
                self._add(span, phases, start + at)
        span.end(time.time_ns())

    def _add(self, parent: OpenSpan, phases: Sequence[Span], start: int) -> None:
        context = self._in_context(parent)
        for phase in phases:
            begun = start + int(phase.start * 1e9)
            child = self._tracer.start_span(phase.name, context, start_time=begun)
            child.end(begun + int(phase.seconds * 1e9))

    def close(self) -> None:
        """Send what was not sent yet. Blocks."""
        self._provider.shutdown()


def _provider(exporter: str) -> TracerProvider:
    """Reads the other standard variables by itself: resource, sampler, limits, batches, headers."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

    named = Resource.create({"service.name": "dutyfree"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=named)
    found: Any
    if exporter == "console":
        found = ConsoleSpanExporter()
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        found = OTLPSpanExporter()
    provider.add_span_processor(BatchSpanProcessor(found))
    return provider


def _phases(result: object) -> list[tuple[Sequence[Span], int]]:
    """The phases in a result, each with the nanoseconds after which they begin."""
    match result:
        case Observation(spans=spans):
            return [(spans, 0)]
        case [SandboxInfo(spans=spans), *_]:
            return [(spans, 0)]
        case [BatchResult(), *_]:
            found: list[tuple[Sequence[Span], int]] = []
            at = 0
            for seen in (one.observation for one in result if isinstance(one, BatchResult)):
                if seen is not None:
                    found.append((seen.spans, at))
                    at += int(seen.seconds * 1e9)
            return found
    return []
