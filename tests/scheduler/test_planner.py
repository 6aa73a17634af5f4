"""Deciding and booking in one step."""

from __future__ import annotations

import pytest

from omni_proxy.lifecycle.request import Request
from omni_proxy.lifecycle.stages import On
from omni_proxy.messages import Leg, Mode, WorkerSpec
from omni_proxy.scheduler.ledger import Ledger
from omni_proxy.scheduler.planner import Planner
from omni_proxy.scheduler.pools import Pools
from omni_proxy.scheduler.settings import SchedulingSettings
from tests.core.steps import spec, worker

ANSWER = 256
"""How long an answer is taken to be before any was seen."""


def planner_of(*specs: WorkerSpec | str, mode: Mode | None = None, **settings: object) -> Planner:
    ledger = Ledger()
    for one in specs:
        ledger.put(worker(one) if isinstance(one, str) else one)
    chosen = SchedulingSettings(**{"order": "fcfs", **settings})  # type: ignore[arg-type]
    return Planner(ledger, Pools(ledger, mode), chosen)


def waiting(rid: str, tokens: int = 100, on: On = On.ENQUEUE_PREFILL, max_tokens: int | None = None) -> Request:
    request = Request(rid, spec(tokens, max_tokens=max_tokens), 0.0)
    request.move(on, 0.0)
    return request


def prefilled(rid: str, peer: str) -> Request:
    request = waiting(rid, on=On.ENQUEUE_DECODE)
    request.handoff_from, request.prefill_done_at = peer, 0.0
    return request


def plan(planner: Planner, now: float = 0.0) -> list[str]:
    planner.changed()
    return [request.rid for request in planner.plan(now)]


def test_what_is_placed_is_booked_before_the_next_decision() -> None:
    planner = planner_of("p0", "p1", "d0")
    requests = [waiting(rid) for rid in "abcd"]
    for request in requests:
        planner.wait(request, 9.0)
    assert plan(planner) == ["a", "b", "c", "d"]
    assert [r.placements[0].worker for r in requests] == ["p0", "p1", "p0", "p1"]
    assert [w.prefill_tokens for w in planner.ledger] == [0, 200, 200]
    assert not planner.prefill_queue.waits


def test_prefilled_requests_go_before_new_ones() -> None:
    planner = planner_of("p0", "d0")
    planner.wait(waiting("new"), 9.0)
    planner.wait(prefilled("old", "p0"), 9.0)
    assert plan(planner) == ["old", "new"]


def test_nothing_is_placed_past_somebody_who_waits() -> None:
    planner = planner_of(worker("p0", max_batch_tokens=150), "d0")
    assert planner.place_at_once(waiting("a"), 0.0)
    long, short = waiting("long", 100), waiting("short", 10)
    assert not planner.place_at_once(long, 0.0)
    planner.wait(long, 9.0)
    assert not planner.place_at_once(short, 0.0)


def test_leaving_a_line_tells_its_deadline() -> None:
    planner = planner_of("p0")
    for request, deadline in ((waiting("a"), 5.0), (waiting("b", on=On.ENQUEUE_DECODE), 7.0)):
        planner.wait(request, deadline)
        assert planner.leave(request) == deadline
    assert (len(planner.prefill_queue), len(planner.decode_queue)) == (0, 0)


@pytest.mark.parametrize(("max_tokens", "kv_tokens"), [(None, 100 + ANSWER), (7, 107), (10**6, 100 + ANSWER)])
def test_decode_counts_prompt_and_expected_answer(max_tokens: int | None, kv_tokens: int) -> None:
    planner = planner_of("m0")
    request = waiting("r", on=On.ENQUEUE_DECODE, max_tokens=max_tokens)
    assert planner.answers.place(request, 0.0)
    (load,) = planner.ledger
    assert (load.kv_tokens, load.prefill_tokens, request.mode) == (kv_tokens, 100, Mode.AGGREGATED)


def test_a_pair_is_granted_whole_or_not_at_all() -> None:
    planner = planner_of("p0", worker("d0", max_seqs=1), mode=Mode.PARALLEL)
    first, second = waiting("a"), waiting("b")
    assert planner.place_at_once(first, 0.0)
    assert first.prefill_lease is not None
    assert first.decode_lease is not None
    assert (first.prefill_lease.leg, first.decode_lease.leg) == (Leg.PREFILL, Leg.DECODE)
    assert not planner.place_at_once(second, 0.0)
    assert (second.prefill_lease, second.decode_lease, second.placements, second.attempt) == (None, None, [], 0)
    planner.ledger.check()
    assert [w.seqs for w in planner.ledger] == [1, 1]


def test_kv_goes_only_to_those_that_can_receive_it() -> None:
    planner = planner_of(worker("p0", group="1"), worker("d0", group="1"), worker("d1", group="2"), "m0")
    request = prefilled("r", "p0")
    assert planner.answers.place(request, 0.0)
    assert request.decode_lease is not None
    assert request.decode_lease.worker == "d0"
    assert request.mode is None, "the mode was decided with the prefill"
    assert not planner.answers.place(prefilled("s", "stranger"), 0.0)


def test_an_unserved_model_waits() -> None:
    planner = planner_of(worker("m0", models=("other",)))
    assert not planner.answers.place(waiting("r", on=On.ENQUEUE_DECODE), 0.0)
    assert not planner.place_at_once(waiting("s"), 0.0)


def test_a_new_prompt_never_goes_to_a_decode_worker() -> None:
    planner = planner_of("p0", "d0")
    assert not planner.answers.place(waiting("r", on=On.ENQUEUE_DECODE), 0.0)


def strayed(planner: Planner) -> list[str]:
    planner.pools.changed()
    return sorted(request.rid for request in planner.strayed())


def test_who_strays() -> None:
    planner = planner_of("p0", "d0", "m0")
    for request in (waiting("new"), waiting("whole", on=On.ENQUEUE_DECODE), prefilled("old", "p0")):
        planner.wait(request, 9.0)
    assert strayed(planner) == ["whole"]
    planner.ledger.down("d0", "x")
    assert strayed(planner) == ["new"]
    planner.ledger.remove("d0")
    assert strayed(planner) == ["new", "old"], "nobody is left to pull, and mixed workers can serve"
    planner.ledger.remove("m0")
    assert strayed(planner) == ["whole"], "nobody can serve: what is computed is kept"
    planner.ledger.remove("p0")
    assert strayed(planner) == ["old", "whole"]


def test_backups_take_what_others_cannot_and_nothing_else() -> None:
    planner = planner_of(worker("p0", max_seqs=1), worker("p1", backup=True), "d0")
    requests = [waiting(rid) for rid in "abc"]
    for request in requests[:2]:
        planner.wait(request, 9.0)
    assert plan(planner) == ["a"], "a full worker is no reason to use a backup"
    planner.ledger.down("p0", "x")
    planner.pools.changed()
    assert plan(planner) == ["b"]
    assert requests[1].placements[0].worker == "p1"


def test_a_worker_that_starts_slowly_does_not_get_all_that_waits() -> None:
    planner = planner_of(worker("p0", max_seqs=1), worker("p1", max_seqs=4, slow_start_s=8.0), "d0")
    planner.ledger.down("p1", "x")
    planner.ledger.put(worker("p1", max_seqs=4, slow_start_s=8.0), 0.0)
    for rid in "abcdefgh":
        planner.wait(waiting(rid), 99.0)
    assert plan(planner) == ["a"], "the other may hold one, but is worth less than waiting"
    assert plan(planner, 4.0) == ["b", "c"]
