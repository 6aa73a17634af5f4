"""OpenTelemetry spans from timelines: one for the request, one for each visit to a stage. Needs the extra [otel].

Spans are made when a request has ended and sent in the background by the SDK; nothing here is on a request's way.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from omni_proxy import __version__
from omni_proxy.lifecycle.timeline import stage_spans
from omni_proxy.messages import Leg, Outcome, RequestRecord, Stage

Attributes = Mapping[str, str | bool | int | float]
_SCOPE = InstrumentationScope("omni_proxy", __version__)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET = Status(StatusCode.UNSET)
SHUTDOWN_MS = 2000
"""How long an ending gateway waits for a collector that does not answer."""


def exporter(endpoint: str, headers: Mapping[str, str], timeout_s: float) -> SpanExporter:
    """Sends to a collector over OTLP/HTTP; `endpoint` is its address without `/v1/traces`."""
    return OTLPSpanExporter(
        endpoint=f"{endpoint.rstrip('/')}/v1/traces", headers=dict(headers), timeout=max(1, round(timeout_s))
    )


class Spans:
    """Makes spans and hands them to the SDK's batches."""

    def __init__(self, service_name: str, exporter: SpanExporter) -> None:
        self._resource = Resource.create({SERVICE_NAME: service_name, SERVICE_VERSION: __version__})
        self._batches = BatchSpanProcessor(exporter)
        self._ids = RandomIdGenerator()

    def ended(
        self, trace_id: int, parent_id: int | None, span_id: int, record: RequestRecord, status: int, now: float
    ) -> None:
        """A request has ended. `status`: what the client was told; `now`: of the core's clock, seconds."""
        if not record.marks:  # its scheduler died, and its timeline with it
            return
        offset = time.time() - now
        end = record.ended_at if record.ended_at is not None else now
        context = _context(trace_id, span_id)
        parent = None if parent_id is None else _context(trace_id, parent_id, remote=True)
        for stage, begin, until in stage_spans(record, now):
            child = _context(trace_id, self._ids.generate_span_id())
            name, told = stage.name.lower(), _of_stage(record, stage)
            self._send(name, child, context, SpanKind.INTERNAL, begin, until, offset, told)
        first = record.first_token_at
        events = () if first is None else (Event("first token", timestamp=_ns(first, offset)),)
        failed = record.outcome not in (Outcome.COMPLETED, Outcome.CANCELLED)
        state = Status(StatusCode.ERROR, record.detail or None) if failed else _UNSET
        name, told = f"POST {record.endpoint}", _of_request(record, status)
        self._send(name, context, parent, SpanKind.SERVER, record.arrived_at, end, offset, told, state, events)

    def close(self) -> None:
        """Send what is left."""
        self._batches.force_flush(SHUTDOWN_MS)
        self._batches.shutdown()

    def _send(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind,
        begin: float,
        end: float,
        offset: float,
        attributes: Attributes,
        status: Status = _UNSET,
        events: Sequence[Event] = (),
    ) -> None:
        self._batches.on_end(
            ReadableSpan(
                name=name,
                context=context,
                parent=parent,
                resource=self._resource,
                attributes=attributes,
                events=events,
                kind=kind,
                instrumentation_scope=_SCOPE,
                status=status,
                start_time=_ns(begin, offset),
                end_time=_ns(end, offset),
            )
        )


def _context(trace_id: int, span_id: int, remote: bool = False) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=remote, trace_flags=_SAMPLED)


def _ns(at: float, offset: float) -> int:
    return int((at + offset) * 1e9)


def _of_request(record: RequestRecord, status: int) -> Attributes:
    """Under the semantic conventions' names where there are some. Never a prompt."""
    told: dict[str, str | bool | int | float] = {
        "http.request.method": "POST",
        "http.response.status_code": status,
        "url.path": record.endpoint,
        "gen_ai.request.model": record.model,
        "omni.request_id": record.external_id,
        "omni.stream": record.stream,
        "omni.attempts": record.attempts,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
    }
    more: dict[str, str | int | None] = {
        "omni.mode": None if record.mode is None else record.mode.value,
        "omni.outcome": None if record.outcome is None else record.outcome.value,
        "error.type": None if record.error is None else record.error.value,
        "omni.cached_tokens": record.cached_tokens,
        "omni.predicted_tokens": record.predicted_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
    }
    return told | {name: value for name, value in more.items() if value is not None}


def _of_stage(record: RequestRecord, stage: Stage) -> Attributes:
    """Whose the stage was, where a worker has it."""
    if Stage.PREFILL_SCHEDULED <= stage <= Stage.PREFILL_RUNNING:
        leg = Leg.PREFILL
    elif Stage.DECODE_SCHEDULED <= stage <= Stage.DECODE_RUNNING:
        leg = Leg.DECODE
    else:
        return {}
    placement = next((p for p in reversed(record.placements) if p.leg is leg), None)
    return {} if placement is None else {"omni.worker": placement.worker, "omni.reason": placement.reason}
