"""From a request's marks to the time it spent in each stage. Pure."""

from __future__ import annotations

from omni_proxy.messages import Leg, Mode, RequestRecord, Stage


def stage_spans(record: RequestRecord, now: float) -> list[tuple[Stage, float, float]]:
    """(stage, begin, end) of every visit, in order of begin; `now` ends the visits that are still open.

    A visit lasts until the next mark of its own track. In parallel mode the marks of two tracks interleave, so a visit
    ends at the next mark of the same leg, and P's last visit where P answered:

        P  PREFILL_WAITING ─ SCHEDULED ─ RUNNING ─────┤ prefill_done_at
        D  DECODE_WAITING ── SCHEDULED ─ RUNNING ───────────────┤ FINISHED
    """
    open_end = record.ended_at if record.ended_at is not None else now
    spans: list[tuple[Stage, float, float]] = []
    for index, mark in enumerate(record.marks):
        if mark.stage is not Stage.FINISHED:
            end = _end_of_visit(record, index)
            spans.append((mark.stage, mark.at, open_end if end is None else end))
    return spans


def stage_seconds(record: RequestRecord, now: float) -> dict[Stage, float]:
    """Seconds spent in each visited stage, all visits summed; a stage that was skipped is absent."""
    total: dict[Stage, float] = {}
    for stage, begin, end in stage_spans(record, now):
        total[stage] = total.get(stage, 0.0) + (end - begin)
    return total


def _end_of_visit(record: RequestRecord, index: int) -> float | None:
    mark = record.marks[index]
    later = record.marks[index + 1 :]
    track = _track(mark.stage)
    if record.mode is not Mode.PARALLEL or track is None:
        return later[0].at if later else None
    if mark.stage is Stage.PREFILL_RUNNING and record.prefill_done_at is not None:
        return record.prefill_done_at
    return next((m.at for m in later if _track(m.stage) in (track, None)), None)


def _track(stage: Stage) -> Leg | None:
    """The leg whose track a stage belongs to; None for the stages that both share."""
    if Stage.PREFILL_WAITING <= stage <= Stage.PREFILL_RUNNING:
        return Leg.PREFILL
    if Stage.DECODE_WAITING <= stage <= Stage.DECODE_RUNNING:
        return Leg.DECODE
    return None
