"""Mixed workers that change sides: when, when not, and how."""

from __future__ import annotations

from itertools import pairwise

import pytest

from omni_proxy.core import Core
from omni_proxy.messages import Arrived, DecodeDone, FirstToken, Mode, PrefillDone, Role, Tick, WorkerDown, WorkerUp
from omni_proxy.scheduler.planner import Planner
from omni_proxy.scheduler.settings import SchedulingSettings
from tests.core.steps import core_of, d, p, spec, worker
from tests.scheduler.test_planner import planner_of, waiting

ELASTIC = SchedulingSettings(elastic_roles=True)


def sides(core: Core) -> str:
    """A letter for each worker by name: its side; small while it is on its way there."""
    return "".join(_letter(w.role, w.turns_to) for w in core.workers())


def _letter(role: Role, turns_to: Role | None) -> str:
    return role.value[0].upper() if turns_to is None else turns_to.value[0]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("m0", "M"),
        ("m0 m1", "PD"),
        ("m0 m1 m2 m3 m4", "PDPDP"),
        ("p0 m0", "DP"),
        ("d0 m0 m1", "DPP"),
        ("p0 d0 m0", "DPP"),
    ],
)
def test_who_comes_gets_the_side_that_has_fewer(names: str, expected: str) -> None:
    assert sorted(sides(core_of(*names.split(), scheduling=ELASTIC))) == sorted(expected)


def test_without_the_setting_mixed_workers_do_both() -> None:
    assert sides(core_of("m0", "m1")) == "MM"


def test_workers_without_a_handoff_have_no_side() -> None:
    core = core_of(*[worker(name, modes=(Mode.AGGREGATED,)) for name in ("m0", "m1")], scheduling=ELASTIC)
    assert sides(core) == "MM"


def test_a_side_that_has_lost_its_last_worker_gets_one_at_once() -> None:
    core = core_of("m0", "m1", "m2", scheduling=ELASTIC)
    assert sides(core) == "PDP"
    core.handle(WorkerDown("m1", "died"), 1.0)
    assert core.ready()
    assert sorted(w.role.value for w in core.workers() if w.up) == ["decode", "prefill"]
    core.handle(WorkerDown("m0", "died"), 1.0)
    assert sides(core)[2] == "M", "one alone does both"
    core.handle(WorkerUp(worker("m0")), 2.0)
    core.handle(WorkerUp(worker("m1")), 2.0)
    assert {"P", "D"} == set(sides(core))
    core.check()


def _pressed(core: Core, prompts: int, until: float) -> None:
    """Long prompts wait for P while nothing answers; time passes."""
    for number in range(prompts):
        core.handle(Arrived(f"r{number}", spec(20_000)), 0.0)
    now = 0.0
    while now < until:
        now += 0.5
        core.handle(Tick(), now)
        core.check()


def test_waiting_prompts_turn_decode_workers_that_have_nothing_to_do() -> None:
    core = core_of("m0", "m1", "m2", "m3", scheduling=ELASTIC)
    assert sides(core) == "PDPD"
    _pressed(core, 40, until=4.0)
    assert sides(core).count("P") == 3, "one worker is left to answer"


def test_a_burst_that_is_over_soon_turns_nobody() -> None:
    core = core_of("m0", "m1", "m2", "m3", scheduling=ELASTIC)
    core.handle(Arrived("r", spec(10_000)), 0.0)
    for now in (0.2, 0.5, 1.0):
        core.handle(Tick(), now)
    assert sides(core) == "PDPD"


def test_who_turns_ends_what_it_has_and_gets_nothing_new() -> None:
    core = core_of("m0", "m1", "m2", "m3", scheduling=ELASTIC)
    for rid in ("a", "b"):
        core.handle(Arrived(rid, spec()), 0.0)
    for rid, name in (("a", "m0"), ("b", "m2")):
        core.handle(PrefillDone(p(rid, 1, name), handoff=True), 0.1)
    busy = {w.name: w.seqs for w in core.workers()}
    assert (busy["m1"], busy["m3"]) == (1, 1)
    _pressed(core, 40, until=4.0)
    (turning,) = [w for w in core.workers() if w.turns_to is not None]
    assert (turning.role, turning.turns_to, turning.seqs) == (Role.DECODE, Role.PREFILL, 1)
    assert not turning.usable(4.0)
    rid = "a" if turning.name == "m1" else "b"
    core.handle(FirstToken(d(rid, 2, turning.name)), 4.1)
    core.handle(DecodeDone(d(rid, 2, turning.name)), 4.6)
    core.handle(Tick(), 4.6)
    assert (turning.role, turning.turns_to) == (Role.PREFILL, None)
    assert turning.seqs > 0, "and then it has prompts to compute"
    core.check()


def _with_answers(planner: Planner, count: int) -> None:
    names = [w.name for w in planner.ledger if w.role is Role.DECODE]
    for number in range(count):
        planner.ledger.grant(d(f"x{number}", 1, names[number % len(names)]), 0, 1000)


def test_slow_steps_turn_prefill_workers_and_a_load_that_stays_turns_nobody_back() -> None:
    many = [worker(f"m{n}", max_seqs=400) for n in range(4)]
    planner = planner_of(*many, mode=Mode.SEQUENTIAL, elastic_roles=True)
    planner.members_changed()
    _with_answers(planner, 240)
    seen = []
    for step in range(100):
        planner.review(step / 2)
        seen.append("".join(_letter(w.role, w.turns_to) for w in planner.ledger))
    assert seen[0].count("D") == 2
    assert seen[-1].count("D") == 3
    changes = sum(a != b for a, b in pairwise(seen))
    assert changes == 1, seen
    assert planner.place_at_once(waiting("r"), 60.0)


def test_sides_are_given_up_with_the_setting() -> None:
    planner = planner_of("m0", "m1", elastic_roles=True)
    planner.members_changed()
    assert {w.role for w in planner.ledger} == {Role.PREFILL, Role.DECODE}
    planner.configure(SchedulingSettings())
    assert {w.role for w in planner.ledger} == {Role.MIXED}
