"""What comes in wrong, or finds nobody: a clear end or a wait within its deadline, never a stuck request."""

from __future__ import annotations

from math import inf, nan

import pytest

from omni_proxy.core import Core
from omni_proxy.errors import ErrorCode
from omni_proxy.messages import Arrived, Close, PrefillDone, StartDecode, StartPrefill, Tick, Usage, WorkerDown
from omni_proxy.scheduler.cost import DecodeCost, PrefillCost
from omni_proxy.scheduler.settings import SchedulingSettings
from tests.core.steps import assert_idle, core_of, p, spec, worker


def started(core: Core, rid: str, now: float = 0.0, **more: object) -> list[str]:
    effects = core.handle(Arrived(rid, spec(**more)), now)  # type: ignore[arg-type]
    core.check()
    return [e.lease.worker for e in effects if isinstance(e, StartPrefill | StartDecode)]


@pytest.mark.parametrize("priorities", [(0, -5, 3), (-(2**62), 2**62, 0)])
def test_priorities_may_be_negative_and_large(priorities: tuple[int, ...]) -> None:
    core = core_of(worker("p0", max_seqs=1), "d0", scheduling=SchedulingSettings(order="fcfs"))
    assert started(core, "first") == ["p0"]
    for number, priority in enumerate(priorities):
        started(core, f"r{number}", priority=priority)
    effects = core.handle(PrefillDone(p("first", 1, "p0"), handoff=True), 0.5)
    (start,) = [e for e in effects if isinstance(e, StartPrefill)]
    assert start.lease.rid == f"r{priorities.index(min(priorities))}"


@pytest.mark.parametrize("seconds", [nan, inf, -1.0, 1e9])
def test_times_that_are_none_teach_nothing(seconds: float) -> None:
    prefill, decode = PrefillCost(), DecodeCost()
    before = prefill.weights, decode.weights
    assert not prefill.observe(1, 100, 5000.0, seconds)
    assert not decode.observe(4.0, 1000.0, seconds)
    assert not prefill.observe(1, 100, nan, 0.1)
    assert not decode.observe(nan, 1000.0, 0.1)
    assert (prefill.weights, decode.weights) == before


@pytest.mark.parametrize("weight", [nan, inf, -inf, 0.0, -1.0])
def test_a_weight_that_is_no_number_keeps_nobody_from_being_served(weight: float) -> None:
    core = core_of(worker("p0", weight=weight), worker("d0", weight=weight))
    assert started(core, "a") == ["p0"]
    (start,) = core.handle(PrefillDone(p("a", 1, "p0"), handoff=True), 0.1)
    assert isinstance(start, StartDecode)


@pytest.mark.parametrize("cached", [-5, 10**12])
def test_a_count_of_cached_tokens_that_cannot_be(cached: int) -> None:
    core = core_of("p0", "d0")
    started(core, "a")
    core.handle(PrefillDone(p("a", 1, "p0"), handoff=True, usage=Usage(100, 1, cached)), 0.1)
    core.check()
    assert started(core, "b", 0.2) == ["p0"]


def test_all_workers_gone_waits_within_its_deadline_then_says_who_is_missing() -> None:
    core = core_of("p0", "d0", no_worker_timeout_s=10.0)
    for name in ("p0", "d0"):
        core.handle(WorkerDown(name, "refused"), 0.0)
    assert started(core, "a", 1.0) == []
    assert core.next_wakeup() == 11.0
    (close,) = core.handle(Tick(), 11.0)
    assert isinstance(close, Close)
    assert close.error is ErrorCode.NO_WORKER
    assert "p0 (refused)" in close.detail
    assert "d0 (refused)" in close.detail
    assert_idle(core)


def test_prefill_without_a_decode_worker_that_fits_waits_and_says_so() -> None:
    core = core_of(worker("p0", group="1"), worker("d0", group="2"), no_worker_timeout_s=10.0)
    assert started(core, "a") == []
    (close,) = core.handle(Tick(), 10.0)
    assert isinstance(close, Close)
    assert close.error is ErrorCode.NO_WORKER
    assert_idle(core)


def test_one_worker_does_it_all() -> None:
    assert started(core_of("m0"), "a") == ["m0"]
    assert started(core_of("m0", scheduling=SchedulingSettings(elastic_roles=True)), "a") == ["m0"]
