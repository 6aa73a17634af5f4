"""Where many wait, all events of an instant share one walk of the queue: the tick that the core asks for at once."""

from __future__ import annotations

from omni_proxy.core import Core
from omni_proxy.errors import ErrorCode
from omni_proxy.flow.board import MANY
from omni_proxy.messages import Arrived, Cancelled, Outcome, PrefillDone, Tick
from omni_proxy.scheduler.admission import Admission
from tests.core.steps import At, Ended, core_of, p, run, spec, start_d, start_p, worker


def _waiting(count: int, workers: int = 1, **settings: object) -> Core:
    """Prefill workers of one prompt at a time, each with one, and so many that wait, `w0` the first."""
    names = [f"p{number}" for number in range(workers)]
    core = core_of(*(worker(name, max_seqs=1) for name in names), "d0", **settings)
    for number, name in enumerate(names):
        run(core, [(Arrived(f"r{number}", spec()), [start_p(f"r{number}", 1, name)])])
    for number in range(count):
        run(core, [(At(0.1, Arrived(f"w{number}", spec(100 + number))), [])])
    core.handle(Tick(), 0.1)
    return core


def _done(number: int) -> PrefillDone:
    return PrefillDone(p(f"r{number}", 1, f"p{number}"), handoff=True)


def test_where_few_wait_the_next_goes_at_once() -> None:
    core = _waiting(MANY - 1)
    run(core, [(At(0.2, _done(0)), [start_d("r0", 2, "d0", "p0"), start_p("w0", 1, "p0")])])


def test_where_many_wait_two_that_come_free_share_a_walk() -> None:
    core = _waiting(MANY, workers=2)
    run(
        core, [(At(0.2, _done(0)), [start_d("r0", 2, "d0", "p0")]), (At(0.2, _done(1)), [start_d("r1", 2, "d0", "p1")])]
    )
    assert core.next_wakeup() == 0.2
    run(core, [(At(0.2, Tick()), [start_p("w0", 1, "p0"), start_p("w1", 1, "p1")])])
    later = core.next_wakeup()
    assert later is None or later > 0.2


def test_who_waits_behind_many_is_not_refused_before_the_walk_that_makes_room() -> None:
    core = _waiting(MANY, admission=Admission(max_waiting_requests=MANY))
    refused = Ended("late", Outcome.REJECTED, ErrorCode.QUEUE_FULL)
    run(core, [(At(0.2, Arrived("late", spec(500))), [refused])])
    run(core, [(At(0.3, _done(0)), [start_d("r0", 2, "d0", "p0")])])
    run(core, [(At(0.3, Arrived("in time", spec(500))), [start_p("w0", 1, "p0")])])


def test_a_walk_that_is_due_is_forgotten_when_nobody_waits() -> None:
    core = _waiting(MANY)
    run(core, [(At(0.2, _done(0)), [start_d("r0", 2, "d0", "p0")])])
    for number in range(MANY):
        core.handle(Cancelled(f"w{number}"), 0.2)
        core.check()
    assert core.waiting() == (0, 0)
    core.handle(Tick(), 0.2)
    later = core.next_wakeup()
    assert later is None or later > 0.2
