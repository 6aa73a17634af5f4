"""Tables of steps: one core, what it hears, what it asks for."""

from __future__ import annotations

import pytest

from omni_proxy.apc.index import NoIndex
from omni_proxy.core import Core, CoreSettings
from omni_proxy.errors import ErrorCode
from omni_proxy.lifecycle.retries import RetryPolicy
from omni_proxy.messages import (
    Abort,
    Adopted,
    Arrived,
    Cancelled,
    Close,
    DecodeDone,
    Effect,
    Failure,
    FirstToken,
    FrontLost,
    LegFailed,
    LegSent,
    Mode,
    Outcome,
    PrefillDone,
    RequestRecord,
    Role,
    Stage,
    Tick,
    Tokenize,
    Tokenized,
    Usage,
    WorkerAdded,
    WorkerDown,
    WorkerDraining,
    WorkerRemoved,
    WorkerUp,
)
from omni_proxy.scheduler.admission import Admission
from omni_proxy.scheduler.settings import SchedulingSettings
from tests.core.steps import (
    CLOSED,
    CUT,
    GARBAGE,
    REFUSED,
    SILENT,
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
    status,
    worker,
)

GONE = ErrorCode.CLIENT_GONE


def visited(record: RequestRecord) -> list[Stage]:
    return [stage for stage, _, _ in record.marks]


def to_decode(rid: str, prefill: str, decode: str) -> list[Step]:
    """A sequential request up to its D leg, all other workers idle."""
    return [
        (Arrived(rid, spec()), [start_p(rid, 1, prefill)]),
        (LegSent(p(rid, 1, prefill)), []),
        (PrefillDone(p(rid, 1, prefill), handoff=True), [start_d(rid, 2, decode, prefill)]),
    ]


# ------------------------------------------------------------------------------------------- good days


def test_sequential() -> None:
    core = core_of("p0", "p1", "d0", schedule_mode=Mode.SEQUENTIAL)
    (record,) = run(
        core,
        [
            (At(1.0, Arrived("r", spec(tokenize=True))), [Tokenize("r")]),
            (At(2.0, Tokenized("r", 90, (7,))), [start_p("r", 1, "p0")]),
            (At(3.0, LegSent(p("r", 1, "p0"))), []),
            (At(4.0, PrefillDone(p("r", 1, "p0"), True, usage=Usage(95, 1, 64))), [start_d("r", 2, "d0", "p0")]),
            (At(5.0, LegSent(d("r", 2, "d0"))), []),
            (At(6.0, FirstToken(d("r", 2, "d0"))), []),
            (At(7.0, DecodeDone(d("r", 2, "d0"), Usage(95, 12, 94))), [done("r")]),
        ],
    )
    assert_idle(core)
    assert [(stage, at) for stage, at, _ in record.marks] == [
        (Stage.RECEIVED, 1.0),
        (Stage.TOKENIZING, 1.0),
        (Stage.PREFILL_WAITING, 2.0),
        (Stage.PREFILL_SCHEDULED, 2.0),
        (Stage.PREFILL_RUNNING, 3.0),
        (Stage.DECODE_WAITING, 4.0),
        (Stage.DECODE_SCHEDULED, 4.0),
        (Stage.DECODE_RUNNING, 5.0),
        (Stage.FINISHED, 7.0),
    ]
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (95, 64, 12)
    assert (record.mode, record.prefill_done_at, record.first_token_at) == (Mode.SEQUENTIAL, 4.0, 6.0)
    assert [(x.worker, x.leg) for x in record.placements] == [("p0", "prefill"), ("d0", "decode")]


def test_apc_matching_is_marked_where_prefixes_count() -> None:
    core = core_of("p0", "d0", prefix_aware=True)
    run(
        core,
        [(Arrived("r", spec(tokenize=True)), [Tokenize("r")]), (Tokenized("r", 9, (1, 2)), [start_p("r", 1, "p0")])],
    )
    (record,) = core.records()
    assert Stage.APC_MATCHING in visited(record)


def test_an_empty_index_is_still_the_index() -> None:
    class Empty(NoIndex):
        def __len__(self) -> int:
            return 0

    index = Empty()
    assert Core(CoreSettings(), index)._board.index is index


def test_parallel() -> None:
    core = core_of("p0", "d0", schedule_mode=Mode.PARALLEL)
    (record,) = run(
        core,
        [
            (Arrived("r", spec()), [start_p("r", 1, "p0", "d0"), start_d("r", 2, "d0", "p0")]),
            (At(1.0, LegSent(d("r", 2, "d0"))), []),
            (At(2.0, LegSent(p("r", 1, "p0"))), []),
            (At(3.0, PrefillDone(p("r", 1, "p0"), handoff=False)), []),
            (At(4.0, FirstToken(d("r", 2, "d0"))), []),
            (At(5.0, DecodeDone(d("r", 2, "d0"))), [done("r")]),
        ],
    )
    assert_idle(core)
    assert (record.mode, record.prefill_done_at, record.first_token_at) == (Mode.PARALLEL, 3.0, 4.0)
    assert {Stage.PREFILL_RUNNING, Stage.DECODE_RUNNING} <= set(visited(record))


def test_parallel_answer_overtakes_the_news_of_its_prefill() -> None:
    core = core_of("p0", "d0", schedule_mode=Mode.PARALLEL)
    run(
        core,
        [
            (Arrived("r", spec()), [start_p("r", 1, "p0", "d0"), start_d("r", 2, "d0", "p0")]),
            (DecodeDone(d("r", 2, "d0")), [Abort(p("r", 1, "p0")), done("r")]),
            (PrefillDone(p("r", 1, "p0"), handoff=True), []),
        ],
    )
    assert_idle(core)


def test_aggregated() -> None:
    core = core_of("m0", "m1")
    (record, _) = run(
        core,
        [
            (Arrived("r", spec()), [start_d("r", 1, "m0")]),
            (Arrived("s", spec()), [start_d("s", 1, "m1")]),
            (LegSent(d("r", 1, "m0")), []),
            (FirstToken(d("r", 1, "m0")), []),
            (DecodeDone(d("r", 1, "m0")), [done("r")]),
            (DecodeDone(d("s", 1, "m1")), [done("s")]),
        ],
    )
    assert_idle(core)
    assert record.mode is Mode.AGGREGATED
    assert Stage.PREFILL_WAITING not in visited(record)


def test_prompt_work_of_a_mixed_worker_ends_with_the_first_token() -> None:
    core = core_of("m0")
    run(core, [(Arrived("r", spec(100)), [start_d("r", 1, "m0")])])
    (load,) = core.workers()
    assert load.prefill_tokens == 100
    run(core, [(FirstToken(d("r", 1, "m0")), [])])
    assert (load.prefill_tokens, load.kv_tokens, load.seqs) == (0, 356, 1)


def test_aggregated_by_name_uses_every_worker_that_can() -> None:
    core = core_of("p0", "d0", schedule_mode=Mode.AGGREGATED)
    run(core, [(Arrived("r", spec()), [start_d("r", 1, "d0")]), (Arrived("s", spec()), [start_d("s", 1, "p0")])])


def test_answer_that_ended_with_the_first_token_needs_no_decode() -> None:
    core = core_of("p0", "d0")
    (record,) = run(
        core,
        [
            (Arrived("r", spec(max_tokens=1)), [start_p("r", 1, "p0")]),
            (At(2.0, PrefillDone(p("r", 1, "p0"), handoff=True, ended=True, usage=Usage(100, 1))), [done("r")]),
        ],
    )
    assert_idle(core)
    assert record.first_token_at == 2.0


def test_a_missed_handoff_is_made_good_by_one_worker_alone() -> None:
    core = core_of("p0", "d0")
    (record,) = run(
        core,
        [
            (Arrived("r", spec()), [start_p("r", 1, "p0")]),
            (PrefillDone(p("r", 1, "p0"), handoff=False), [start_d("r", 2, "d0")]),
            (DecodeDone(d("r", 2, "d0")), [done("r")]),
        ],
    )
    assert record.mode is Mode.AGGREGATED
    assert_idle(core)


def test_a_request_for_one_worker_goes_to_a_mixed_one_or_to_d() -> None:
    core = core_of("p0", "d0")
    run(core, [(Arrived("r", spec(whole=True)), [start_d("r", 1, "d0")]), (DecodeDone(d("r", 1, "d0")), [done("r")])])
    run(core, [(WorkerUp(worker("m0")), []), (Arrived("s", spec(whole=True)), [start_d("s", 1, "m0")])])


def test_a_request_for_one_worker_is_refused_where_nobody_can_do_both() -> None:
    core = core_of(*[worker(name, modes=(Mode.PARALLEL,)) for name in ("p0", "d0")])
    run(core, [(Arrived("r", spec(whole=True)), [Ended("r", Outcome.REJECTED, ErrorCode.INVALID_VALUE)])])
    assert_idle(core)


def test_prefill_without_handoff_is_an_error_where_nobody_can_do_both() -> None:
    core = core_of(*[worker(name, modes=(Mode.SEQUENTIAL,)) for name in ("p0", "d0")])
    steps: list[Step] = [
        (Arrived("r", spec()), [start_p("r", 1, "p0")]),
        (PrefillDone(p("r", 1, "p0"), handoff=False), [Ended("r", Outcome.FAILED, ErrorCode.HANDOFF_MISSED)]),
    ]
    run(core, steps)
    assert_idle(core)


def test_a_prompt_that_cannot_be_tokenised_goes_on_with_its_estimate() -> None:
    core = core_of("p0", "d0")
    run(
        core,
        [(Arrived("r", spec(tokenize=True)), [Tokenize("r")]), (Tokenized("r", None), [start_p("r", 1, "p0")])],
    )
    assert next(core.records()).prompt_tokens == 100


# ------------------------------------------------------------------------- stale, double, early messages


def test_messages_of_ended_or_unknown_requests_are_dropped() -> None:
    core = core_of("p0", "d0")
    old_p, old_d = p("r", 1, "p0"), d("r", 2, "d0")
    stale: list[Step] = [
        (LegSent(old_p), []),
        (PrefillDone(old_p, handoff=True), []),
        (LegFailed(old_p, REFUSED), []),
        (FirstToken(old_d), []),
        (DecodeDone(old_d), []),
        (LegFailed(old_d, REFUSED), []),
        (Tokenized("r", 5), []),
        (Cancelled("r"), []),
    ]
    run(core, stale)
    run(core, [*to_decode("r", "p0", "d0"), (DecodeDone(old_d), [done("r")]), *stale])
    assert_idle(core)


def test_messages_of_an_earlier_attempt_are_dropped() -> None:
    core = core_of("p0", "p1", "d0")
    run(
        core,
        [
            (Arrived("r", spec()), [start_p("r", 1, "p0")]),
            (LegFailed(p("r", 1, "p0"), REFUSED), [start_p("r", 2, "p1")]),
            (LegSent(p("r", 1, "p0")), []),
            (PrefillDone(p("r", 1, "p0"), handoff=True), []),
            (LegFailed(p("r", 1, "p0"), CLOSED), []),
            (PrefillDone(p("r", 2, "p1"), handoff=True), [start_d("r", 3, "d0", "p1")]),
            (PrefillDone(p("r", 2, "p1"), handoff=True), []),
        ],
    )


def test_a_leg_is_sent_once_however_often_it_is_told() -> None:
    core = core_of("p0", "d0")
    lease = p("r", 1, "p0")
    run(core, [(Arrived("r", spec()), [start_p("r", 1, "p0")]), (LegSent(lease), []), (LegSent(lease), [])])
    assert visited(next(core.records())).count(Stage.PREFILL_RUNNING) == 1


@pytest.mark.parametrize("mode", list(Mode))
def test_an_answer_may_overtake_the_news_that_its_leg_was_sent(mode: Mode) -> None:
    core = core_of("p0", "d0", "m0", schedule_mode=mode)
    core.handle(Arrived("r", spec()), 0.0)
    records: list[RequestRecord] = []
    while not records:
        (request,) = core._board.requests.values()
        answer = (
            DecodeDone(request.decode_lease)
            if request.prefill_lease is None and request.decode_lease is not None
            else PrefillDone(request.prefill_lease or d("", 0, ""), handoff=True)
        )
        records = [e.record for e in core.handle(answer, 1.0) if isinstance(e, Close)]
        core.check()
    assert Stage.DECODE_RUNNING in visited(records[0])
    assert (Stage.PREFILL_RUNNING in visited(records[0])) is (mode is not Mode.AGGREGATED)
    assert_idle(core)


def test_only_the_decode_leg_brings_the_first_token() -> None:
    core = core_of("p0", "d0")
    run(core, [(Arrived("r", spec()), [start_p("r", 1, "p0")]), (FirstToken(p("r", 1, "p0")), [])])
    assert next(core.records()).first_token_at is None


def test_a_doubled_id_is_our_fault_and_harms_nobody() -> None:
    core = core_of("p0", "d0")
    run(core, to_decode("r", "p0", "d0"))
    with pytest.raises(AssertionError, match="twice"):
        core.handle(Arrived("r", spec()), 0.0)
    run(core, [(DecodeDone(d("r", 2, "d0")), [done("r")])])
    assert_idle(core)


# -------------------------------------------------------------------------------------------- cancels


def test_cancel_while_tokenizing() -> None:
    core = core_of("p0", "d0")
    run(
        core,
        [
            (Arrived("r", spec(tokenize=True)), [Tokenize("r")]),
            (Cancelled("r"), [Ended("r", Outcome.CANCELLED, GONE)]),
            (Tokenized("r", 5), []),
        ],
    )
    assert_idle(core)


def test_cancel_while_waiting_for_prefill_and_the_next_one_goes() -> None:
    core = core_of(worker("p0", max_seqs=1), "d0")
    run(
        core,
        [
            (Arrived("a", spec()), [start_p("a", 1, "p0")]),
            (Arrived("b", spec()), []),
            (Arrived("c", spec()), []),
            (Cancelled("b"), [Ended("b", Outcome.CANCELLED, GONE)]),
            (Cancelled("a"), [Abort(p("a", 1, "p0")), Ended("a", Outcome.CANCELLED, GONE), start_p("c", 1, "p0")]),
        ],
    )


def test_cancel_on_the_prefill_worker() -> None:
    core = core_of("p0", "d0")
    end: list[Effect | Ended] = [Abort(p("r", 1, "p0")), Ended("r", Outcome.CANCELLED, GONE)]
    run(core, [(Arrived("r", spec()), [start_p("r", 1, "p0")]), (LegSent(p("r", 1, "p0")), []), (Cancelled("r"), end)])
    assert_idle(core)


def test_cancel_between_prefill_and_decode() -> None:
    core = core_of("p0", worker("d0", max_seqs=1))
    run(
        core,
        [
            *to_decode("a", "p0", "d0"),
            (Arrived("b", spec()), [start_p("b", 1, "p0")]),
            (PrefillDone(p("b", 1, "p0"), handoff=True), []),
            (Cancelled("b"), [Ended("b", Outcome.CANCELLED, GONE)]),
            (DecodeDone(d("a", 2, "d0")), [done("a")]),
        ],
    )
    assert_idle(core)


@pytest.mark.parametrize("told", [0, 1, 2])
def test_cancel_on_the_decode_worker(told: int) -> None:
    core = core_of("p0", "d0")
    lease = d("r", 2, "d0")
    heard: list[Step] = [(LegSent(lease), []), (FirstToken(lease), [])]
    end: list[Effect | Ended] = [Abort(lease), Ended("r", Outcome.CANCELLED, GONE)]
    run(core, [*to_decode("r", "p0", "d0"), *heard[:told], (Cancelled("r"), end)])
    assert_idle(core)


@pytest.mark.parametrize("prefilled", [False, True])
def test_cancel_in_parallel_ends_what_runs(prefilled: bool) -> None:
    core = core_of("p0", "d0", schedule_mode=Mode.PARALLEL)
    run(core, [(Arrived("r", spec()), [start_p("r", 1, "p0", "d0"), start_d("r", 2, "d0", "p0")])])
    aborts: list[Effect] = [Abort(p("r", 1, "p0")), Abort(d("r", 2, "d0"))]
    if prefilled:
        run(core, [(PrefillDone(p("r", 1, "p0"), handoff=True), [])])
        del aborts[0]
    run(core, [(Cancelled("r"), [*aborts, Ended("r", Outcome.CANCELLED, GONE)])])
    assert_idle(core)


def test_a_lost_front_takes_its_requests_with_it_and_starts_none_of_them() -> None:
    core = core_of(worker("p0", max_seqs=1), "d0")
    run(
        core,
        [
            (Arrived("f1-a", spec()), [start_p("f1-a", 1, "p0")]),
            (Arrived("f1-b", spec()), []),
            (Arrived("f2-c", spec()), []),
            (
                FrontLost("f1-"),
                [
                    Abort(p("f1-a", 1, "p0")),
                    Ended("f1-a", Outcome.CANCELLED, GONE),
                    Ended("f1-b", Outcome.CANCELLED, GONE),
                    start_p("f2-c", 1, "p0"),
                ],
            ),
        ],
    )


# -------------------------------------------------------------------------------------------- retries


@pytest.mark.parametrize("failure", [REFUSED, status(503), status(429)])
def test_prefill_is_tried_on_another_worker_when_nothing_was_processed(failure: Failure) -> None:
    core = core_of("p0", "p1", "d0")
    (record,) = run(
        core,
        [
            (Arrived("r", spec()), [start_p("r", 1, "p0")]),
            (LegFailed(p("r", 1, "p0"), failure), [start_p("r", 2, "p1")]),
            (PrefillDone(p("r", 2, "p1"), handoff=True), [start_d("r", 3, "d0", "p1")]),
            (DecodeDone(d("r", 3, "d0")), [done("r")]),
        ],
    )
    assert_idle(core)
    assert visited(record).count(Stage.PREFILL_WAITING) == 2


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (CLOSED, ErrorCode.WORKER_CLOSED),
        (SILENT, ErrorCode.WORKER_TIMEOUT),
        (GARBAGE, ErrorCode.WORKER_GARBAGE),
        (status(400), ErrorCode.WORKER_ERROR),
        (status(500), ErrorCode.WORKER_ERROR),
    ],
)
def test_prefill_that_may_have_been_processed_fails(failure: Failure, code: ErrorCode) -> None:
    core = core_of("p0", "p1", "d0")
    end = Ended("r", Outcome.FAILED, code, p("r", 1, "p0"))
    run(core, [(Arrived("r", spec()), [start_p("r", 1, "p0")]), (LegFailed(p("r", 1, "p0"), failure), [end])])
    assert_idle(core)


def test_retries_are_bounded() -> None:
    core = core_of("p0", "d0", retries=RetryPolicy(max_retries=2))
    steps: list[Step] = [(Arrived("r", spec()), [start_p("r", 1, "p0")])]
    steps += [(LegFailed(p("r", n, "p0"), REFUSED), [start_p("r", n + 1, "p0")]) for n in (1, 2)]
    end = Ended("r", Outcome.FAILED, ErrorCode.WORKER_UNREACHABLE, p("r", 3, "p0"))
    run(core, [*steps, (LegFailed(p("r", 3, "p0"), REFUSED), [end])])
    assert_idle(core)


@pytest.mark.parametrize("failure", [REFUSED, CLOSED, status(503)])
def test_decode_that_fails_before_its_first_byte_starts_over(failure: Failure) -> None:
    core = core_of("p0", "d0", "d1")
    (record,) = run(
        core,
        [
            (Arrived("r", spec()), [start_p("r", 1, "p0")]),
            (At(1.0, PrefillDone(p("r", 1, "p0"), True, usage=Usage(100, 1, 0))), [start_d("r", 2, "d0", "p0")]),
            (At(2.0, LegFailed(d("r", 2, "d0"), failure)), [start_p("r", 3, "p0")]),
            (At(3.0, PrefillDone(p("r", 3, "p0"), True, usage=Usage(100, 1, 96))), [start_d("r", 4, "d1", "p0")]),
            (At(4.0, DecodeDone(d("r", 4, "d1"))), [done("r")]),
        ],
    )
    assert_idle(core)
    assert (record.prefill_done_at, record.cached_tokens) == (3.0, 96)


def test_handoff_is_used_again_where_the_protocol_allows_it() -> None:
    reusable = {"handoff_reusable": True}
    core = core_of("p0", worker("d0", **reusable), worker("d1", **reusable))
    run(
        core,
        [
            *to_decode("r", "p0", "d0"),
            (LegFailed(d("r", 2, "d0"), REFUSED), [start_d("r", 3, "d1", "p0")]),
            (LegFailed(d("r", 3, "d1"), CLOSED), [start_p("r", 4, "p0")]),
        ],
    )


@pytest.mark.parametrize("failure", [CUT, SILENT, GARBAGE, status(400), status(500)])
def test_decode_failure_that_the_client_must_see(failure: Failure) -> None:
    core = core_of("p0", "d0", "d1")
    run(core, to_decode("r", "p0", "d0"))
    (close,) = core.handle(LegFailed(d("r", 2, "d0"), failure), 0.0)
    assert isinstance(close, Close)
    assert (close.outcome, close.failed) == (Outcome.FAILED, d("r", 2, "d0"))
    assert_idle(core)


def test_nothing_is_retried_after_the_first_token() -> None:
    core = core_of("p0", "d0", "d1")
    end = Ended("r", Outcome.FAILED, ErrorCode.WORKER_CLOSED, d("r", 2, "d0"))
    lease = d("r", 2, "d0")
    run(core, [*to_decode("r", "p0", "d0"), (FirstToken(lease), []), (LegFailed(lease, CLOSED), [end])])
    assert_idle(core)


def test_an_aggregated_leg_that_may_have_been_processed_is_not_sent_twice() -> None:
    core = core_of("m0", "m1")
    run(
        core,
        [
            (Arrived("r", spec()), [start_d("r", 1, "m0")]),
            (LegFailed(d("r", 1, "m0"), REFUSED), [start_d("r", 2, "m1")]),
            (
                LegFailed(d("r", 2, "m1"), CLOSED),
                [Ended("r", Outcome.FAILED, ErrorCode.WORKER_CLOSED, d("r", 2, "m1"))],
            ),
        ],
    )
    assert_idle(core)


def test_parallel_prefill_failure_ends_decode_at_once() -> None:
    core = core_of("p0", "d0", schedule_mode=Mode.PARALLEL)
    run(
        core,
        [
            (Arrived("r", spec()), [start_p("r", 1, "p0", "d0"), start_d("r", 2, "d0", "p0")]),
            (
                LegFailed(p("r", 1, "p0"), status(500)),
                [Abort(d("r", 2, "d0")), Ended("r", Outcome.FAILED, ErrorCode.WORKER_ERROR, p("r", 1, "p0"))],
            ),
            (LegFailed(d("r", 2, "d0"), CLOSED), []),
        ],
    )
    assert_idle(core)


def test_parallel_pair_starts_over_together() -> None:
    core = core_of("p0", "p1", "d0", "d1", schedule_mode=Mode.PARALLEL)
    run(
        core,
        [
            (Arrived("r", spec()), [start_p("r", 1, "p0", "d0"), start_d("r", 2, "d0", "p0")]),
            (LegSent(d("r", 2, "d0")), []),
            (
                LegFailed(p("r", 1, "p0"), REFUSED),
                [Abort(d("r", 2, "d0")), start_p("r", 3, "p1", "d1"), start_d("r", 4, "d1", "p1")],
            ),
            (PrefillDone(p("r", 3, "p1"), handoff=True), []),
            (
                LegFailed(d("r", 4, "d1"), REFUSED),
                [start_p("r", 5, "p1", "d0"), start_d("r", 6, "d0", "p1")],
            ),
            (DecodeDone(d("r", 6, "d0")), [Abort(p("r", 5, "p1")), done("r")]),
        ],
    )
    assert_idle(core)


def test_a_retry_goes_first() -> None:
    core = core_of(worker("p0", max_seqs=1), "d0")
    run(
        core,
        [
            (Arrived("a", spec()), [start_p("a", 1, "p0")]),
            (Arrived("b", spec()), []),
            (LegFailed(p("a", 1, "p0"), REFUSED), [start_p("a", 2, "p0")]),
        ],
    )


def test_a_leg_that_fails_when_the_mode_has_changed_starts_over_in_the_new_one() -> None:
    core = core_of("p0", "d0", "m0")
    run(
        core,
        [
            (Arrived("r", spec()), [start_p("r", 1, "p0")]),
            (WorkerDown("p0", "died"), []),
            (LegFailed(p("r", 1, "p0"), REFUSED), [start_d("r", 2, "m0")]),
            (DecodeDone(d("r", 2, "m0")), [done("r")]),
        ],
    )
    assert_idle(core)


# ---------------------------------------------------------------------------- waiting, limits, deadlines


def test_prompts_wait_for_room_in_order() -> None:
    core = core_of(worker("p0", max_batch_tokens=250), "d0", scheduling=SchedulingSettings(order="fcfs"))
    run(
        core,
        [
            (Arrived("a", spec(100)), [start_p("a", 1, "p0")]),
            (Arrived("b", spec(200)), []),
            (Arrived("c", spec(50)), []),
            (PrefillDone(p("a", 1, "p0"), handoff=True), [start_d("a", 2, "d0", "p0"), start_p("b", 1, "p0")]),
            (PrefillDone(p("b", 1, "p0"), handoff=True), [start_d("b", 2, "d0", "p0"), start_p("c", 1, "p0")]),
        ],
    )


def test_a_prompt_larger_than_the_allowance_goes_to_an_idle_worker() -> None:
    core = core_of(worker("p0", max_batch_tokens=50), "d0")
    run(core, [(Arrived("a", spec(100)), [start_p("a", 1, "p0")]), (Arrived("b", spec(10)), [])])


def test_one_model_waits_and_the_other_goes_on() -> None:
    core = core_of(worker("p0", models=("a",), max_seqs=1), worker("p1", models=("b",)), "d0")
    run(
        core,
        [
            (Arrived("a1", spec(model="a")), [start_p("a1", 1, "p0")]),
            (Arrived("a2", spec(model="a")), []),
            (Arrived("b1", spec(model="b")), [start_p("b1", 1, "p1")]),
        ],
    )


def test_models_that_share_workers_take_turns_by_waiting_time() -> None:
    core = core_of(worker("p0", max_seqs=1), "d0")
    run(
        core,
        [
            (Arrived("z", spec(model="zz")), [start_p("z", 1, "p0")]),
            (Arrived("z2", spec(model="zz")), []),
            (Arrived("a", spec(model="aa")), []),
            (Cancelled("z"), [Abort(p("z", 1, "p0")), Ended("z", Outcome.CANCELLED, GONE), start_p("z2", 1, "p0")]),
            (Cancelled("z2"), [Abort(p("z2", 1, "p0")), Ended("z2", Outcome.CANCELLED, GONE), start_p("a", 1, "p0")]),
        ],
    )


def test_decode_waits_for_kv_room_and_one_group_does_not_block_another() -> None:
    one, two = {"group": "1"}, {"group": "2"}
    core = core_of(worker("p1", **one), worker("d1", **one, max_seqs=1), worker("p2", **two), worker("d2", **two))
    run(
        core,
        [
            (Arrived("a", spec()), [start_p("a", 1, "p1")]),
            (Arrived("b", spec()), [start_p("b", 1, "p2")]),
            (Arrived("c", spec()), [start_p("c", 1, "p1")]),
            (PrefillDone(p("a", 1, "p1"), handoff=True), [start_d("a", 2, "d1", "p1")]),
            (PrefillDone(p("c", 1, "p1"), handoff=True), []),
            (PrefillDone(p("b", 1, "p2"), handoff=True), [start_d("b", 2, "d2", "p2")]),
            (DecodeDone(d("a", 2, "d1")), [done("a"), start_d("c", 2, "d1", "p1")]),
        ],
    )


def test_parallel_takes_the_pair_that_has_room_on_both_sides() -> None:
    one, two = {"group": "1"}, {"group": "2"}
    core = core_of(
        worker("p1", **one),
        worker("d1", **one, max_seqs=1),
        worker("p2", **two),
        worker("d2", **two, max_seqs=1),
        schedule_mode=Mode.PARALLEL,
    )
    run(
        core,
        [
            (Arrived("a", spec(9)), [start_p("a", 1, "p1", "d1"), start_d("a", 2, "d1", "p1")]),
            (PrefillDone(p("a", 1, "p1"), handoff=True), []),
            (Arrived("b", spec(9)), [start_p("b", 1, "p2", "d2"), start_d("b", 2, "d2", "p2")]),
            (Arrived("c", spec(9)), []),
        ],
    )
    assert [w.prefill_tokens for w in core.workers()] == [0, 0, 0, 9]


def test_a_wait_is_over_at_its_deadline() -> None:
    core = core_of(worker("p0", max_seqs=1), worker("d0", max_seqs=1), queue_timeout_s=60.0)
    run(
        core,
        [
            (Arrived("a", spec()), [start_p("a", 1, "p0")]),
            (At(1.0, PrefillDone(p("a", 1, "p0"), handoff=True)), [start_d("a", 2, "d0", "p0")]),
            (At(2.0, Arrived("b", spec())), [start_p("b", 1, "p0")]),
            (At(3.0, Arrived("c", spec())), []),
            (At(4.0, PrefillDone(p("b", 1, "p0"), handoff=True)), [start_p("c", 1, "p0")]),
            (At(5.0, Arrived("e", spec())), []),
        ],
    )
    assert core.next_wakeup() == 64.0
    run(core, [(At(63.9, Tick()), [])])
    timed_out = ErrorCode.QUEUE_TIMEOUT
    run(core, [(At(64.0, Tick()), [Ended("b", Outcome.TIMED_OUT, timed_out)])])
    assert core.next_wakeup() == 65.0
    run(core, [(At(70.0, Tick()), [Ended("e", Outcome.TIMED_OUT, timed_out)])])
    assert core.next_wakeup() is None


def test_no_worker_at_all() -> None:
    core = core_of()
    end = Ended("r", Outcome.REJECTED, ErrorCode.MODEL_NOT_FOUND)
    run(core, [(Arrived("r", spec()), [end])])
    assert not core.ready()
    assert_idle(core)


@pytest.mark.parametrize("names", [("p0",), ("d0",), ("p0", "p1")])
def test_one_side_alone_serves_nobody(names: tuple[str, ...]) -> None:
    core = core_of(*names, no_worker_timeout_s=10.0)
    assert not core.ready()
    run(core, [(Arrived("r", spec()), [])])
    assert core.next_wakeup() == 10.0
    run(core, [(At(10.0, Tick()), [Ended("r", Outcome.TIMED_OUT, ErrorCode.NO_WORKER)])])
    assert_idle(core)


def test_a_pair_of_different_groups_is_no_pair() -> None:
    core = core_of(worker("p0", group="1"), worker("d0", group="2"))
    assert not core.ready()
    run(core, [(Arrived("r", spec()), [])])


def test_halves_of_different_groups_are_not_ready_together() -> None:
    names = [("p1", "1"), ("d1", "1"), ("p2", "2"), ("d2", "2")]
    core = core_of(*(worker(name, group=group) for name, group in names))
    run(core, [(WorkerDown("d1", "x"), []), (WorkerDown("p2", "x"), []), (Arrived("r", spec()), [])])
    assert not core.ready()


def test_a_request_that_waits_for_a_worker_goes_when_one_comes() -> None:
    core = core_of("p0")
    run(
        core,
        [
            (WorkerAdded(worker("d0")), []),
            (Arrived("r", spec()), []),
            (WorkerUp(worker("d0")), [start_p("r", 1, "p0")]),
        ],
    )
    assert core.ready()


def test_what_is_missing_is_named_without_strangers() -> None:
    core = core_of(worker("p9", models=("other",)))
    run(core, [(WorkerAdded(worker("p0")), []), (WorkerDown("p9", "x"), []), (Arrived("r", spec()), [])])
    (close,) = core.handle(Tick(), 99.0)
    assert isinstance(close, Close)
    assert close.detail == "No worker can serve 'm' now; not usable: p0 (not seen yet)."


# ------------------------------------------------------------------------------------------- admission


def test_unknown_model() -> None:
    core = core_of(worker("p0", models=("a",)), worker("d0", models=("a",)))
    run(core, [(Arrived("r", spec(model="b")), [Ended("r", Outcome.REJECTED, ErrorCode.MODEL_NOT_FOUND)])])


def test_prompt_longer_than_every_context() -> None:
    core = core_of(worker("p0", max_model_len=1000), worker("d0", max_model_len=50))
    end = Ended("r", Outcome.REJECTED, ErrorCode.CONTEXT_LENGTH_EXCEEDED)
    run(
        core,
        [
            (Arrived("r", spec(1, tokenize=True)), [Tokenize("r")]),
            (Tokenized("r", 50), [end]),
            (Arrived("s", spec(1, tokenize=True)), [Tokenize("s")]),
            (Tokenized("s", 49), [start_p("s", 1, "p0")]),
        ],
    )


def test_a_long_prompt_goes_where_it_fits() -> None:
    core = core_of(worker("p0", max_model_len=50), worker("p1", max_model_len=5000), "d0")
    run(core, [(Arrived("r", spec(50)), [start_p("r", 1, "p1")]), (Arrived("s", spec(49)), [start_p("s", 1, "p0")])])


def test_the_queue_is_bounded_in_requests() -> None:
    core = core_of(worker("p0", max_seqs=1), "d0", admission=Admission(max_waiting_requests=1))
    full = ErrorCode.QUEUE_FULL
    run(
        core,
        [
            (Arrived("a", spec()), [start_p("a", 1, "p0")]),
            (Arrived("b", spec()), []),
            (Arrived("c", spec()), [Ended("c", Outcome.REJECTED, full)]),
            (Arrived("t", spec(tokenize=True)), [Ended("t", Outcome.REJECTED, full)]),
        ],
    )
    (close,) = core.handle(Arrived("x", spec()), 0.0)
    assert isinstance(close, Close)
    assert close.retry_after_s == 1.0


def test_without_a_queue_requests_still_run() -> None:
    core = core_of(worker("p0", max_seqs=1), "d0", admission=Admission(max_waiting_requests=0))
    run(
        core,
        [
            (Arrived("a", spec()), [start_p("a", 1, "p0")]),
            (Arrived("b", spec()), [Ended("b", Outcome.REJECTED, ErrorCode.QUEUE_FULL)]),
        ],
    )


def test_a_full_queue_of_one_model_refuses_nobody_who_can_start() -> None:
    core = core_of(
        worker("p0", models=("a",), max_seqs=1),
        worker("p1", models=("b",)),
        "d0",
        admission=Admission(max_waiting_requests=1),
    )
    run(
        core,
        [
            (Arrived("a1", spec(model="a")), [start_p("a1", 1, "p0")]),
            (Arrived("a2", spec(model="a")), []),
            (Arrived("b1", spec(model="b")), [start_p("b1", 1, "p1")]),
        ],
    )


def test_the_queue_is_bounded_in_tokens() -> None:
    core = core_of(worker("p0", max_seqs=1), "d0", admission=Admission(max_waiting_tokens=500))
    run(
        core,
        [
            (Arrived("a", spec()), [start_p("a", 1, "p0")]),
            (Arrived("b", spec(400)), []),
            (Arrived("c", spec(101)), [Ended("c", Outcome.REJECTED, ErrorCode.QUEUE_FULL)]),
            (Arrived("e", spec(100)), []),
        ],
    )


# ------------------------------------------------------------------------------------------ membership


def test_a_draining_worker_gets_nothing_new_and_its_kv_is_still_pulled() -> None:
    core = core_of("p0", "p1", "d0", "d1")
    run(
        core,
        [
            (Arrived("a", spec()), [start_p("a", 1, "p0")]),
            (WorkerDraining("p0"), []),
            (WorkerDraining("d0"), []),
            (Arrived("b", spec()), [start_p("b", 1, "p1")]),
            (PrefillDone(p("a", 1, "p0"), handoff=True), [start_d("a", 2, "d1", "p0")]),
            (WorkerUp(worker("d0")), []),
            (PrefillDone(p("b", 1, "p1"), handoff=True), [start_d("b", 2, "d0", "p1")]),
        ],
    )


def test_kv_of_the_last_prefill_worker_of_a_group_is_pulled_while_it_drains() -> None:
    names = [("p1", "1"), ("d1", "1"), ("p2", "2"), ("d2", "2")]
    core = core_of(*(worker(name, group=group) for name, group in names))
    run(
        core,
        [
            (Arrived("a", spec()), [start_p("a", 1, "p1")]),
            (WorkerDraining("p1"), []),
            (PrefillDone(p("a", 1, "p1"), handoff=True), [start_d("a", 2, "d1", "p1")]),
        ],
    )


def test_a_removed_worker_takes_its_counters_with_it() -> None:
    core = core_of("p0", "d0")
    run(
        core,
        [
            (Arrived("a", spec(100)), [start_p("a", 1, "p0")]),
            (WorkerRemoved("p0"), []),
            (WorkerUp(worker("p0")), []),
            (Arrived("b", spec(7)), [start_p("b", 1, "p0")]),
        ],
    )
    assert core._board.ledger.get("p0") is not None
    assert [w.prefill_tokens for w in core.workers()] == [0, 7]
    run(
        core,
        [(LegFailed(p("a", 1, "p0"), SILENT), [Ended("a", Outcome.FAILED, ErrorCode.WORKER_TIMEOUT, p("a", 1, "p0"))])],
    )
    fresh = core._board.ledger.get("p0")
    assert fresh is not None
    assert (fresh.prefill_tokens, fresh.seqs, fresh.ejected_until) == (7, 1, 0.0)


def test_kv_of_a_removed_worker_is_computed_again() -> None:
    core = core_of("p0", worker("d0", max_seqs=1))
    run(
        core,
        [
            *to_decode("a", "p0", "d0"),
            (Arrived("b", spec()), [start_p("b", 1, "p0")]),
            (PrefillDone(p("b", 1, "p0"), handoff=True), []),
            (WorkerRemoved("p0"), []),
            (WorkerUp(worker("p0")), [start_p("b", 2, "p0")]),
            (PrefillDone(p("b", 2, "p0"), handoff=True), []),
            (DecodeDone(d("a", 2, "d0")), [done("a"), start_d("b", 3, "d0", "p0")]),
            (DecodeDone(d("b", 3, "d0")), [done("b")]),
        ],
    )
    assert_idle(core)


def test_an_answer_of_a_worker_that_was_removed_meanwhile_is_of_no_use() -> None:
    core = core_of("p0", "p1", "d0")
    run(
        core,
        [
            (Arrived("a", spec()), [start_p("a", 1, "p0")]),
            (WorkerRemoved("p0"), []),
            (PrefillDone(p("a", 1, "p0"), handoff=True), [start_p("a", 2, "p1")]),
        ],
    )


def test_a_removed_worker_ends_no_handoff_that_is_under_way() -> None:
    core = core_of("p0", worker("d0", handoff_reusable=True), "p1", "d1")
    run(
        core,
        [
            *to_decode("a", "p0", "d0"),
            (WorkerRemoved("p0"), []),
            (LegFailed(d("a", 2, "d0"), REFUSED), [start_p("a", 3, "p1")]),
        ],
    )


def test_waiting_requests_follow_the_mode_of_their_pool() -> None:
    core = core_of(worker("p0", max_seqs=1), "d0")
    run(
        core,
        [
            (Arrived("a", spec()), [start_p("a", 1, "p0")]),
            (Arrived("b", spec()), []),
            (WorkerUp(worker("m0")), []),
            (WorkerDown("d0", "died"), [start_d("b", 1, "m0")]),
            (WorkerUp(worker("m0", max_seqs=1)), []),
            (Arrived("c", spec()), []),
            (WorkerUp(worker("d0")), []),
            (PrefillDone(p("a", 1, "p0"), handoff=True), [start_d("a", 2, "d0", "p0"), start_p("c", 1, "p0")]),
        ],
    )


def test_a_wait_keeps_its_deadline_when_the_mode_changes() -> None:
    core = core_of(worker("p0", max_seqs=0), "d0", worker("m0", max_seqs=0), queue_timeout_s=60.0)
    run(core, [(Arrived("a", spec()), []), (At(30.0, WorkerDown("d0", "died")), [])])
    assert core.next_wakeup() == 60.0


def test_kv_that_nobody_can_pull_any_more_is_given_up_when_others_can_serve() -> None:
    core = core_of("p0", worker("d0", max_seqs=1), worker("p2", group="2"), worker("d2", group="2"))
    run(
        core,
        [
            (Arrived("a", spec()), [start_p("a", 1, "p0")]),
            (Arrived("b", spec()), [start_p("b", 1, "p2")]),
            (Arrived("c", spec()), [start_p("c", 1, "p0")]),
            (PrefillDone(p("a", 1, "p0"), handoff=True), [start_d("a", 2, "d0", "p0")]),
            (PrefillDone(p("c", 1, "p0"), handoff=True), []),
            (WorkerDown("d0", "died"), []),
            (WorkerRemoved("d0"), [start_p("c", 2, "p2")]),
        ],
    )


def test_sequential_kv_waits_for_its_decode_side_while_mixed_workers_serve() -> None:
    core = core_of("p0", "d0", "m0")
    run(
        core,
        [
            (Arrived("a", spec()), [start_p("a", 1, "p0")]),
            (WorkerDown("d0", "died"), []),
            (PrefillDone(p("a", 1, "p0"), handoff=True), []),
            (Arrived("b", spec()), [start_d("b", 1, "m0")]),
            (WorkerUp(worker("d0")), [start_d("a", 2, "d0", "p0")]),
        ],
    )


def test_losing_every_worker_ends_what_waits_and_what_runs_in_bounded_time() -> None:
    core = core_of(worker("p0", max_seqs=1), "d0")
    run(
        core,
        [
            (Arrived("a", spec()), [start_p("a", 1, "p0")]),
            (Arrived("b", spec()), []),
            (WorkerRemoved("p0"), []),
            (WorkerRemoved("d0"), []),
            (
                LegFailed(p("a", 1, "p0"), REFUSED),
                [Ended("a", Outcome.FAILED, ErrorCode.WORKER_UNREACHABLE, p("a", 1, "p0"))],
            ),
            (At(60.0, Tick()), [Ended("b", Outcome.TIMED_OUT, ErrorCode.NO_WORKER)]),
        ],
    )
    assert_idle(core)


# ------------------------------------------------------------------------------------- passive ejection


def test_a_failing_worker_attracts_no_load() -> None:
    core = core_of("p0", "p1", "d0", fail_timeout_s=10.0)
    run(
        core,
        [
            (Arrived("a", spec()), [start_p("a", 1, "p0")]),
            (LegFailed(p("a", 1, "p0"), REFUSED), [start_p("a", 2, "p1")]),
            (PrefillDone(p("a", 2, "p1"), True), [start_d("a", 3, "d0", "p1")]),
            (At(0.1, Arrived("b", spec())), [start_p("b", 1, "p1")]),
            (At(0.2, PrefillDone(p("b", 1, "p1"), True)), [start_d("b", 2, "d0", "p1")]),
            (At(9.9, Arrived("c", spec())), [start_p("c", 1, "p1")]),
            (At(10.0, Arrived("e", spec())), [start_p("e", 1, "p0")]),
        ],
    )


def test_the_last_resort_is_an_ejected_worker() -> None:
    core = core_of("p0", "d0")
    run(
        core,
        [
            (Arrived("a", spec()), [start_p("a", 1, "p0")]),
            (
                LegFailed(p("a", 1, "p0"), SILENT),
                [Ended("a", Outcome.FAILED, ErrorCode.WORKER_TIMEOUT, p("a", 1, "p0"))],
            ),
            (Arrived("b", spec()), [start_p("b", 1, "p0")]),
        ],
    )


def test_a_worker_that_is_trusted_again_takes_what_waits() -> None:
    core = core_of("p0", worker("p1", max_seqs=1), "d0", fail_timeout_s=10.0)
    failed = Ended("a", Outcome.FAILED, ErrorCode.WORKER_TIMEOUT, p("a", 1, "p0"))
    run(
        core,
        [
            (Arrived("a", spec()), [start_p("a", 1, "p0")]),
            (Arrived("b", spec()), [start_p("b", 1, "p1")]),
            (At(1.0, LegFailed(p("a", 1, "p0"), SILENT)), [failed]),
            (At(2.0, Arrived("c", spec())), []),
        ],
    )
    assert core.next_wakeup() == 11.0
    run(core, [(At(11.0, Tick()), [start_p("c", 1, "p0")])])
    assert core.next_wakeup() is None


@pytest.mark.parametrize("failure", [status(400), status(404), status(429), status(503)])
def test_neither_clients_nor_busy_engines_eject_a_worker(failure: Failure) -> None:
    core = core_of("p0", "d0", retries=RetryPolicy(max_retries=0))
    core.handle(Arrived("a", spec()), 0.0)
    core.handle(LegFailed(p("a", 1, "p0"), failure), 0.0)
    assert all(w.usable(0.0) for w in core.workers())


def test_roles_can_be_changed_by_a_new_description() -> None:
    core = core_of("p0", "d0")
    run(
        core,
        [
            (WorkerUp(worker("p0", role=Role.DECODE)), []),
            (Arrived("a", spec()), []),
            (WorkerUp(worker("d0", role=Role.PREFILL)), [start_p("a", 1, "d0")]),
            (PrefillDone(p("a", 1, "d0"), handoff=True), [start_d("a", 2, "p0", "d0")]),
        ],
    )


def test_adopted_legs_go_on_under_their_leases() -> None:
    core = core_of("p0", "d0")
    run(
        core,
        [
            (Adopted("a", spec(), p("a", 3, "p0"), None), []),
            (Adopted("b", spec(), None, d("b", 2, "d0"), "p0"), []),
            (Adopted("c", spec(), None, d("c", 1, "d0"), None, True), []),
            (PrefillDone(p("a", 3, "p0"), handoff=True), [start_d("a", 4, "d0", "p0")]),
            (DecodeDone(d("a", 4, "d0")), [done("a")]),
            (FirstToken(d("b", 2, "d0")), []),
            (DecodeDone(d("b", 2, "d0")), [done("b")]),
            (Cancelled("c"), [Abort(d("c", 1, "d0")), Ended("c", Outcome.CANCELLED, ErrorCode.CLIENT_GONE)]),
        ],
    )
    assert_idle(core)


def test_an_adopted_pair_is_parallel() -> None:
    core = core_of("p0", "d0")
    (record,) = run(
        core,
        [
            (Adopted("a", spec(), p("a", 1, "p0"), d("a", 2, "d0")), []),
            (PrefillDone(p("a", 1, "p0"), handoff=True), []),
            (DecodeDone(d("a", 2, "d0")), [done("a")]),
        ],
    )
    assert record.mode is Mode.PARALLEL


def test_a_request_of_a_worker_that_is_no_member_cannot_be_adopted() -> None:
    core = core_of("p0", "d0")
    ended = Ended("a", Outcome.FAILED, ErrorCode.NO_WORKER)
    run(core, [(Adopted("a", spec(), None, d("a", 2, "gone"), "p0"), [Abort(d("a", 2, "gone")), ended])])
    assert_idle(core)


def test_a_prompt_goes_where_its_answer_can_be_made() -> None:
    one, two = {"group": "1"}, {"group": "2"}
    core = core_of(worker("p1", **one), worker("d1", **one, max_seqs=1), worker("p2", **two), worker("d2", **two))
    run(
        core,
        [
            (Arrived("a", spec()), [start_p("a", 1, "p1")]),
            (PrefillDone(p("a", 1, "p1"), handoff=True), [start_d("a", 2, "d1", "p1")]),
            (Arrived("b", spec()), [start_p("b", 1, "p2")]),
            (Arrived("c", spec()), [start_p("c", 1, "p2")]),  # p1 is idle, but d1 is full
        ],
    )
