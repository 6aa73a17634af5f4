"""Conditional disaggregation: which prompts go to a decode worker whole, where that is decided by cost."""

from __future__ import annotations

import pytest

from omni_proxy.core import Core
from omni_proxy.messages import Arrived, FirstToken, Mode, PrefillDone, StartDecode, StartPrefill
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
    assert isinstance(first_leg(core, "b", 800, 0.1), StartPrefill)  # 40 ms
    assert isinstance(first_leg(limited(0.02), "c", 120, 0.0), StartPrefill), "also a limit below half a step more"


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
    assert isinstance(first_leg(core, "a", 600, 0.1), StartPrefill)


def test_an_answer_without_a_limit_loses_what_a_prompt_takes() -> None:
    core = limited(None, c1=0.05)
    free = first_leg(core, "free", 100, 0.0)
    assert isinstance(free, StartDecode)
    core.handle(FirstToken(free.lease), 0.05)
    (begun,) = core.handle(Arrived("limited", spec(600, priority=1)), 0.1)
    assert isinstance(begun, StartPrefill), "half a step more at most"
