"""KV that P keeps: asked for while its lease lasts and by its own request only; load until it is freed (C7, C8)."""

from __future__ import annotations

import pytest

from omni_proxy.core import Core
from omni_proxy.errors import ErrorCode
from omni_proxy.lifecycle.retries import RetryPolicy
from omni_proxy.messages import (
    Abort,
    Arrived,
    Cancelled,
    DecodeDone,
    Effect,
    FirstToken,
    LegFailed,
    Outcome,
    PrefillDone,
    Tick,
    WorkerDown,
    WorkerRemoved,
    WorkerSpec,
)
from tests.core.steps import (
    LATE,
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


def leased(name: str = "p0", **more: object) -> WorkerSpec:
    return worker(name, **{"kv_lease_s": 30.0, **more})


def held(core: Core, name: str = "p0") -> tuple[int, int]:
    """All KV that a worker holds for us, and what of it nobody will pull."""
    (load,) = (w for w in core.workers() if w.name == name)
    return load.kv_tokens, load.stranded_tokens


def answered(until: float | None = 27.0) -> list[Step]:
    """P has answered at 0, and D is asked for what P keeps. `until`: the end of 90 % of its lease."""
    return [
        (Arrived("r", spec()), [start_p("r", 1, "p0")]),
        (PrefillDone(p("r", 1, "p0"), True), [start_d("r", 2, "d0", "p0", until)]),
    ]


ANSWERED = answered()


def test_a_client_that_leaves_before_the_pull_leaves_ps_memory_full() -> None:
    core = core_of(leased(), "d0")
    run(
        core,
        [
            *ANSWERED,
            (At(5.0, Cancelled("r")), [Abort(d("r", 2, "d0")), Ended("r", Outcome.CANCELLED, ErrorCode.CLIENT_GONE)]),
        ],
    )
    assert held(core) == (100, 100)
    assert core.next_wakeup() == 30.0
    run(core, [(Tick(), [])], 29.0)
    assert held(core) == (100, 100)
    run(core, [(Tick(), [])], 30.0)
    assert held(core) == (0, 0)
    assert_idle(core)


@pytest.mark.parametrize("more", [{"releases_kv": True}, {"kv_lease_s": None}])
def test_nothing_is_stranded_where_it_is_released_or_nobody_knows(more: dict[str, object]) -> None:
    core = core_of(leased(**more), "d0")
    run(core, answered(None if more.get("kv_lease_s", 30.0) is None else 27.0))
    core.handle(Cancelled("r"), 5.0)
    assert held(core) == (0, 0)
    assert_idle(core)


def test_d_refuses_before_it_pulls() -> None:
    core = core_of(leased(), "d0")
    failure = status(400)
    lease = d("r", 2, "d0")
    run(
        core,
        [*ANSWERED, (At(1.0, LegFailed(lease, failure)), [Ended("r", Outcome.FAILED, ErrorCode.WORKER_ERROR, lease)])],
    )
    assert held(core) == (100, 100)


@pytest.mark.parametrize("streamed", [True, False])
def test_what_was_pulled_is_not_stranded(streamed: bool) -> None:
    core = core_of(leased(), "d0")
    first: list[Step] = [(FirstToken(d("r", 2, "d0")), [])] if streamed else []
    run(core, [*ANSWERED, *first, (DecodeDone(d("r", 2, "d0")), [done("r")])])
    assert held(core) == (0, 0)
    assert_idle(core)


def full(**settings: object) -> Core:
    """A core whose only D is taken by another request until somebody lets it go."""
    core = core_of(leased(), worker("d0", max_seqs=1), **settings)
    run(
        core,
        [
            (Arrived("first", spec()), [start_p("first", 1, "p0")]),
            (PrefillDone(p("first", 1, "p0"), True), [start_d("first", 2, "d0", "p0", 27.0)]),
            (Arrived("r", spec()), [start_p("r", 1, "p0")]),
            (PrefillDone(p("r", 1, "p0"), True), []),
        ],
    )
    return core


def test_parameters_are_not_sent_when_the_lease_is_about_to_end() -> None:
    core = full()
    assert core.next_wakeup() == 27.0
    run(core, [(At(27.0, Tick()), [start_p("r", 2, "p0")])])
    assert held(core) == (300, 100), "first's, the stranded one's, and what is computed again"
    run(
        core,
        [
            (At(28.0, DecodeDone(d("first", 2, "d0"))), [done("first")]),
            (At(28.5, PrefillDone(p("r", 2, "p0"), True)), [start_d("r", 3, "d0", "p0", 55.5)]),
            (At(29.0, DecodeDone(d("r", 3, "d0"))), [done("r")]),
        ],
    )
    assert held(core) == (100, 100)
    run(core, [(Tick(), [])], 30.0)
    assert_idle(core)


def test_also_when_room_comes_before_the_tick() -> None:
    """The loop was late: what would be placed now is stale all the same."""
    core = full()
    effects = core.handle(DecodeDone(d("first", 2, "d0")), 40.0)
    assert start_p("r", 2, "p0") in effects
    assert not any(type(effect) is type(start_d("r", 1, "d0")) for effect in effects)


def test_not_without_end() -> None:
    core = full(retries=RetryPolicy(0))
    run(core, [(At(27.0, Tick()), [Ended("r", Outcome.TIMED_OUT, ErrorCode.QUEUE_TIMEOUT)])])


def test_a_stale_handoff_is_not_tried_on_another_d() -> None:
    core = core_of(leased(), worker("d0", handoff_reusable=True), worker("d1", handoff_reusable=True))
    run(core, [*ANSWERED, (At(28.0, LegFailed(d("r", 2, "d0"), status(503))), [start_p("r", 3, "p0")])])


def test_a_leg_that_was_not_sent_in_time_begins_at_p_again() -> None:
    """Also by a clock that runs ahead of ours; D is not to blame, and the only one is asked again."""
    core = core_of(leased(), worker("d0", handoff_reusable=True), max_fails=1)
    run(
        core,
        [
            *ANSWERED,
            (At(26.9, LegFailed(d("r", 2, "d0"), LATE)), [start_p("r", 3, "p0")]),
            (At(27.0, PrefillDone(p("r", 3, "p0"), True)), [start_d("r", 4, "d0", "p0", 54.0)]),
            (At(28.0, DecodeDone(d("r", 4, "d0"))), [done("r")]),
        ],
    )
    (load,) = (w for w in core.workers() if w.name == "d0")
    assert load.ejected_until <= 28.0


def test_a_d_that_is_always_reached_too_late_is_not_tried_without_end() -> None:
    core = core_of(leased(), "d0", retries=RetryPolicy(0))
    lease = d("r", 2, "d0")
    run(
        core,
        [
            *ANSWERED,
            (At(27.0, LegFailed(lease, LATE)), [Ended("r", Outcome.FAILED, ErrorCode.WORKER_UNREACHABLE, lease)]),
        ],
    )


@pytest.mark.parametrize("down", [True, False])
@pytest.mark.parametrize("code", [500, 400])
def test_a_d_that_finds_nobody_to_pull_from_is_not_the_end(down: bool, code: int) -> None:
    """vLLM's `kv_load_failure_policy: fail` is a 500. That P is down explains it: another one computes the prompt."""
    core = core_of(leased(), leased("p1"), "d0")
    run(core, [*ANSWERED])
    if down:
        core.handle(WorkerDown("p0", "gone"), 1.0)
    lease = d("r", 2, "d0")
    again: list[Effect | Ended] = [start_p("r", 3, "p1")]
    end: list[Effect | Ended] = [Ended("r", Outcome.FAILED, ErrorCode.WORKER_ERROR, lease)]
    run(core, [(At(2.0, LegFailed(lease, status(code))), again if down and code == 500 else end)])


def test_a_removed_worker_takes_it_along() -> None:
    core = core_of(leased(), leased("p1"), "d0")
    run(core, [*ANSWERED])
    core.handle(Cancelled("r"), 5.0)
    core.handle(WorkerRemoved("p0"), 6.0)
    run(core, [(Tick(), [])], 30.0)
    assert_idle(core)
