"""The stage table itself: complete, connected, and with a way out of everywhere."""

from __future__ import annotations

import pytest

from omni_proxy.lifecycle.request import Request
from omni_proxy.lifecycle.stages import TRANSITIONS, IllegalTransition, On, advance
from omni_proxy.messages import Outcome, Stage
from tests.core.steps import spec

LIVE = [stage for stage in Stage if stage is not Stage.FINISHED]
ILLEGAL = [(stage, on) for stage in Stage for on in On if on not in TRANSITIONS[stage]]


def test_every_stage_has_a_row_and_every_row_is_a_stage() -> None:
    assert list(TRANSITIONS) == list(Stage)
    assert TRANSITIONS[Stage.FINISHED] == {}


def test_every_stage_is_reached_from_the_first() -> None:
    reached, todo = {Stage.RECEIVED}, [Stage.RECEIVED]
    while todo:
        fresh = set(TRANSITIONS[todo.pop()].values()) - reached
        reached |= fresh
        todo += fresh
    assert reached == set(Stage)


@pytest.mark.parametrize("stage", LIVE)
@pytest.mark.parametrize("on", [On.FAILED, On.CANCELLED, On.TIMED_OUT])
def test_every_live_stage_ends_by_failure_cancel_and_deadline(stage: Stage, on: On) -> None:
    assert advance(stage, on) is Stage.FINISHED


@pytest.mark.parametrize("on", list(On))
def test_every_move_is_used(on: On) -> None:
    assert any(on in row for row in TRANSITIONS.values())


def test_exactly_the_outcomes_finish_a_request() -> None:
    ends = {on.value for row in TRANSITIONS.values() for on, to in row.items() if to is Stage.FINISHED}
    assert ends == {outcome.value for outcome in Outcome}


@pytest.mark.parametrize("stage", [Stage.PREFILL_WAITING, Stage.DECODE_WAITING])
def test_only_a_grant_leaves_a_queue_for_a_worker(stage: Stage) -> None:
    onward = {on for on, to in TRANSITIONS[stage].items() if to not in (Stage.FINISHED, *_QUEUES)}
    assert onward == {On.GRANTED}


_QUEUES = (Stage.PREFILL_WAITING, Stage.DECODE_WAITING)


@pytest.mark.parametrize(("stage", "on"), ILLEGAL)
def test_an_illegal_move_changes_nothing(stage: Stage, on: On) -> None:
    request = Request("r", spec(), 0.0)
    request.stage = stage
    with pytest.raises(IllegalTransition) as caught:
        request.move(on, 1.0)
    assert (caught.value.stage, caught.value.on) == (stage, on)
    assert stage.name in str(caught.value)
    assert request.stage is stage
    assert len(request.marks) == 1


def test_an_illegal_move_of_the_second_track_changes_nothing() -> None:
    request = Request("r", spec(), 0.0)
    request.move(On.ENQUEUE_PREFILL, 1.0)
    request.fork(1.0)
    marks = list(request.marks)
    with pytest.raises(IllegalTransition):
        request.move_prefill(On.SENT, 2.0)
    assert (request.prefill_stage, request.stage) == (Stage.PREFILL_WAITING, Stage.DECODE_WAITING)
    assert request.marks == marks
