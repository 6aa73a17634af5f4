"""Who holds how much, counted once and taken back once."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.messages import FailureKind, Lease
from omni_proxy.scheduler.ledger import Ledger
from omni_proxy.scheduler.load import LEAST_WEIGHT, WorkerLoad
from tests.core.steps import d, p, worker

CONNECT = FailureKind.CONNECT


def ledger_of(*names: str, max_fails: int = 1, fail_timeout_s: float = 10.0) -> Ledger:
    ledger = Ledger(max_fails, fail_timeout_s)
    for name in names:
        ledger.put(worker(name))
    return ledger


def member(ledger: Ledger, name: str) -> WorkerLoad:
    load = ledger.get(name)
    assert load is not None
    return load


def counters(load: WorkerLoad) -> tuple[int, int, int]:
    return load.seqs, load.prefill_tokens, load.kv_tokens


def test_a_grant_is_counted_and_taken_back_once() -> None:
    ledger = ledger_of("p0")
    lease = p("r", 1, "p0")
    ledger.grant(lease, 10, 20)
    assert counters(member(ledger, "p0")) == (1, 10, 20)
    ledger.check()
    ledger.release(lease)
    ledger.release(lease)
    assert counters(member(ledger, "p0")) == (0, 0, 0)
    ledger.check()


def test_a_lease_is_granted_once() -> None:
    ledger = ledger_of("p0")
    ledger.grant(p("r", 1, "p0"), 1, 1)
    with pytest.raises(AssertionError, match="twice"):
        ledger.grant(p("r", 1, "p0"), 1, 1)


def test_computed_prompts_leave_their_kv() -> None:
    ledger = ledger_of("m0")
    lease = d("r", 1, "m0")
    ledger.grant(lease, 10, 20)
    ledger.prefilled(lease)
    ledger.prefilled(lease)
    assert counters(member(ledger, "m0")) == (1, 0, 20)
    ledger.release(lease)
    assert counters(member(ledger, "m0")) == (0, 0, 0)


def test_kept_kv_counts_until_it_is_dropped() -> None:
    ledger = ledger_of("p0")
    ledger.hold("r", "p0", 30)
    ledger.hold("r", "p0", 40)
    assert counters(member(ledger, "p0")) == (0, 0, 40)
    assert list(ledger.holds()) == ["r"]
    ledger.check()
    ledger.drop_hold("r")
    ledger.drop_hold("r")
    assert counters(member(ledger, "p0")) == (0, 0, 0)
    ledger.hold("r", "stranger", 5)
    assert list(ledger.holds()) == []


def test_a_name_that_comes_back_is_somebody_else() -> None:
    ledger = ledger_of("p0")
    lease = p("r", 1, "p0")
    ledger.grant(lease, 10, 10)
    ledger.hold("s", "p0", 5)
    old = member(ledger, "p0")
    ledger.remove("p0")
    fresh = ledger.put(worker("p0"))
    assert not ledger.is_member(old)
    assert ledger.is_member(fresh)
    assert ledger.holder(lease) is old
    ledger.check()
    ledger.release(lease)
    ledger.drop_hold("s")
    assert counters(fresh) == counters(old) == (0, 0, 0)


def test_a_new_description_keeps_the_counters() -> None:
    ledger = ledger_of("p0")
    ledger.grant(p("r", 1, "p0"), 10, 10)
    ledger.put(worker("p0", max_seqs=5))
    assert member(ledger, "p0").spec.max_seqs == 5
    assert member(ledger, "p0").seqs == 1


def test_members_are_walked_by_name() -> None:
    assert [w.spec.name for w in ledger_of("p2", "d1", "p10", "p1")] == ["d1", "p1", "p10", "p2"]


@pytest.mark.parametrize("weight", [0.0, -1.0, nan, inf, -inf])
def test_a_weight_that_is_no_positive_number_is_the_least(weight: float) -> None:
    load = Ledger().add(worker("p0", weight=weight))
    assert load.weight == LEAST_WEIGHT


def test_the_shortest_context_follows_the_members() -> None:
    ledger = ledger_of("p0")
    assert ledger.shortest_context == inf
    ledger.add(worker("p1", max_model_len=10))
    assert ledger.shortest_context == 10
    ledger.remove("p1")
    ledger.remove("p1")
    assert ledger.shortest_context == inf


def test_a_worker_is_used_when_it_is_up_and_not_draining() -> None:
    ledger = Ledger()
    load = ledger.add(worker("p0"))
    assert (load.usable(0.0), load.reason) == (False, "not seen yet")
    ledger.put(worker("p0"))
    assert (load.usable(0.0), load.reason) == (True, "")
    ledger.drain("p0")
    assert (load.usable(0.0), load.reason) == (False, "draining")
    ledger.put(worker("p0"))
    ledger.down("p0", "no answer")
    assert (load.usable(0.0), load.reason) == (False, "no answer")
    for change in (ledger.drain, ledger.remove):
        change("stranger")
    ledger.down("stranger", "x")


def test_ejection_and_return() -> None:
    ledger = ledger_of("p0", max_fails=2)
    load = member(ledger, "p0")
    assert not ledger.failed(load, CONNECT, 0.0)
    assert not ledger.failed(load, CONNECT, 11.0), "the first failure is forgotten"
    assert ledger.failed(load, CONNECT, 12.0)
    assert (load.usable(21.9), load.usable(22.0), load.reason) == (False, True, "ejected: connect")
    assert (ledger.next_opening(12.0), ledger.next_opening(22.0)) == (22.0, None)
    ledger.succeeded(load)
    assert load.usable(12.0)
    assert load.reason == ""
    assert ledger.next_opening(12.0) is None


def test_a_worker_may_name_its_own_limits() -> None:
    ledger = ledger_of("p0", max_fails=1, fail_timeout_s=10.0)
    steady, never = (ledger.put(worker(n, **more)) for n, more in OWN_LIMITS)
    assert not ledger.failed(steady, CONNECT, 0.0)
    assert not ledger.failed(steady, CONNECT, 3.0), "its own window is shorter"
    assert ledger.failed(steady, CONNECT, 4.0)
    assert (steady.usable(5.9), steady.usable(6.0)) == (False, True)
    assert not ledger.failed(never, CONNECT, 0.0)


OWN_LIMITS: list[tuple[str, dict[str, object]]] = [
    ("p1", {"max_fails": 2, "fail_timeout_s": 2.0}),
    ("p2", {"max_fails": 0}),
]


def test_coming_back_up_ends_an_ejection() -> None:
    ledger = ledger_of("p0")
    load = member(ledger, "p0")
    ledger.failed(load, CONNECT, 0.0)
    ledger.put(worker("p0"))
    assert not load.usable(1.0), "it was up all the time: health checks do not undo what requests saw"
    ledger.down("p0", "x")
    ledger.put(worker("p0"))
    assert load.usable(1.0)


def test_ejection_can_be_switched_off() -> None:
    ledger = ledger_of("p0", max_fails=0)
    assert not ledger.failed(member(ledger, "p0"), CONNECT, 0.0)
    assert member(ledger, "p0").usable(0.0)


def test_ejection_does_not_overwrite_why_a_worker_is_out() -> None:
    ledger = ledger_of("p0")
    load = member(ledger, "p0")
    ledger.drain("p0")
    ledger.failed(load, CONNECT, 0.0)
    assert load.reason == "draining"
    ledger.succeeded(load)
    assert load.reason == "draining"


def test_check_finds_a_wrong_counter() -> None:
    ledger = ledger_of("p0")
    member(ledger, "p0").seqs += 1
    with pytest.raises(AssertionError, match="p0"):
        ledger.check()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 1000)), max_size=60))
def test_whatever_is_granted_comes_home(ops: list[tuple[int, int, int]]) -> None:
    ledger = ledger_of("p0", "p1")
    granted: list[Lease] = []
    for serial, (what, which, tokens) in enumerate(ops):
        if what == 0:
            granted.append(p(f"r{which}", serial, f"p{which % 2}"))
            ledger.grant(granted[-1], tokens, tokens)
        elif what == 1:
            ledger.hold(f"r{which}", f"p{which % 2}", tokens)
        elif what == 2:
            ledger.drop_hold(f"r{which}")
        elif granted:
            ledger.release(granted[which % len(granted)])
        ledger.check()
    for lease in granted:
        ledger.release(lease)
    for which in range(6):
        ledger.drop_hold(f"r{which}")
    assert all(counters(load) == (0, 0, 0) for load in ledger)
    ledger.check()
