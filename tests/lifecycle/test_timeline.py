"""From marks to spans."""

from __future__ import annotations

from dataclasses import replace

from omni_proxy.lifecycle.request import Request
from omni_proxy.lifecycle.timeline import stage_seconds, stage_spans
from omni_proxy.messages import Mode, Outcome, RequestRecord, Stage
from tests.core.steps import spec

S = Stage


def record(mode: Mode, *marks: tuple[Stage, float], prefill_done_at: float | None = None) -> RequestRecord:
    empty = Request("r", spec(), 0.0).record(Outcome.COMPLETED, None, "")
    taken = tuple((stage, at, 0) for stage, at in marks)
    return replace(empty, mode=mode, marks=taken, prefill_done_at=prefill_done_at)


def test_sequential_visits_touch() -> None:
    told = record(
        Mode.SEQUENTIAL,
        (S.RECEIVED, 0.0),
        (S.PREFILL_WAITING, 1.0),
        (S.PREFILL_SCHEDULED, 3.0),
        (S.PREFILL_RUNNING, 4.0),
        (S.DECODE_WAITING, 8.0),
        (S.FINISHED, 9.0),
    )
    assert stage_spans(told, 99.0) == [
        (S.RECEIVED, 0.0, 1.0),
        (S.PREFILL_WAITING, 1.0, 3.0),
        (S.PREFILL_SCHEDULED, 3.0, 4.0),
        (S.PREFILL_RUNNING, 4.0, 8.0),
        (S.DECODE_WAITING, 8.0, 9.0),
    ]
    assert sum(stage_seconds(told, 99.0).values()) == told.ended_at


def test_a_skipped_stage_is_absent() -> None:
    told = record(Mode.AGGREGATED, (S.RECEIVED, 0.0), (S.DECODE_WAITING, 1.0), (S.FINISHED, 2.0))
    assert stage_seconds(told, 2.0) == {S.RECEIVED: 1.0, S.DECODE_WAITING: 1.0}


def test_an_open_visit_lasts_until_now() -> None:
    told = record(Mode.SEQUENTIAL, (S.RECEIVED, 0.0), (S.TOKENIZING, 1.0))
    assert told.ended_at is None
    assert stage_seconds(told, 5.0) == {S.RECEIVED: 1.0, S.TOKENIZING: 4.0}


def test_visits_of_one_stage_are_summed() -> None:
    told = record(
        Mode.SEQUENTIAL,
        (S.RECEIVED, 0.0),
        (S.PREFILL_WAITING, 0.0),
        (S.PREFILL_SCHEDULED, 2.0),
        (S.PREFILL_WAITING, 3.0),
        (S.FINISHED, 7.0),
    )
    assert stage_seconds(told, 7.0)[S.PREFILL_WAITING] == 6.0


def test_parallel_tracks_overlap() -> None:
    told = record(
        Mode.PARALLEL,
        (S.RECEIVED, 0.0),
        (S.PREFILL_WAITING, 0.0),
        (S.DECODE_WAITING, 2.0),
        (S.PREFILL_SCHEDULED, 2.0),
        (S.DECODE_SCHEDULED, 2.0),
        (S.DECODE_RUNNING, 3.0),
        (S.PREFILL_RUNNING, 4.0),
        (S.FINISHED, 9.0),
        prefill_done_at=6.0,
    )
    assert stage_seconds(told, 99.0) == {
        S.RECEIVED: 0.0,
        S.PREFILL_WAITING: 2.0,
        S.DECODE_WAITING: 0.0,
        S.PREFILL_SCHEDULED: 2.0,
        S.DECODE_SCHEDULED: 1.0,
        S.DECODE_RUNNING: 6.0,
        S.PREFILL_RUNNING: 2.0,
    }


def test_a_parallel_retry_ends_both_tracks() -> None:
    told = record(
        Mode.PARALLEL,
        (S.RECEIVED, 0.0),
        (S.PREFILL_WAITING, 0.0),
        (S.DECODE_WAITING, 0.0),
        (S.PREFILL_SCHEDULED, 0.0),
        (S.DECODE_SCHEDULED, 0.0),
        (S.DECODE_RUNNING, 1.0),
        (S.PREFILL_RUNNING, 1.0),
        (S.PREFILL_WAITING, 3.0),
        (S.DECODE_WAITING, 5.0),
        (S.PREFILL_SCHEDULED, 5.0),
        (S.DECODE_SCHEDULED, 5.0),
        (S.PREFILL_RUNNING, 6.0),
        (S.FINISHED, 9.0),
        prefill_done_at=8.0,
    )
    seconds = stage_seconds(told, 9.0)
    assert seconds[S.DECODE_RUNNING] == 2.0
    assert seconds[S.PREFILL_WAITING] == 2.0
    assert seconds[S.PREFILL_RUNNING] == 2.0 + 2.0
    assert seconds[S.DECODE_SCHEDULED] == 1.0 + 4.0
