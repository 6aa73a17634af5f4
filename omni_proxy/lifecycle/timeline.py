"""From a request's marks to the time it spent in each stage. Pure."""

from __future__ import annotations

from omni_proxy.lifecycle.enums import DECODE_LEG, DECODE_WAITING, FINISHED, PARALLEL, PREFILL_LEG, PREFILL_SCHEDULED
from omni_proxy.messages import Leg, RequestRecord, Stage


def visit_ends(record: RequestRecord, now: float) -> list[float]:
    """When each visit to a stage ended, in the order of the marks; `now` ends those that are still open.

    The mark of the end begins no visit: where there is one, it is the last and has no entry here.

    A visit lasts until the next mark of its own track. In parallel mode the marks of two tracks interleave between the
    grant and the end or the retry, which are marks of both; P's last visit ends where P answered:

        P  PREFILL_WAITING ─┬─ PREFILL_SCHEDULED ─ PREFILL_RUNNING ─┤ prefill_done_at
        D                   └─ DECODE_SCHEDULED ── DECODE_RUNNING ──────────┤ FINISHED, or PREFILL_WAITING again
    """
    marks = record.marks
    ended = marks[-1][0] is FINISHED
    ends: list[float] = []
    if record.mode is PARALLEL:
        open_end = marks[-1][1] if ended else now
        for index in range(len(marks) - ended):
            end = _end_of_visit(record, index)
            ends.append(open_end if end is None else end)
        return ends
    for index in range(1, len(marks)):
        ends.append(marks[index][1])
    if not ended:
        ends.append(now)
    return ends


def stage_spans(record: RequestRecord, now: float) -> list[tuple[Stage, float, float]]:
    """(stage, begin, end) of every visit, in order of begin; `now` ends the visits that are still open."""
    ends = visit_ends(record, now)
    return [(stage, at, end) for (stage, at, _), end in zip(record.marks, ends, strict=False)]


def stage_seconds(record: RequestRecord, now: float) -> dict[Stage, float]:
    """Seconds spent in each visited stage, all visits summed; a stage that was skipped is absent."""
    total: dict[Stage, float] = {}
    for stage, begin, end in stage_spans(record, now):
        total[stage] = total.get(stage, 0.0) + (end - begin)
    return total


def _end_of_visit(record: RequestRecord, index: int) -> float | None:
    stage = record.marks[index][0]
    later = record.marks[index + 1 :]
    track = _track(stage)
    if track is None:
        return later[0][1] if later else None
    follows = next((at for s, at, _ in later if _track(s) in (track, None)), None)
    done_at = record.prefill_done_at
    if stage is Stage.PREFILL_RUNNING and done_at is not None:
        return done_at if follows is None else min(done_at, follows)
    return follows


def _track(stage: Stage) -> Leg | None:
    """The leg whose track a stage belongs to; None for the stages that both share."""
    if PREFILL_SCHEDULED <= stage <= Stage.PREFILL_RUNNING:
        return PREFILL_LEG
    if DECODE_WAITING <= stage <= Stage.DECODE_RUNNING:
        return DECODE_LEG
    return None
