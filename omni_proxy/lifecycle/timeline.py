"""From a request's marks to the time it spent in each stage. Pure."""

from __future__ import annotations

from itertools import pairwise

from omni_proxy.messages import Leg, Mode, RequestRecord, Stage


def stage_spans(record: RequestRecord, now: float) -> list[tuple[Stage, float, float]]:
    """(stage, begin, end) of every visit, in order of begin; `now` ends the visits that are still open.

    A visit lasts until the next mark of its own track. In parallel mode the marks of two tracks interleave between the
    grant and the end or the retry, which are marks of both; P's last visit ends where P answered:

        P  PREFILL_WAITING ─┬─ PREFILL_SCHEDULED ─ PREFILL_RUNNING ─┤ prefill_done_at
        D                   └─ DECODE_SCHEDULED ── DECODE_RUNNING ──────────┤ FINISHED, or PREFILL_WAITING again
    """
    if record.mode is not Mode.PARALLEL:
        return _one_track(record, now)
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


def _one_track(record: RequestRecord, now: float) -> list[tuple[Stage, float, float]]:
    """Without a second track each visit ends where the next one begins."""
    marks = record.marks
    spans = [(mark.stage, mark.at, after.at) for mark, after in pairwise(marks)]
    last = marks[-1]
    if last.stage is not Stage.FINISHED:
        spans.append((last.stage, last.at, now))
    return spans


def _end_of_visit(record: RequestRecord, index: int) -> float | None:
    mark = record.marks[index]
    later = record.marks[index + 1 :]
    track = _track(mark.stage)
    if track is None:
        return later[0].at if later else None
    follows = next((m.at for m in later if _track(m.stage) in (track, None)), None)
    done_at = record.prefill_done_at
    if mark.stage is Stage.PREFILL_RUNNING and done_at is not None:
        return done_at if follows is None else min(done_at, follows)
    return follows


def _track(stage: Stage) -> Leg | None:
    """The leg whose track a stage belongs to; None for the stages that both share."""
    if Stage.PREFILL_SCHEDULED <= stage <= Stage.PREFILL_RUNNING:
        return Leg.PREFILL
    if Stage.DECODE_WAITING <= stage <= Stage.DECODE_RUNNING:
        return Leg.DECODE
    return None
