"""Conditional disaggregation: which prompts go to a decode worker whole, where that is decided by cost."""

from __future__ import annotations

import pytest

from omni_proxy.core import Core
from omni_proxy.messages import Arrived, FirstToken, Mode, PrefillDone, StartDecode, StartPrefill, Tick
from omni_proxy.scheduler.cost import PrefillCost
from omni_proxy.scheduler.settings import SchedulingSettings
from tests.core.steps import core_of, spec, worker


def by_cost() -> Core:
    return core_of("p0", "d0", scheduling=SchedulingSettings(aggregate_below_tokens=None))


def first_leg(core: Core, rid: str, tokens: int, at: float) -> StartPrefill | StartDecode:
    (effect,) = core.handle(Arrived(rid, spec(tokens)), at)
    core.check()
    assert isinstance(effect, StartPrefill | StartDecode)
    return effect


def test_a_prompt_that_lengthens_a_step_by_less_than_half_needs_no_handoff() -> None:
    assert isinstance(first_leg(by_cost(), "short", 100, 0.0), StartDecode)  # 5 ms in a step of 15 ms
    assert isinstance(first_leg(by_cost(), "long", 200, 0.0), StartPrefill)  # 10 ms


def test_what_the_answers_made_there_would_lose_counts() -> None:
    core, answers = by_cost(), 0
    while isinstance(begun := first_leg(core, f"a{answers}", 100, 0.1 * answers), StartDecode):
        core.handle(FirstToken(begun.lease), 0.1 * answers + 0.015)
        answers += 1
        assert answers < 20, "5 ms for each of so many answers are more than a handoff takes"
    assert answers > 1
    now = 0.1 * answers + 0.001
    core.handle(Arrived("long", spec(60_000)), now)  # P will be at it for seconds
    core.handle(PrefillDone(begun.lease, True), now + 0.02)
    assert isinstance(first_leg(core, "short", 100, now + 0.03), StartDecode)


def test_a_decode_worker_that_can_compute_no_prompt_gets_none() -> None:
    pair = [worker(name, modes=(Mode.SEQUENTIAL,)) for name in ("p0", "d0")]
    core = core_of(*pair, scheduling=SchedulingSettings(aggregate_below_tokens=None))
    assert isinstance(first_leg(core, "short", 100, 0.0), StartPrefill)


def test_a_worker_computes_one_such_prompt_at_a_time() -> None:
    core = by_cost()
    begun = first_leg(core, "a", 100, 0.0)
    assert isinstance(begun, StartDecode)
    assert isinstance(first_leg(core, "b", 100, 0.001), StartPrefill)
    core.handle(FirstToken(begun.lease), 0.03)
    assert isinstance(first_leg(core, "c", 100, 0.04), StartDecode)


def test_the_fixed_cost_of_a_pass_that_is_made_anyway_does_not_count() -> None:
    cost = PrefillCost()
    a, _, _ = cost.weights
    assert cost.added_s(300, 50) == pytest.approx(cost.seconds(300, 50) - a)
    assert cost.added_s(0, 0) == 0.0


def limited(tpot_limit_s: float | None, **of_classes: float) -> Core:
    settings = SchedulingSettings(
        aggregate_below_tokens=None,
        tpot_limit_s=tpot_limit_s,
        tpot_limits_s={int(name[1:]): limit for name, limit in of_classes.items()},
    )
    return core_of("p0", "d0", scheduling=settings)


def test_with_a_limit_a_step_may_take_as_long_as_that() -> None:
    core = limited(0.05)
    begun = first_leg(core, "a", 600, 0.0)  # 30 ms in a step of 15 ms
    assert isinstance(begun, StartDecode)
    core.handle(FirstToken(begun.lease), 0.05)
    assert isinstance(first_leg(core, "b", 800, 0.06), StartPrefill)  # 40 ms
    core = limited(0.02)
    answering(core, "a", 0.0)
    assert isinstance(first_leg(core, "c", 120, 0.001), StartPrefill), "also a limit below half a step more"


def busy_prefill(core: Core, now: float) -> None:
    """P computes for 4 s from now on."""
    core.handle(Arrived("busy", spec(40_000)), now)


def answering(core: Core, rid: str, now: float) -> None:
    """D makes an answer from now on."""
    begun = first_leg(core, rid, 100, now)
    assert isinstance(begun, StartDecode)
    core.handle(FirstToken(begun.lease), now)


def test_answers_that_are_ahead_of_their_limit_may_pause() -> None:
    core = limited(0.05)
    answering(core, "a", 0.0)
    busy_prefill(core, 0.01)
    # By then 0.4 s at 15 ms a token, 50 ms promised: 0.93 s ahead.
    begun = first_leg(core, "b", 9_000, 0.4)  # 0.45 s
    assert isinstance(begun, StartDecode)
    core.handle(FirstToken(begun.lease), 0.9)
    assert core.handle(Arrived("c", spec(9_000)), 0.91) == [], "what is ahead is used up, and b has just begun"


def test_a_pause_is_never_long() -> None:
    core = limited(0.05)
    answering(core, "a", 0.0)
    busy_prefill(core, 0.01)
    assert core.handle(Arrived("b", spec(18_000)), 3.0) == []  # 1.2 s
    assert isinstance(first_leg(core, "c", 14_000, 3.0), StartDecode)  # 0.9 s


def test_a_prompt_that_waits_goes_to_answers_that_have_got_ahead() -> None:
    core = limited(0.05)
    answering(core, "a", 0.0)
    busy_prefill(core, 0.01)
    assert core.handle(Arrived("b", spec(9_000)), 0.1) == []
    at, effects = 0.1, []
    while not effects:
        wakeup = core.next_wakeup()
        assert wakeup is not None
        assert wakeup <= at + 0.051
        at = wakeup
        effects = core.handle(Tick(), at)
    (begun,) = effects
    assert isinstance(begun, StartDecode)
    assert begun.lease.rid == "b"
    assert 0.15 < at < 0.3
    core.check()


def test_nobody_looks_again_where_every_prompt_is_handed_over() -> None:
    core = core_of("p0", "d0", scheduling=SchedulingSettings(tpot_limit_s=0.05))
    busy_prefill(core, 0.01)
    assert core.handle(Arrived("b", spec(9_000)), 0.1) == []
    wakeup = core.next_wakeup()
    assert wakeup is not None
    assert wakeup > 1.0


def test_who_waits_has_the_first_turn() -> None:
    core = limited(0.05)
    answering(core, "a", 0.0)
    busy_prefill(core, 0.01)
    assert core.handle(Arrived("b", spec(2_000)), 0.02) == []
    (begun,) = core.handle(Arrived("c", spec(3_000)), 0.12)
    assert isinstance(begun, StartDecode)
    assert begun.lease.rid == "b"


def test_where_a_prefill_worker_is_idle_answers_pause_for_less_than_is_gained() -> None:
    core = limited(0.05)
    answering(core, "a", 0.0)
    assert isinstance(first_leg(core, "b", 3_000, 3.0), StartPrefill), "0.15 s of pause for 0.05 s of handoff"


def test_answers_within_their_limit_lose_nothing() -> None:
    """Short prompts are taken one after another, where without a limit a few answers stand against it."""
    core = limited(0.05)
    for number in range(30):
        now = 0.1 * number
        begun = first_leg(core, f"a{number}", 100, now)
        assert isinstance(begun, StartDecode)
        core.handle(FirstToken(begun.lease), now + 0.015)


def test_the_tightest_limit_there_holds_for_prompts() -> None:
    core = limited(0.05, c1=0.03)
    (begun,) = core.handle(Arrived("tight", spec(100, priority=1)), 0.0)
    assert isinstance(begun, StartDecode)
    core.handle(FirstToken(begun.lease), 0.05)
    assert isinstance(first_leg(core, "a", 600, 0.06), StartPrefill)


def test_an_answer_without_a_limit_loses_what_a_prompt_takes() -> None:
    core = limited(None, c1=0.05)
    free = first_leg(core, "free", 100, 0.0)
    assert isinstance(free, StartDecode)
    core.handle(FirstToken(free.lease), 0.05)
    (begun,) = core.handle(Arrived("limited", spec(600, priority=1)), 0.1)
    assert isinstance(begun, StartPrefill), "half a step more at most"
