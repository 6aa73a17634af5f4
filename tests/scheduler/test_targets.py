"""Targets of requests, of classes and of everybody; the limits that a worker has promised to keep."""

from __future__ import annotations

from math import inf

import pytest

from omni_proxy.core import Core
from omni_proxy.messages import Arrived, Close, DecodeDone, FirstToken, Mode, PrefillDone, StartDecode, StartPrefill
from omni_proxy.scheduler.settings import SchedulingSettings
from omni_proxy.scheduler.targets import StepLimits, Targets
from tests.core.steps import core_of, d, p, spec, worker
from tests.scheduler.test_planner import planner_of, waiting

CLASSES = SchedulingSettings(
    ttft_target_s=5.0, ttft_targets_s={0: 1.0, 9: 60.0}, tpot_limit_s=0.05, tpot_limits_s={0: 0.02}
)


@pytest.mark.parametrize(
    ("own", "priority", "settings", "expected"),
    [
        (None, 0, CLASSES, (1.0, 0.02)),
        (None, 9, CLASSES, (60.0, 0.05)),
        (None, -1, CLASSES, (5.0, 0.05)),
        (0.3, 9, CLASSES, (0.3, 0.05)),
        (None, 0, SchedulingSettings(), (None, inf)),
        (0.3, 0, SchedulingSettings(), (0.3, inf)),
    ],
)
def test_the_request_before_its_class_before_everybody(
    own: float | None, priority: int, settings: SchedulingSettings, expected: tuple[float | None, float]
) -> None:
    targets, request = Targets(settings), spec(priority=priority, ttft_target_s=own)
    assert (targets.ttft_s(request), targets.tpot_s(request)) == expected


def test_the_tightest_of_all_promises_holds_until_it_ends() -> None:
    limits = StepLimits()
    for limit in (0.05, 0.02, inf, 0.02):
        limits.add(limit)
    seen = []
    for limit in (0.02, 0.02, inf, 0.05):
        limits.remove(limit)
        seen.append(limits.tightest)
    assert seen == [0.02, 0.05, 0.05, inf]


def _answers(core: Core, *rids: str) -> list[str]:
    """Who gets a decode worker, of requests that P has done, in that order; with the class in front of the name."""
    started = []
    for rid in rids:
        core.handle(Arrived(rid, spec(priority=int(rid[0]))), 0.0)
        effects = core.handle(PrefillDone(p(rid, 1, "p0"), handoff=True), 0.0)
        started += [e.lease.rid for e in effects if isinstance(e, StartDecode)]
    core.check()
    return started


def test_an_answer_waits_for_a_worker_that_keeps_its_pace() -> None:
    step_of_two = 0.016  # by the prior: 15 ms and 0.2 ms for each sequence
    core = core_of("p0", "d0", scheduling=SchedulingSettings(tpot_limits_s={1: step_of_two}))
    assert _answers(core, "1a", "1b") == ["1a", "1b"], "two are within the limit"
    core = core_of("p0", "d0", scheduling=SchedulingSettings(tpot_limits_s={1: 0.0153}))
    assert _answers(core, "1a", "1b") == ["1a"]
    assert _answers(core, "0c") == [], "nor may others slow down what was promised"
    effects = core.handle(DecodeDone(d("1a", 2, "d0")), 1.0)
    assert [e.lease.rid for e in effects if isinstance(e, StartDecode)] == ["1b"], "an idle worker takes anybody"


def test_a_pair_keeps_its_pace_or_waits() -> None:
    one, two = {"group": "1"}, {"group": "2"}
    names = (worker("p1", **one), worker("d1", **one), worker("p2", **two), worker("d2", **two))
    core = core_of(*names, schedule_mode=Mode.PARALLEL, scheduling=SchedulingSettings(tpot_limit_s=0.0153))
    pairs = []
    for rid in "abc":
        effects = core.handle(Arrived(rid, spec()), 0.0)
        pairs.append([e.lease.worker for e in effects if isinstance(e, StartPrefill | StartDecode)])
    assert pairs == [["p1", "d1"], ["p2", "d2"], []]
    core.handle(PrefillDone(p("a", 1, "p1"), handoff=True), 0.1)
    core.handle(FirstToken(d("a", 2, "d1")), 0.2)
    close, *starts = core.handle(DecodeDone(d("a", 2, "d1")), 0.3)
    assert isinstance(close, Close)
    assert [e.lease.worker for e in starts if isinstance(e, StartPrefill | StartDecode)] == ["p1", "d1"]


@pytest.mark.parametrize("mode", [Mode.PARALLEL, Mode.SEQUENTIAL])
def test_p_is_chosen_with_its_d(mode: Mode) -> None:
    """p1 is idle, but steps on the decode worker of its group take longer than the prompt that p2 has to end first."""
    one, two = {"group": "1"}, {"group": "2"}
    specs = (worker("p1", **one), worker("d1", **one, max_seqs=400), worker("p2", **two), worker("d2", **two))
    planner = planner_of(*specs, mode=mode)
    planner.ledger.grant(p("y", 1, "p2"), 10, 10)
    planner.ledger.holder(p("y", 1, "p2")).backlog.granted(p("y", 1, "p2"), 10, 0, 0.0)
    first, second = waiting("a"), waiting("b")
    assert planner.place_at_once(first, 0.0)
    for number in range(200):
        planner.ledger.grant(d(f"x{number}", 1, "d1"), 0, 10_000)
    assert planner.place_at_once(second, 0.0)
    assert first.prefill_lease is not None
    assert second.prefill_lease is not None
    assert (first.prefill_lease.worker, second.prefill_lease.worker) == ("p1", "p2")


def test_a_class_target_orders_but_refuses_nobody() -> None:
    settings = SchedulingSettings(order="deadline", ttft_targets_s={0: 1e-6})
    core = core_of(worker("p0", max_seqs=1), "d0", scheduling=settings)
    for rid in "ab":
        assert not [e for e in core.handle(Arrived(rid, spec(9000)), 0.0) if isinstance(e, Close)]
    (close,) = core.handle(Arrived("c", spec(9000, ttft_target_s=1e-6)), 0.0)
    assert isinstance(close, Close), "a target of its own that cannot be met is refused at once"
    assert close.retry_after_s is not None
