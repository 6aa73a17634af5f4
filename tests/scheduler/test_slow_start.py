"""A worker that came back gets its share bit by bit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.messages import FailureKind
from omni_proxy.scheduler.backlog import LEAD_S
from omni_proxy.scheduler.ledger import Ledger
from omni_proxy.scheduler.load import LEAST_WEIGHT, WorkerLoad
from omni_proxy.scheduler.placement import has_decode_room
from omni_proxy.scheduler.prefill import is_open
from tests.core.steps import p, worker


def back(at: float = 100.0, **more: object) -> tuple[Ledger, WorkerLoad]:
    """Two workers, of which p0 was down and came back at an instant."""
    ledger = Ledger(fail_timeout_s=10.0)
    spec = worker("p0", **{"slow_start_s": 8.0, "max_seqs": 4, "weight": 2.0, **more})
    load = ledger.put(spec, 0.0)
    ledger.put(worker("p1"), 0.0)
    assert (load.share, load.max_seqs) == (1.0, spec.max_seqs), "the first time is no return"
    ledger.down("p0", "gone")
    ledger.put(spec, at)
    return ledger, load


@pytest.mark.parametrize(
    ("at", "share", "max_seqs", "weight"),
    [
        (100.0, 0.0, 1, LEAST_WEIGHT),
        (101.0, 0.125, 1, 0.25),
        (104.0, 0.5, 2, 1.0),
        (106.0, 0.75, 3, 1.5),
        (107.9, 0.9875, 3, 1.975),
        (108.0, 1.0, 4, 2.0),
        (200.0, 1.0, 4, 2.0),
    ],
)
def test_weight_and_sequences_grow_with_time(at: float, share: float, max_seqs: int, weight: float) -> None:
    ledger, load = back()
    ledger.start_slowly(at)
    assert load.share == pytest.approx(share)
    assert load.max_seqs == max_seqs
    assert load.weight == pytest.approx(weight)


def test_what_it_may_hold_is_bounded_meanwhile() -> None:
    ledger, load = back()
    ledger.grant(p("r", 1, "p0"), 0, 0)
    assert not is_open(load, 0.0, LEAD_S)
    assert not has_decode_room(load, 1)
    ledger.start_slowly(104.0)
    assert is_open(load, 0.0, LEAD_S)
    assert has_decode_room(load, 1)


def test_its_next_steps_are_told() -> None:
    ledger, _ = back()
    assert [ledger.next_opening(at) for at in (100.0, 104.0, 106.0)] == [104.0, 106.0, 108.0]
    ledger.start_slowly(108.0)
    assert ledger.next_opening(108.0) is None


def test_a_worker_that_was_ejected_starts_slowly_when_it_is_trusted_again() -> None:
    ledger, load = back()
    ledger.start_slowly(200.0)
    ledger.failed(load, FailureKind.CONNECT, 200.0)
    assert ledger.next_opening(200.0) == 210.0
    ledger.start_slowly(210.0)
    assert load.usable(210.0)
    assert load.max_seqs == 1
    assert ledger.next_opening(210.0) == 214.0
    ledger.succeeded(load)
    ledger.start_slowly(214.0)
    assert load.max_seqs == 2, "one good answer does not end it"


def test_where_nobody_else_could_work_there_is_no_slow_start() -> None:
    ledger, load = back()
    ledger.start_slowly(200.0)
    ledger.down("p1", "gone")
    ledger.down("p0", "gone")
    ledger.put(worker("p0", slow_start_s=8.0, max_seqs=4), 300.0)
    assert load.max_seqs == 4
    ledger.failed(load, FailureKind.CONNECT, 300.0)
    ledger.start_slowly(310.0)
    assert load.max_seqs == 4


def test_a_new_description_can_end_it_and_removal_does() -> None:
    ledger, load = back()
    ledger.put(worker("p0", max_seqs=6), 101.0)
    ledger.start_slowly(101.0)
    assert (load.share, load.max_seqs) == (1.0, 6)
    ledger, load = back()
    ledger.remove("p0")
    assert (load.share, ledger.next_opening(100.0)) == (1.0, None)


def test_one_sequence_is_never_less_than_one_nor_more_than_allowed() -> None:
    ledger, load = back(max_seqs=1)
    assert load.max_seqs == 1
    assert ledger.next_opening(100.0) == 108.0
    ledger, load = back(max_seqs=0)
    assert load.max_seqs == 0


@given(st.integers(1, 300), st.floats(0.1, 1000.0), st.floats(0.0, 1e6))
def test_each_step_that_is_told_opens_a_place(max_seqs: int, slow_start_s: float, begun: float) -> None:
    """A driver that sleeps until `next_opening` reaches the full share, and never spins in one place."""
    ledger, load = back(begun, max_seqs=max_seqs, slow_start_s=slow_start_s)
    now, steps = begun, 0
    while (step := ledger.next_opening(now)) is not None:
        before = load.max_seqs
        assert step > now
        now = step
        ledger.start_slowly(now)
        assert load.max_seqs > before or load.share == 1.0
        steps += 1
    assert load.max_seqs == max_seqs
    assert steps <= max_seqs
    assert now == pytest.approx(begun + slow_start_s)
