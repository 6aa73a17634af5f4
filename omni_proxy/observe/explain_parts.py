"""A request's time cut into parts with one cause each, which together are the whole of it. Pure.

    RECEIVED ┬ TOKENIZING ┬ PREFILL_WAITING ┬ P RUNNING ─────────────────────┬ DECODE_WAITING ┬ D RUNNING ───────┐
    gateway  │ tokenising │ queue or prefix │ behind others, computing, slow │ decode room    │ handoff │ answer │

Where P and D run side by side (parallel), the time until P has answered is P's. An attempt that was given up is one
part, from its grant until the request lined up again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Final

from omni_proxy.lifecycle.timeline import stage_spans
from omni_proxy.messages import Leg, Mode, Placement, RequestRecord, Stage


class Cause(StrEnum):
    """What a part of the time went by with."""

    GATEWAY = "gateway"
    TOKENISING = "tokenising"
    QUEUE = "queue"
    """No worker could take it."""
    PREFIX = "prefix"
    """It waited for a worker that holds a part of its prompt."""
    BEHIND = "behind_others"
    """Its worker had earlier prompts to compute."""
    COMPUTING = "computing"
    SLOW_WORKER = "slow_worker"
    """Longer than the worker was expected to take."""
    MISSED_HANDOFF = "missed_handoff"
    """P computed it, but gave nothing that D could pull."""
    RETRY = "retry"
    """An attempt that came to nothing."""
    RESUME = "resume"
    """The answer lost its worker, and had to be taken up by another."""
    DECODE_ROOM = "decode_room"
    HANDOFF = "handoff"
    """The KV on its way, and the first step of the answer."""
    ANSWER = "answer"


@dataclass(frozen=True, slots=True)
class Part:
    """Instants in seconds of the core's clock."""

    cause: Cause
    start: float
    end: float
    placement: Placement | None = None
    """Where the leg that it belongs to went; None: nowhere yet."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


_P_STAGES: Final = (Stage.PREFILL_WAITING, Stage.PREFILL_SCHEDULED, Stage.PREFILL_RUNNING)
_RUNS: Final = (Stage.DECODE_SCHEDULED, Stage.DECODE_RUNNING)
LEAST_PREFIX_S: Final = 0.005
"""A shorter wait is for no prefix in particular."""


def parts_of(record: RequestRecord, now: float) -> list[Part]:
    """The request's time until its end, or until `now`, in order and without gaps."""
    spans = stage_spans(record, now)
    end = record.ended_at if record.ended_at is not None else now
    given_up = _given_up(record, end)
    cuts = {record.arrived_at, end}
    cuts.update(instant for _, begin, until in spans for instant in (begin, until))
    cuts.update(instant for _, begin, until in given_up for instant in (begin, until))
    if record.first_token_at is not None:
        cuts.add(record.first_token_at)
    parts: list[Part] = []
    for begin, until in pairwise(sorted(cut for cut in cuts if record.arrived_at <= cut <= end)):
        active = [stage for stage, start, stop in spans if start <= begin and until <= stop]
        cause = next((lost for lost, start, stop in given_up if start <= begin and until <= stop), None)
        part = Part(cause or _cause(record, _leading(active), begin), begin, until, _placement(record, active, begin))
        parts.append(part)
    return [piece for part in _joined(parts) for piece in _split(part)]


def _leading(active: list[Stage]) -> Stage:
    """Of two tracks the one that the request waits for."""
    leading = next((stage for stage in active if stage in _P_STAGES), None)
    return leading if leading is not None else max(active, default=Stage.RECEIVED)


def _cause(record: RequestRecord, stage: Stage, at: float) -> Cause:
    alone = not any(p.leg is Leg.PREFILL for p in record.placements)
    match stage:
        case Stage.TOKENIZING:
            return Cause.TOKENISING
        case Stage.PREFILL_WAITING:
            return Cause.QUEUE
        case Stage.PREFILL_SCHEDULED | Stage.PREFILL_RUNNING:
            return Cause.COMPUTING
        case Stage.DECODE_WAITING:
            return Cause.QUEUE if alone else Cause.DECODE_ROOM
        case Stage.DECODE_SCHEDULED | Stage.DECODE_RUNNING:
            if record.first_token_at is not None and at >= record.first_token_at:
                return Cause.ANSWER
            computes = alone or (record.mode is Mode.AGGREGATED)
            return Cause.COMPUTING if computes else Cause.HANDOFF
        case _:
            return Cause.GATEWAY


def _given_up(record: RequestRecord, end: float) -> list[tuple[Cause, float, float]]:
    """Spans of attempts that came to nothing, and of those that took up an answer which had lost its worker."""
    found: list[tuple[Cause, float, float]] = []
    resumed = {resume.at for resume in record.resumes}
    granted: float | None = None
    on_decode: float | None = None
    before: Stage | None = None
    for stage, at, _ in record.marks:
        again = stage is Stage.PREFILL_WAITING and granted is not None
        decode_again = stage is Stage.DECODE_WAITING and before in _RUNS and record.mode is not Mode.PARALLEL
        if at in resumed and stage in (Stage.PREFILL_WAITING, Stage.DECODE_WAITING):
            taken_up = (later for s, later, _ in record.marks if later > at and s is Stage.DECODE_RUNNING)
            found.append((Cause.RESUME, at, next(taken_up, end)))
            granted = on_decode = None
        elif again and granted is not None:
            found.append((Cause.RETRY, granted, at))
            granted = on_decode = None
        elif decode_again and on_decode is not None:
            found.append((Cause.RETRY, on_decode, at))
        elif granted is not None and _missed(record, before, stage):
            found.append((Cause.MISSED_HANDOFF, granted, at))
            granted = None
        if stage in (Stage.PREFILL_SCHEDULED, Stage.DECODE_SCHEDULED) and granted is None:
            granted = at
        if stage is Stage.DECODE_SCHEDULED:
            on_decode = at
        before = stage
    return found


def _missed(record: RequestRecord, before: Stage | None, stage: Stage) -> bool:
    """Was P's answer of no use, so that one worker did it all?"""
    return record.mode is Mode.AGGREGATED and before is Stage.PREFILL_RUNNING and stage is Stage.DECODE_WAITING


def _placement(record: RequestRecord, active: list[Stage], at: float) -> Placement | None:
    """Of the leg that ran then, or was to run next."""
    stage = _leading(active)
    leg = Leg.PREFILL if stage in _P_STAGES else Leg.DECODE
    scheduled = Stage.PREFILL_SCHEDULED if leg is Leg.PREFILL else Stage.DECODE_SCHEDULED
    places = [p for p in record.placements if p.leg is leg]
    grants = sum(1 for s, begun, _ in record.marks if s is scheduled and begun <= at)
    waits = stage in (Stage.PREFILL_WAITING, Stage.DECODE_WAITING)
    place = grants if waits else grants - 1
    return places[place] if 0 <= place < len(places) else None


def _joined(parts: list[Part]) -> list[Part]:
    joined: list[Part] = []
    for part in parts:
        if joined and joined[-1].cause is part.cause:
            joined[-1] = replace(joined[-1], end=part.end, placement=part.placement or joined[-1].placement)
        else:
            joined.append(part)
    return joined


def _split(part: Part) -> list[Part]:
    """Computing, as predicted when it was sent: behind others, the prompt itself, and what took longer than that."""
    placement = part.placement
    if placement is None:
        return [part]
    if part.cause is Cause.QUEUE and placement.cached_tokens and part.seconds >= LEAST_PREFIX_S:
        return [replace(part, cause=Cause.PREFIX)]
    if part.cause is not Cause.COMPUTING or placement.start_s is None or placement.finish_s is None:
        return [part]
    # Where one worker does both, its answer begins when its prompt is computed.
    both = placement.leg is Leg.DECODE
    expected = (0.0, placement.start_s) if both else (placement.start_s, placement.finish_s)
    begins, ends = (min(part.end, part.start + max(0.0, seconds)) for seconds in expected)
    pieces = (
        Part(Cause.BEHIND, part.start, begins, placement),
        Part(Cause.COMPUTING, begins, max(begins, ends), placement),
        Part(Cause.SLOW_WORKER, max(begins, ends), part.end, placement),
    )
    return [piece for piece in pieces if piece.seconds > 0] or [part]
