"""Each part of a request's time has its cause, in made-up records, behind a core, and in simulated runs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from omni_proxy.core import Core, CoreSettings
from omni_proxy.errors import ErrorCode
from omni_proxy.messages import (
    Arrived,
    Close,
    DecodeBroke,
    DecodeDone,
    Event,
    FirstToken,
    Lease,
    Leg,
    LegFailed,
    LegSent,
    Mode,
    Outcome,
    Placement,
    PrefillDone,
    RequestRecord,
    Stage,
    StartDecode,
    StartPrefill,
    Usage,
)
from omni_proxy.observe.explain import REMEDIES, as_text, explain
from omni_proxy.observe.explain_parts import Cause, parts_of
from omni_proxy.scheduler.settings import SchedulingSettings
from omni_proxy.sim.cluster import make_cluster, slowed
from omni_proxy.sim.presets import PRESETS
from omni_proxy.sim.synthetic import parse_synthetic
from omni_proxy.sim.world import World
from tests.core.steps import CUT, REFUSED, core_of, spec

S = Stage
P = Placement("p1", Leg.PREFILL, "why", (("p1", 0.4), ("p2", 1.1)), 0.1, 0.4, 0)
D = Placement("d0", Leg.DECODE, "why", (("d0", 2.0),), 0.05, 2.0, 0)


def record(*marks: tuple[Stage, float], **more: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        "rid": "r",
        "external_id": "r",
        "model": "m",
        "endpoint": "chat",
        "stream": True,
        "mode": Mode.SEQUENTIAL,
        "marks": tuple((stage, at, 1) for stage, at in marks),
        "prefill_done_at": None,
        "first_token_at": None,
        "outcome": Outcome.COMPLETED,
        "error": None,
        "detail": "",
        "placements": (P, D),
        "attempts": 2,
        "prompt_tokens": 1000,
        "cached_tokens": 200,
        "completion_tokens": 11,
        **more,
    }
    return RequestRecord(**fields)


SEQUENTIAL = (
    (S.RECEIVED, 10.0),
    (S.TOKENIZING, 10.01),
    (S.APC_MATCHING, 10.03),
    (S.PREFILL_WAITING, 10.03),
    (S.PREFILL_SCHEDULED, 10.53),
    (S.PREFILL_RUNNING, 10.531),
    (S.DECODE_WAITING, 11.03),
    (S.DECODE_SCHEDULED, 11.13),
    (S.DECODE_RUNNING, 11.131),
    (S.FINISHED, 12.2),
)
USUAL = {"prefill_done_at": 11.03, "first_token_at": 11.2}


def causes(one: RequestRecord, now: float = 0.0) -> dict[Cause, float]:
    parts = parts_of(one, now)
    assert all(a.end == b.start for a, b in itertools.pairwise(parts)), "a gap"
    begin, end = one.arrived_at, one.ended_at if one.ended_at is not None else now
    assert (parts[0].start, parts[-1].end) == (begin, end)
    assert sum(part.seconds for part in parts) == pytest.approx(end - begin, abs=1e-9)
    found: dict[Cause, float] = {}
    for part in parts:
        found[part.cause] = round(found.get(part.cause, 0.0) + part.seconds, 6)
    return found


def test_every_stage_of_a_usual_request() -> None:
    assert causes(record(*SEQUENTIAL, **USUAL)) == {
        Cause.GATEWAY: 0.01,
        Cause.TOKENISING: 0.02,
        Cause.QUEUE: 0.5,
        Cause.BEHIND: 0.1,
        Cause.COMPUTING: 0.3,
        Cause.SLOW_WORKER: 0.1,
        Cause.DECODE_ROOM: 0.1,
        Cause.HANDOFF: 0.07,
        Cause.ANSWER: 1.0,
    }


def test_a_wait_for_who_holds_the_prefix_says_what_it_was_worth() -> None:
    held = Placement("p1", Leg.PREFILL, "why", P.candidates, 0.1, 0.4, 800)
    one = record(*SEQUENTIAL, **USUAL, placements=(held, D))
    assert causes(one)[Cause.PREFIX] == 0.5
    text = as_text(explain(one, 0.0))
    assert "waiting for p1, which holds 800 tokens of its prompt; p2 was rated 700.0 ms worse" in text


def test_the_words() -> None:
    told = explain(record(*SEQUENTIAL, **USUAL, ttft_target_s=1.0), 0.0)
    assert told["summary"] == (
        "It took 2.20 s, 1.20 s of them until its first token. Its target for that was 1.00 s: missed by 200.0 ms."
    )
    text = as_text(told)
    assert "computing the prompt on p1: 800 tokens of 1,000, the others were cached" in text
    assert "the rest of the answer on d0: 10 tokens, 100.0 ms each" in text
    assert text.splitlines()[-1].startswith("  - ")
    faster = told["faster"]
    assert isinstance(faster, list)
    assert [one["cause"] for one in faster][:2] == [Cause.ANSWER, Cause.QUEUE]
    assert sum(one["seconds"] for one in told["parts"]) == pytest.approx(told["seconds"], abs=1e-4)  # type: ignore[attr-defined]


def test_every_cause_has_a_remedy() -> None:
    assert set(REMEDIES) == set(Cause)


def test_a_worker_that_does_both() -> None:
    marks = ((S.RECEIVED, 0.0), (S.DECODE_WAITING, 0.0), (S.DECODE_SCHEDULED, 0.2), (S.FINISHED, 1.0))
    one = record(*marks, mode=Mode.AGGREGATED, placements=(D,), first_token_at=0.5)
    found = causes(one)
    assert found == {Cause.QUEUE: 0.2, Cause.COMPUTING: 0.05, Cause.SLOW_WORKER: 0.25, Cause.ANSWER: 0.5}


def test_beside_each_other_the_prefill_counts_until_it_has_answered() -> None:
    marks = (
        (S.RECEIVED, 0.0),
        (S.PREFILL_WAITING, 0.0),
        (S.DECODE_WAITING, 0.1),
        (S.PREFILL_SCHEDULED, 0.1),
        (S.DECODE_SCHEDULED, 0.1),
        (S.PREFILL_RUNNING, 0.1),
        (S.DECODE_RUNNING, 0.1),
        (S.FINISHED, 1.0),
    )
    placed = (Placement("p1", Leg.PREFILL, "why", (), 0.0, 0.4, 0), D)
    one = record(*marks, mode=Mode.PARALLEL, placements=placed, prefill_done_at=0.5, first_token_at=0.6)
    assert causes(one) == {Cause.QUEUE: 0.1, Cause.COMPUTING: 0.4, Cause.HANDOFF: 0.1, Cause.ANSWER: 0.4}


def test_one_that_has_not_ended_and_one_that_was_refused() -> None:
    waiting = record((S.RECEIVED, 1.0), (S.PREFILL_WAITING, 1.5), outcome=None, placements=())
    assert causes(waiting, now=3.0) == {Cause.GATEWAY: 0.5, Cause.QUEUE: 1.5}
    assert str(explain(waiting, 3.0)["summary"]).startswith("It has run for 2.00 s.")
    refused = record(
        (S.RECEIVED, 1.0),
        (S.FINISHED, 1.0),
        outcome=Outcome.REJECTED,
        error=ErrorCode.QUEUE_FULL,
        detail="Too many wait.",
        placements=(),
    )
    assert explain(refused, 1.0)["summary"] == "It was refused after 0.0 ms. Too many wait."
    assert as_text(explain(refused, 1.0))


# ------------------------------------------------------------------- behind a real core


class Played:
    """A core that is fed by a script of what each leg does; time passes by a tenth of a second with each event."""

    def __init__(self, *names: str) -> None:
        self.core = core_of(*names)
        self.now = 0.0
        self.leases: list[Lease] = []
        self.record: RequestRecord | None = None

    def hear(self, event: Event) -> None:
        self.now = round(self.now + 0.1, 6)
        for effect in self.core.handle(event, self.now):
            if isinstance(effect, StartPrefill | StartDecode):
                self.leases.append(effect.lease)
                self.core.handle(LegSent(effect.lease), self.now)
            elif isinstance(effect, Close):
                self.record = effect.record


def test_the_target_of_its_class_is_compared() -> None:
    settings = SchedulingSettings(ttft_targets_s={2: 0.05})
    core = core_of("p0", "d0", scheduling=settings)
    (start,) = core.handle(Arrived("r", spec(priority=2)), 0.0)
    assert isinstance(start, StartPrefill)
    core.handle(PrefillDone(start.lease, True), 0.3)
    core.handle(FirstToken(Lease("r", 2, "d0", Leg.DECODE)), 0.35)
    (one,) = core.records()
    assert "Its target for that was 50.0 ms: missed by 300.0 ms." in str(explain(one, 0.4)["summary"])


def test_a_prefill_that_failed_is_one_part() -> None:
    play = Played("p0", "p1", "d0")
    play.hear(Arrived("r", spec()))
    play.hear(LegFailed(play.leases[-1], REFUSED))
    play.hear(PrefillDone(play.leases[-1], True))
    play.hear(FirstToken(play.leases[-1]))
    play.hear(DecodeDone(play.leases[-1], Usage(100, 5)))
    assert play.record is not None
    found = causes(play.record)
    assert found[Cause.RETRY] == 0.1
    assert found[Cause.ANSWER] == 0.1
    assert "an attempt that came to nothing" in as_text(explain(play.record, 0.0))


def test_a_decode_worker_that_refuses_is_one_part() -> None:
    play = Played("p0", "d0", "d1")
    play.hear(Arrived("r", spec()))
    play.hear(PrefillDone(play.leases[-1], True))
    play.hear(LegFailed(play.leases[-1], REFUSED))
    while play.leases[-1].leg is Leg.PREFILL:
        play.hear(PrefillDone(play.leases[-1], True))
    play.hear(FirstToken(play.leases[-1]))
    play.hear(DecodeDone(play.leases[-1], Usage(100, 5)))
    assert play.record is not None
    assert causes(play.record)[Cause.RETRY] >= 0.1


def test_a_handoff_that_was_missed() -> None:
    play = Played("p0", "d0")
    play.hear(Arrived("r", spec()))
    play.hear(PrefillDone(play.leases[-1], False))
    play.hear(FirstToken(play.leases[-1]))
    play.hear(DecodeDone(play.leases[-1], Usage(100, 5)))
    assert play.record is not None
    found = causes(play.record)
    assert found[Cause.MISSED_HANDOFF] == 0.1
    assert Cause.HANDOFF not in found


def test_an_answer_that_lost_its_worker() -> None:
    play = Played("p0", "d0", "d1")
    play.hear(Arrived("r", spec()))
    play.hear(PrefillDone(play.leases[-1], True))
    play.hear(FirstToken(play.leases[-1]))
    play.hear(DecodeBroke(play.leases[-1], 3, CUT))
    play.hear(PrefillDone(play.leases[-1], True))
    play.hear(FirstToken(play.leases[-1]))
    play.hear(DecodeDone(play.leases[-1], Usage(100, 5)))
    assert play.record is not None
    found = causes(play.record)
    assert found[Cause.RESUME] == 0.1
    assert found[Cause.ANSWER] == pytest.approx(0.3)
    assert Cause.RETRY not in found


# --------------------------------------------------------------------------- simulated


def simulated(text: str, slow: dict[str, float], **more: int) -> list[RequestRecord]:
    workers = make_cluster(more.get("prefill", 2), 2, 0, next(iter(PRESETS.values())))
    world = World(parse_synthetic(text, 3), slowed(workers, slow), lambda _: Core(CoreSettings(prefix_aware=True)))
    return world.run().records


def test_the_parts_of_every_simulated_request_are_its_whole_time() -> None:
    seen: set[Cause] = set()
    for text, slow in (
        ("turns,requests=150,rate=12,prompt=4000,output=60,think=0.2", {}),
        ("bursts,requests=200,rate=30,prompt=6000,output=40", {"prefill-1": 4.0}),
    ):
        for one in simulated(text, slow):
            seen |= set(causes(one))
            assert as_text(explain(one, 0.0))
    assert {Cause.TOKENISING, Cause.QUEUE, Cause.PREFIX, Cause.BEHIND, Cause.COMPUTING} <= seen
    assert {Cause.SLOW_WORKER, Cause.HANDOFF, Cause.ANSWER} <= seen


def test_a_slow_worker_is_found() -> None:
    records = simulated("poisson,requests=20,rate=0.5,prompt=6000,output=40,spread=0", {"prefill-0": 4.0}, prefill=1)
    first = causes(records[0])
    assert first[Cause.SLOW_WORKER] > first[Cause.COMPUTING]  # nobody knew
    last = causes(records[-1])
    assert last.get(Cause.SLOW_WORKER, 0.0) < 0.2 * last[Cause.COMPUTING]  # by now it is expected
