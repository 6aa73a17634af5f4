"""Late binding: who goes where, who waits for what, and for whom a place is kept."""

from __future__ import annotations

from omni_proxy.core import Core
from omni_proxy.messages import Arrived, PrefillDone, Tick, Tokenized, Usage, WorkerUp
from omni_proxy.scheduler.settings import SchedulingSettings
from tests.core.steps import At, core_of, p, run, spec, start_d, start_p, worker

LONG = tuple(range(1, 1251))
"""20,000 tokens: a bit more than a second by the prior."""


def two_workers(**settings: object) -> Core:
    return core_of("p0", "p1", "d0", prefix_aware=True, scheduling=SchedulingSettings(**settings))  # type: ignore[arg-type]


def tell(core: Core, rid: str, at: float, tokens: int, keys: tuple[int, ...] = ()) -> list[object]:
    """Let a request arrive; returns what its prompt causes."""
    core.handle(Arrived(rid, spec(tokens, tokenize=True)), at)
    effects = core.handle(Tokenized(rid, tokens, keys), at)
    core.check()
    return list(effects)


def test_a_request_waits_for_the_worker_that_holds_its_prefix_when_that_is_faster() -> None:
    core = two_workers()
    (first,) = tell(core, "a", 0.0, 20_000, LONG)
    holder = first.lease.worker  # type: ignore[attr-defined]
    core.handle(PrefillDone(first.lease, True, usage=Usage(20_000, 1, 0)), 1.4)  # type: ignore[attr-defined]
    (busy,) = tell(core, "b", 1.5, 20_100, LONG)
    assert busy.lease.worker == holder  # type: ignore[attr-defined]
    (other,) = tell(core, "c", 1.5, 20_000, tuple(range(5000, 6250)))
    assert other.lease.worker != holder, "the cold one goes to the idle worker"  # type: ignore[attr-defined]
    assert tell(core, "d", 1.5, 20_050, LONG) != [], "little work is left on the holder: it may get one more"


def test_it_does_not_wait_when_computing_anew_is_faster() -> None:
    core = two_workers()
    (first,) = tell(core, "a", 0.0, 160, tuple(range(10)))
    core.handle(PrefillDone(first.lease, True, usage=Usage(160, 1, 0)), 0.02)  # type: ignore[attr-defined]
    (long,) = tell(core, "b", 1.0, 20_000 + 160, (*range(10), *LONG))
    assert long.lease.worker == first.lease.worker  # type: ignore[attr-defined]
    (anew,) = tell(core, "c", 1.0, 176, (*range(10), 99))
    assert anew.lease.worker != long.lease.worker  # type: ignore[attr-defined]


def test_nothing_jumps_into_a_place_that_is_kept() -> None:
    core = core_of(worker("p0", max_batch_tokens=300), "d0", scheduling=SchedulingSettings(order="fcfs"))
    run(
        core,
        [
            (Arrived("a", spec(250)), [start_p("a", 1, "p0")]),
            (Arrived("b", spec(200)), []),
            (Arrived("c", spec(20)), []),
            (At(0.1, Tick()), []),
            (At(0.2, PrefillDone(p("a", 1, "p0"), True)), [start_d("a", 2, "d0", "p0"), start_p("b", 1, "p0")]),
        ],
    )


def test_the_next_prompt_is_sent_just_before_the_worker_is_free() -> None:
    core = core_of("p0", "d0")
    run(core, [(Arrived("a", spec(2000)), [start_p("a", 1, "p0")]), (Arrived("b", spec(2000)), [])])
    at = core.next_wakeup()
    assert at is not None
    assert 0.05 < at < 0.2
    run(core, [(At(at - 0.001, Tick()), []), (At(at, Tick()), [start_p("b", 1, "p0")])])


def test_a_worker_that_hangs_is_not_waited_for_for_ever() -> None:
    core = core_of("p0", "d0", prefix_aware=True)
    tell(core, "a", 0.0, 20_000, LONG)
    core.handle(PrefillDone(p("a", 1, "p0"), True, usage=Usage(20_000, 1, 0)), 1.4)
    core.handle(WorkerUp(worker("p1")), 1.4)
    tell(core, "b", 2.0, 40_000, (*LONG, *range(9000, 10250)))
    assert tell(core, "c", 5.38, 20_100, LONG) == [], "its prefix is on p0, which should have been free by now"
    now = 5.38
    for _ in range(50):
        at = core.next_wakeup()
        assert at is not None
        assert at > now
        now = at
        effects = core.handle(Tick(), now)
        if effects:
            break
    assert effects == [start_p("c", 1, "p1")]
    assert now < 30.0


def test_placements_tell_their_reasons() -> None:
    core = two_workers()
    tell(core, "a", 0.0, 2000, LONG[:125])
    (record,) = core.records()
    (placement,) = record.placements
    assert placement.start_s == 0.0
    assert placement.finish_s is not None
    assert 0.05 < placement.finish_s < 1.0
    assert placement.cached_tokens == 0
    assert len(placement.candidates) == 2
    assert record.predicted_first_at is not None
