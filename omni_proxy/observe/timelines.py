"""The last ended requests and their stages, as `/omni/requests` shows them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from omni_proxy.lifecycle.timeline import stage_spans
from omni_proxy.messages import Effect, Event, RequestRecord, Stage

JsonObject = dict[str, object]


class Timelines:
    """A bounded store of records, newest last, found by our id or the client's."""

    def __init__(self, capacity: int) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=capacity)

    @property
    def watches(self) -> Iterable[type]:
        return ()

    def heard(self, event: Event, effects: Sequence[Effect]) -> None:
        return

    def closed(self, record: RequestRecord, now: float) -> None:
        """Keep it; the oldest has to go. Every request comes here, and few are looked for: so there is no index."""
        self._records.append(record)

    def find(self, request_id: str) -> RequestRecord | None:
        """The record of a request; of several with one client's id, the last."""
        newest_first = list(reversed(self._records))
        found = next((r for r in newest_first if r.external_id == request_id), None)
        return found or next((r for r in newest_first if r.rid == request_id), None)

    def last(self, count: int) -> list[RequestRecord]:
        """The last ended requests, newest first."""
        records = list(self._records)
        return records[: -count - 1 : -1]


def summary(record: RequestRecord, now: float, wall_offset: float) -> JsonObject:
    """One line of a list: what it was and how it ended. `wall_offset`: wall clock minus the core's clock, seconds."""
    end = record.ended_at
    return {
        "id": record.external_id,
        "model": record.model,
        "endpoint": record.endpoint,
        "stream": record.stream,
        "mode": record.mode,
        "arrived": round(record.arrived_at + wall_offset, 6),
        "stage": record.marks[-1][0].name,
        "outcome": record.outcome,
        "error": record.error,
        "encode_s": None if record.encode_s is None else round(record.encode_s, 6),
        "ttft_s": _span(record.arrived_at, record.first_token_at),
        "e2e_s": _span(record.arrived_at, end if end is not None else now),
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "predicted_tokens": record.predicted_tokens,
        "generated_tokens": record.completion_tokens,
        "workers": {p.leg.value: p.worker for p in record.placements},
    }


def timeline(record: RequestRecord, now: float, wall_offset: float) -> JsonObject:
    """Everything about one request: each visit to a stage, the workers chosen and why, the tokens."""
    begin = record.arrived_at
    stages = [
        {"stage": stage.name, "start_s": round(start - begin, 6), "seconds": round(end - start, 6)}
        for stage, start, end in stage_spans(record, now)
    ]
    end = record.ended_at
    if end is not None:
        stages.append({"stage": Stage.FINISHED.name, "start_s": round(end - begin, 6), "seconds": 0.0})
    placements = [
        {
            "leg": p.leg.value,
            "worker": p.worker,
            "reason": p.reason,
            "start_s": p.start_s,
            "finish_s": p.finish_s,
            "cached_tokens": p.cached_tokens,
            "candidates": [{"worker": name, "load": load} for name, load in p.candidates],
        }
        for p in record.placements
    ]
    return {
        **summary(record, now, wall_offset),
        "attempts": record.attempts,
        "detail": record.detail or None,
        "resumes": [
            {"start_s": round(r.at - begin, 6), "worker": r.worker, "tokens": r.tokens} for r in record.resumes
        ],
        "stages": stages,
        "placements": placements,
    }


def _span(begin: float, end: float | None) -> float | None:
    return None if end is None else round(end - begin, 6)
