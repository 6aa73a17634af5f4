"""Timelines in Chrome's trace event format, for chrome://tracing and Perfetto. Pure.

One process of the trace is the gateway, with the stages of each request; one more for each worker shows what it held
when. A row (thread) never holds two spans at once: requests take the lowest row that is free.

    gateway  1 | RECEIVED PREFILL_WAITING PREFILL_RUNNING … DECODE_RUNNING   r1   r4
             2 |    RECEIVED …                                                r2
    p0       1 |            r1        r2
    d0       1 |                                r1             r4

Format: complete events (`X`), metadata (`M`), instants (`i`); microseconds from the first arrival on, because
those since 1970 do not fit a double exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from omni_proxy.lifecycle.timeline import stage_spans
from omni_proxy.messages import Leg, Mode, RequestRecord, Stage

TraceEvent = dict[str, object]
_GATEWAY: Final = 1
_LEG_STAGES: Final = {
    Stage.PREFILL_SCHEDULED: Leg.PREFILL,
    Stage.PREFILL_RUNNING: Leg.PREFILL,
    Stage.DECODE_SCHEDULED: Leg.DECODE,
    Stage.DECODE_RUNNING: Leg.DECODE,
}


def chrome_trace(records: Iterable[RequestRecord], now: float, wall_offset: float) -> dict[str, object]:
    """The trace as an object to write as JSON.

    Records whose scheduler died have no marks, and are left out. `now` ends what is not ended; `wall_offset`: wall
    clock minus the core's clock, seconds.
    """
    told = sorted((r for r in records if r.marks), key=lambda r: r.arrived_at)
    begin = told[0].arrived_at if told else now
    drawing = _Drawing(now, begin)
    for record in told:
        drawing.add(record)
    other = {"begin": round(begin + wall_offset, 6), "unit_of_begin": "seconds since 1970"}
    return {"traceEvents": drawing.events(), "displayTimeUnit": "ms", "otherData": other}


class _Rows:
    """Rows of one process: when each is free again."""

    def __init__(self) -> None:
        self._free: list[float] = []

    def take(self, begin: float, end: float) -> int:
        """The number, from 1 on, of the lowest row that is free at `begin`; until `end` it is not."""
        for row, free in enumerate(self._free):
            if free <= begin:
                self._free[row] = end
                return row + 1
        self._free.append(end)
        return len(self._free)


class _Drawing:
    def __init__(self, now: float, begin: float) -> None:
        self._now = now
        self._begin = begin
        self._events: list[TraceEvent] = []
        self._pids: dict[str, int] = {}
        self._spans: list[tuple[str, float, float, RequestRecord, Leg]] = []
        """What workers held: rows are given out in order of time, when all is known."""
        self._rows: dict[int, _Rows] = {}
        self._named: set[tuple[int, int]] = set()

    def add(self, record: RequestRecord) -> None:
        """Draw a request's stages; its workers are drawn at the end."""
        end = record.ended_at if record.ended_at is not None else self._now
        spans = stage_spans(record, self._now)
        # The two tracks of a request with both legs at once overlap: the second gets a row of its own.
        rows = {Leg.PREFILL: self._row(_GATEWAY, record.arrived_at, end)}
        rows[Leg.DECODE] = rows[Leg.PREFILL]
        if record.mode is Mode.PARALLEL:
            rows[Leg.DECODE] = self._row(_GATEWAY, record.arrived_at, end)
        arguments = _arguments(record)
        for stage, begin, until in spans:
            leg = Leg.DECODE if stage >= Stage.DECODE_WAITING else Leg.PREFILL
            self._complete(stage.name, "stage", _GATEWAY, rows[leg], begin, until, arguments)
        if record.first_token_at is not None:
            self._instant("first token", rows[Leg.DECODE], record.first_token_at, record)
        self._workers_of(record, spans)

    def events(self) -> list[TraceEvent]:
        """Everything: names first, then spans."""
        for worker, begin, end, record, leg in sorted(self._spans, key=lambda span: (span[0], span[1])):
            pid = self._pids.setdefault(worker, _GATEWAY + 1 + len(self._pids))
            row = self._row(pid, begin, end)
            self._complete(record.external_id, leg.value, pid, row, begin, end, {"id": record.external_id})
        names = [_meta("process_name", _GATEWAY, 0, "gateway")]
        names += [_meta("process_name", pid, 0, worker) for worker, pid in self._pids.items()]
        names += [_meta("thread_name", pid, row, f"{row}") for pid, row in sorted(self._named)]
        return names + self._events

    def _workers_of(self, record: RequestRecord, spans: Sequence[tuple[Stage, float, float]]) -> None:
        """Which worker held the request when: its n-th grant of a leg begins the leg's n-th visit."""
        for leg in Leg:
            names = [p.worker for p in record.placements if p.leg is leg]
            visits: list[list[float]] = []
            for stage, begin, end in spans:
                if _LEG_STAGES.get(stage) is not leg:
                    continue
                if stage in (Stage.PREFILL_SCHEDULED, Stage.DECODE_SCHEDULED) or not visits:
                    visits.append([begin, end])
                else:
                    visits[-1][1] = end
            for name, (begin, end) in zip(names, visits, strict=False):
                self._spans.append((name, begin, end, record, leg))

    def _row(self, pid: int, begin: float, end: float) -> int:
        row = self._rows.setdefault(pid, _Rows()).take(begin, end)
        self._named.add((pid, row))
        return row

    def _complete(
        self, name: str, category: str, pid: int, row: int, begin: float, end: float, arguments: dict[str, object]
    ) -> None:
        self._events.append(
            {
                "ph": "X",
                "name": name,
                "cat": category,
                "pid": pid,
                "tid": row,
                "ts": self._us(begin),
                "dur": round(max(0.0, end - begin) * 1e6, 3),
                "args": arguments,
            }
        )

    def _instant(self, name: str, row: int, at: float, record: RequestRecord) -> None:
        self._events.append(
            {
                "ph": "i",
                "s": "t",
                "name": name,
                "cat": "stage",
                "pid": _GATEWAY,
                "tid": row,
                "ts": self._us(at),
                "args": {"id": record.external_id},
            }
        )

    def _us(self, at: float) -> float:
        return round((at - self._begin) * 1e6, 3)


def _meta(name: str, pid: int, row: int, value: str) -> TraceEvent:
    return {"ph": "M", "name": name, "pid": pid, "tid": row, "args": {"name": value}}


def _arguments(record: RequestRecord) -> dict[str, object]:
    return {
        "id": record.external_id,
        "model": record.model,
        "mode": record.mode,
        "outcome": record.outcome,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "generated_tokens": record.completion_tokens,
        "workers": {p.leg.value: p.worker for p in record.placements},
    }
