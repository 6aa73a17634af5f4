"""Answers that lose their decode worker when a part of them has been shown, and are continued by another pair."""

from __future__ import annotations

import pytest

from omni_proxy.errors import ErrorCode
from omni_proxy.lifecycle.retries import RetryPolicy
from omni_proxy.messages import (
    Arrived,
    Cancelled,
    Close,
    DecodeBroke,
    DecodeDone,
    Event,
    Failure,
    FailureKind,
    FirstToken,
    Lease,
    LegFailed,
    Mode,
    Outcome,
    PrefillDone,
    Resume,
    Stage,
    Tick,
    Usage,
    WorkerDown,
)
from omni_proxy.observe.tallies import Tallies
from omni_proxy.observe.timelines import timeline
from tests.core.steps import (
    CLOSED,
    CUT,
    At,
    Ended,
    Step,
    assert_idle,
    core_of,
    d,
    done,
    p,
    run,
    spec,
    start_d,
    start_p,
)

PAIRS = ("p0", "p1", "d0", "d1")


def begun(rid: str = "r") -> list[Step]:
    """A request whose first token has been shown, on p0 and d0."""
    return [
        (Arrived(rid, spec()), [start_p(rid, 1, "p0")]),
        (PrefillDone(p(rid, 1, "p0"), True, usage=Usage(100, None, 64)), [start_d(rid, 2, "d0", "p0")]),
        (At(1.0, FirstToken(d(rid, 2, "d0"))), []),
    ]


def test_it_goes_on_from_its_tokens_with_another_pair() -> None:
    core = core_of(*PAIRS)
    run(core, [*begun(), (At(2.0, DecodeBroke(d("r", 2, "d0"), 40, CUT)), [start_p("r", 3, "p1")])])
    held = {w.name: (w.prefill_tokens, w.kv_tokens) for w in core.workers()}
    assert held["p1"] == (140, 140), "its prompt is longer by what has been shown"
    assert held["d0"] == (0, 0)
    (record,) = run(
        core,
        [
            (PrefillDone(p("r", 3, "p1"), True, usage=Usage(140, None, 128)), [start_d("r", 4, "d1", "p1")]),
            (At(3.0, FirstToken(d("r", 4, "d1"))), []),
            (At(4.0, DecodeDone(d("r", 4, "d1"), Usage(100, 60, 64))), [done("r")]),
        ],
        2.0,
    )
    assert record.resumes == (Resume(2.0, "d0", 40),)
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (100, 60, 64)
    assert record.first_token_at == 1.0, "the client has waited for its first token once"
    assert timeline(record, 4.0, 0.0)["resumes"] == [{"start_s": 2.0, "worker": "d0", "tokens": 40}]
    stages = [stage for stage, _, _ in record.marks]
    assert stages.count(Stage.PREFILL_SCHEDULED) == stages.count(Stage.DECODE_SCHEDULED) == 2
    assert_idle(core)


def test_the_lost_worker_is_blamed() -> None:
    core = core_of(*PAIRS)
    run(core, [*begun(), (DecodeBroke(d("r", 2, "d0"), 40, CUT), [start_p("r", 3, "p1")])], 1.0)
    assert {w.name: w.reason for w in core.workers() if w.reason} == {"d0": "ejected: closed"}


def test_one_that_needs_the_room_is_not() -> None:
    gave_up = Failure(FailureKind.GAVE_UP, "recomputed", answered=True)
    core = core_of(*PAIRS)
    run(core, [*begun(), (DecodeBroke(d("r", 2, "d0"), 40, gave_up), [start_p("r", 3, "p1")])], 1.0)
    assert not any(w.reason for w in core.workers())


def test_a_second_loss_counts_all_tokens_from_the_beginning() -> None:
    core = core_of(*PAIRS)
    run(
        core,
        [
            *begun(),
            (DecodeBroke(d("r", 2, "d0"), 40, CUT), [start_p("r", 3, "p1")]),
            (PrefillDone(p("r", 3, "p1"), True), [start_d("r", 4, "d1", "p1")]),
            (FirstToken(d("r", 4, "d1")), []),
            (DecodeBroke(d("r", 4, "d1"), 70, CUT), [start_p("r", 5, "p0")]),
        ],
        1.0,
    )
    assert {w.name: w.prefill_tokens for w in core.workers()}["p0"] == 170


def test_resumes_are_bounded_as_retries() -> None:
    core = core_of(*PAIRS, retries=RetryPolicy(1))
    (record,) = run(
        core,
        [
            *begun(),
            (DecodeBroke(d("r", 2, "d0"), 40, CUT), [start_p("r", 3, "p1")]),
            (PrefillDone(p("r", 3, "p1"), True), [start_d("r", 4, "d1", "p1")]),
            (FirstToken(d("r", 4, "d1")), []),
            (
                DecodeBroke(d("r", 4, "d1"), 70, CUT),
                [Ended("r", Outcome.FAILED, ErrorCode.WORKER_CLOSED, d("r", 4, "d1"))],
            ),
        ],
        1.0,
    )
    assert len(record.resumes) == 1
    assert_idle(core)


@pytest.mark.parametrize("failure", [CLOSED, Failure(FailureKind.CONNECT, "refused")])
def test_the_next_worker_may_fail_before_it_shows_anything(failure: Failure) -> None:
    core = core_of(*PAIRS)
    run(
        core,
        [
            *begun(),
            (DecodeBroke(d("r", 2, "d0"), 40, CUT), [start_p("r", 3, "p1")]),
            (PrefillDone(p("r", 3, "p1"), True), [start_d("r", 4, "d1", "p1")]),
            (LegFailed(d("r", 4, "d1"), failure), [start_p("r", 5, "p0")]),
        ],
        1.0,
    )


def test_no_pair_is_left() -> None:
    core = core_of("p0", "d0", no_worker_timeout_s=10.0)
    run(
        core,
        [
            *begun(),
            (WorkerDown("d0", "killed"), []),
            (At(2.0, DecodeBroke(d("r", 2, "d0"), 40, CUT)), []),
            (At(12.0, Tick()), [Ended("r", Outcome.TIMED_OUT, ErrorCode.NO_WORKER)]),
        ],
        1.0,
    )
    assert_idle(core)


def test_the_client_leaves_between() -> None:
    core = core_of(*PAIRS)
    effects = [
        *begun(),
        (DecodeBroke(d("r", 2, "d0"), 40, CUT), [start_p("r", 3, "p1")]),
    ]
    run(core, effects, 1.0)
    assert any(isinstance(e, Close) for e in core.handle(Cancelled("r"), 3.0))
    assert_idle(core)


def test_alone_and_in_parallel() -> None:
    core = core_of("m0", "m1")
    run(
        core,
        [
            (Arrived("r", spec()), [start_d("r", 1, "m0")]),
            (FirstToken(d("r", 1, "m0")), []),
            (DecodeBroke(d("r", 1, "m0"), 40, CUT), [start_d("r", 2, "m1")]),
            (FirstToken(d("r", 2, "m1")), []),
            (DecodeDone(d("r", 2, "m1"), Usage(100, 50)), [done("r")]),
        ],
    )
    assert_idle(core)
    core = core_of(*PAIRS, schedule_mode=Mode.PARALLEL)
    run(
        core,
        [
            (Arrived("r", spec()), [start_p("r", 1, "p0", "d0"), start_d("r", 2, "d0", "p0")]),
            (PrefillDone(p("r", 1, "p0"), True), []),
            (FirstToken(d("r", 2, "d0")), []),
            (DecodeBroke(d("r", 2, "d0"), 40, CUT), [start_p("r", 3, "p1", "d1"), start_d("r", 4, "d1", "p1")]),
        ],
    )


def stale() -> list[Lease]:
    return [d("r", 9, "d0"), d("nobody", 2, "d0"), p("r", 1, "p0")]


@pytest.mark.parametrize("lease", stale())
def test_a_stale_one_is_dropped(lease: Lease) -> None:
    core = core_of(*PAIRS)
    run(core, [*begun(), (DecodeBroke(lease, 40, CUT), [])], 1.0)


def test_they_are_counted() -> None:
    core, tallies = core_of(*PAIRS, retries=RetryPolicy(1)), Tallies()
    events: list[Event] = [
        Arrived("r", spec()),
        PrefillDone(p("r", 1, "p0"), True),
        FirstToken(d("r", 2, "d0")),
        DecodeBroke(d("r", 2, "d0"), 40, CUT),
        PrefillDone(p("r", 3, "p1"), True),
        FirstToken(d("r", 4, "d1")),
        DecodeBroke(d("r", 4, "d1"), 70, CUT),
    ]
    for event in events:
        tallies.heard(event, core.handle(event, 1.0))
    assert tallies.resumes == {"continued": 1, "given_up": 1}
    assert tallies.leg_failures == {("d0", "decode", "closed"): 1, ("d1", "decode", "closed"): 1}
