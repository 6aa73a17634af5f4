"""What the page shows of one request: a row of the Gantt, small enough to be sent a few times a second. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from omni_proxy.lifecycle.timeline import stage_spans
from omni_proxy.messages import Leg, Placement, RequestRecord

MAX_TEXT = 160
"""Clients choose ids and model names; a page needs the beginning."""


class Row(Struct, frozen=True):
    """One request. Times are seconds from its arrival, `arrived` is wall clock."""

    rid: str
    id: str
    model: str
    mode: str | None
    arrived: float
    stage: str
    outcome: str | None
    """None while it lives."""
    error: str | None
    ttft_s: float | None
    e2e_s: float
    prompt_tokens: int
    cached_tokens: int | None
    generated_tokens: int | None
    prefill: str | None
    """The worker of its P leg; None in aggregated mode."""
    decode: str | None
    attempts: int
    resumes: int
    spans: tuple[tuple[int, float, float], ...]
    """Every visit to a stage: its number, when it began, how long it lasted."""


def row(record: RequestRecord, now: float, offset: float) -> Row:
    """A request as it stands at `now`; `offset`: wall clock minus the record's clock."""
    begin, end, first = record.arrived_at, record.ended_at, record.first_token_at
    spans = tuple(
        (int(stage), round(start - begin, 6), round(stop - start, 6)) for stage, start, stop in stage_spans(record, now)
    )
    return Row(
        rid=record.rid,
        id=record.external_id[:MAX_TEXT],
        model=record.model[:MAX_TEXT],
        mode=None if record.mode is None else record.mode.value,
        arrived=round(begin + offset, 6),
        stage=record.marks[-1][0].name,
        outcome=None if record.outcome is None else record.outcome.value,
        error=None if record.error is None else record.error.value,
        ttft_s=None if first is None else round(first - begin, 6),
        e2e_s=round((now if end is None else end) - begin, 6),
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        generated_tokens=record.completion_tokens,
        prefill=_last(record.placements, Leg.PREFILL),
        decode=_last(record.placements, Leg.DECODE),
        attempts=record.attempts,
        resumes=len(record.resumes),
        spans=spans,
    )


def _last(placements: Sequence[Placement], leg: Leg) -> str | None:
    return next((p.worker for p in reversed(placements) if p.leg is leg), None)
