"""One core beside other gateways: what they hold counts, what is ours stays exact, and alone nothing changes."""

from __future__ import annotations

import random

from omni_proxy.apc.homes import Homes
from omni_proxy.core import Core, CoreSettings
from omni_proxy.messages import (
    Arrived,
    Cancelled,
    Close,
    DecodeDone,
    Effect,
    Event,
    FirstToken,
    OthersHeard,
    PrefillDone,
    StartDecode,
    StartPrefill,
    Tick,
    WorkerShare,
    WorkerUp,
)
from omni_proxy.scheduler.backlog import LEAD_S, Backlog
from omni_proxy.scheduler.others import added, differ, own_shares
from omni_proxy.scheduler.settings import SchedulingSettings
from tests.core.steps import assert_idle, core_of, p, spec, worker


def heard(*loads: WorkerShare, **more: object) -> OthersHeard:
    fields = {"gateways": 1, "loads": loads, **more}
    return OthersHeard(**fields)  # type: ignore[arg-type]


def placed(effects: list[Effect]) -> list[str]:
    return [e.lease.worker for e in effects if isinstance(e, StartPrefill | StartDecode)]


def test_a_prompt_goes_where_others_have_sent_nothing() -> None:
    core = core_of("p0", "p1", "d0")
    core.handle(heard(WorkerShare("p0", 1, 8000, 8000, 0.5)), 1.0)
    assert placed(core.handle(Arrived("r", spec()), 1.0)) == ["p1"]


def test_what_others_hold_fills_a_worker() -> None:
    core = core_of(worker("p0", max_seqs=2), "d0")
    core.handle(heard(WorkerShare("p0", 2, 10, 10, 0.0)), 1.0)
    assert placed(core.handle(Arrived("r", spec()), 1.0)) == []
    assert placed(core.handle(heard(WorkerShare("p0", 1, 10, 10, 0.0)), 1.1)) == ["p0"]


def test_a_decode_worker_without_room_for_more_kv_is_left_alone() -> None:
    core = core_of("p0", worker("d0", kv_capacity_tokens=1000), worker("d1", kv_capacity_tokens=1000))
    core.handle(heard(WorkerShare("d0", 3, 0, 990, 0.0)), 0.0)
    core.handle(Arrived("r", spec(100, max_tokens=10)), 0.0)
    assert placed(core.handle(PrefillDone(p("r", 1, "p0"), handoff=True), 0.1)) == ["d1"]


def test_forgetting_the_others_sends_what_waited_for_them() -> None:
    core = core_of(worker("p0", max_seqs=1), "d0")
    core.handle(heard(WorkerShare("p0", 1, 10, 10, 9.0)), 0.0)
    assert placed(core.handle(Arrived("r", spec()), 0.0)) == []
    assert placed(core.handle(OthersHeard(0), 0.2)) == ["p0"]


def test_own_counts_are_ours_alone() -> None:
    core = core_of("p0", "d0")
    core.handle(heard(WorkerShare("p0", 5, 500, 500, 0.0), WorkerShare("gone", 1, 1, 1, 1.0)), 0.0)
    core.check()
    assert own_shares(core.workers(), 0.0) == []
    core.handle(Arrived("r", spec(100)), 60.0)
    (share,) = own_shares(core.workers(), 60.0)
    assert (share.worker, share.seqs, share.prefill_tokens) == ("p0", 1, 100)
    assert share.busy_s > 0


def test_gateways_take_turns_at_a_worker_and_short_prompts_do_not_wait_long() -> None:
    started: dict[int, float] = {}
    for place in (0, 1):
        core = core_of("p0", "d0")
        core.handle(OthersHeard(1, place=place, turn_s=0.01), 0.0)
        now = 1.0
        effects = core.handle(Arrived("r", spec(8000)), now)
        while not placed(effects):
            at = core.next_wakeup()
            assert at is not None
            now = max(now, at)
            effects = core.handle(Tick(), now)
        started[place] = now - 1.0
    assert sorted(started.values())[0] == 0.0
    assert 0.009 < sorted(started.values())[1] <= 0.0101
    short = core_of("p0", "d0")
    short.handle(OthersHeard(1, place=max(started, key=lambda n: started[n]), turn_s=0.01), 0.0)
    assert placed(short.handle(Arrived("r", spec(10)), 1.0)) == []
    at = short.next_wakeup()
    assert at is not None
    assert at - 1.0 < 0.002


def test_equal_workers_are_taken_by_chance_and_a_seed_fixes_it() -> None:
    def trace(seed: int, gateways: int) -> list[str]:
        core = core_of(*(f"p{n}" for n in range(8)), "d0", seed=seed)
        core.handle(OthersHeard(gateways), 0.0)
        return [name for n in range(6) for name in placed(core.handle(Arrived(f"r{n}", spec()), float(n)))]

    assert trace(1, 1) == trace(1, 1)
    assert len({tuple(trace(seed, 1)) for seed in range(5)}) > 1
    assert len({tuple(trace(seed, 0)) for seed in range(5)}) == 1


def test_most_of_the_others_can_eject_a_worker() -> None:
    core = core_of("p0", "p1", "d0")
    core.handle(heard(distrusted=(("p0", 30.0), ("nobody", 3.0))), 0.0)
    assert placed(core.handle(Arrived("r", spec()), 1.0)) == ["p1"]
    ejected = next(w for w in core.workers() if w.name == "p0")
    assert ejected.reason == "ejected by other gateways"
    assert ejected.ejected_until == 30.0


def test_what_tenants_got_elsewhere_counts_for_their_share() -> None:
    settings = SchedulingSettings(fair_tenants=True, order="fcfs")
    core = core_of(worker("p0", max_seqs=1), "d0", scheduling=settings)
    core.handle(heard(served=(("greedy", 1_000_000),)), 0.0)
    core.handle(Arrived("first", spec()), 0.0)
    core.handle(Arrived("r1", spec(tenant="greedy")), 0.0)
    core.handle(Arrived("r2", spec(tenant="modest")), 0.0)
    effects = core.handle(PrefillDone(p("first", 1, "p0"), handoff=True), 0.5)
    assert [e.lease.rid for e in effects if isinstance(e, StartPrefill)] == ["r2"]


def test_a_session_follows_where_another_gateway_placed_it() -> None:
    homes = Homes()
    names = ("p0", "p1", "p2")
    usual = next(homes.order("s", names))
    other = next(name for name in names if name != usual)
    homes.placed_elsewhere([("s", other)])
    assert next(homes.order("s", names)) == other
    assert next(homes.order("t", names)) == next(Homes().order("t", names))


def test_a_worker_shared_with_others_teaches_only_what_it_did_for_us_alone() -> None:
    backlog = Backlog()
    backlog.others(1.0, 0.0)
    backlog.granted(p("r", 1, "p0"), 1000, 0, 0.0)
    backlog.computed(p("r", 1, "p0"), 1000, 0, 5.0)
    backlog.granted(p("s", 1, "p0"), 1000, 0, 10.0)
    backlog.computed(p("s", 1, "p0"), 1000, 0, 11.0)
    assert backlog.cost.fit.observations == 0


def test_work_of_others_comes_before_ours_and_passes_with_time() -> None:
    backlog = Backlog()
    assert backlog.free_at(1.0) == 1.0
    backlog.others(2.0, 1.0)
    assert backlog.free_at(1.5) == 3.0
    assert backlog.opens_at(1.5, LEAD_S) == 3.0 - LEAD_S
    end = backlog.granted(p("r", 1, "p0"), 1000, 0, 2.0)
    assert end > 3.0
    assert backlog.own_s(2.5) == backlog.total_s  # not begun yet
    backlog.others(0.0, 3.0, False)
    assert abs(backlog.free_at(3.0) - end) < 1e-9


def test_reports_add_up_and_differ_by_what_is_held() -> None:
    a, b = WorkerShare("p0", 1, 10, 20, 0.5), WorkerShare("p0", 2, 30, 40, 0.25)
    assert added([[a], [b, WorkerShare("p1", 1, 1, 1, 1.0)]])[0] == WorkerShare("p0", 3, 40, 60, 0.75)
    assert not differ([a], [WorkerShare("p0", 1, 10, 20, 0.1)])
    assert differ([a], [b])
    assert differ([a], [])


def test_conservation_holds_whatever_the_others_say() -> None:
    chance = random.Random(5)
    core = Core(CoreSettings(prefix_aware=True, seed=1))
    for name in ("p0", "p1", "d0", "d1"):
        core.handle(WorkerUp(worker(name, max_seqs=3)), 0.0)
    answers: dict[str, Event] = {}
    now = 0.0

    def tell(event: Event) -> None:
        for effect in core.handle(event, now):
            if isinstance(effect, StartPrefill):
                answers[effect.lease.rid] = PrefillDone(effect.lease, handoff=True)
            elif isinstance(effect, StartDecode):
                answers[effect.lease.rid] = DecodeDone(effect.lease)
            elif isinstance(effect, Close):
                answers.pop(effect.rid, None)
        core.check()

    def answer(rid: str) -> None:
        event = answers.pop(rid)
        if isinstance(event, DecodeDone):
            tell(FirstToken(event.lease))
        tell(event)

    for serial in range(1500):
        now += chance.random() * 0.02
        kind = chance.randrange(5)
        if kind == 0:
            tell(Arrived(f"r{serial}", spec(chance.randrange(1, 4000))))
        elif kind == 1:
            shares = [WorkerShare(n, chance.randrange(4), 50, 50, chance.random()) for n in ("p0", "d1")]
            tell(heard(*shares, gateways=chance.randrange(4), place=chance.randrange(4), turn_s=0.005))
        elif kind == 2 and answers:
            rid = chance.choice(sorted(answers))
            if chance.random() < 0.2:
                tell(Cancelled(rid))
            else:
                answer(rid)
        else:
            tell(Tick())
    tell(OthersHeard(0))
    while answers or core.waiting()[0]:
        now += 0.01
        assert now < 200
        for rid in sorted(answers):
            if rid in answers:
                answer(rid)
        tell(Tick())
    assert_idle(core)
