"""Which workers could take a leg, and which of them does."""

from __future__ import annotations

import pytest

from omni_proxy.messages import FailureKind, Leg
from omni_proxy.scheduler.ledger import Ledger, WorkerLoad
from omni_proxy.scheduler.placement import (
    FewestKvTokens,
    FewestPrefillTokens,
    fitting,
    has_decode_room,
    has_prefill_room,
    pick,
    trusted,
)
from tests.core.steps import d, p, worker


def loads(*names: str, **more: object) -> tuple[Ledger, list[WorkerLoad]]:
    ledger = Ledger()
    return ledger, [ledger.put(worker(name, **more)) for name in names]


def chosen(workers: list[WorkerLoad], tokens: int = 1) -> str | None:
    placement = pick(workers, FewestPrefillTokens(), Leg.PREFILL, tokens, has_prefill_room)
    return None if placement is None else placement.worker


def test_the_least_loaded_is_picked_and_the_others_are_told() -> None:
    ledger, workers = loads("p0", "p1", "p2", "p3", "p4")
    for number, tokens in enumerate((30, 10, 20, 50, 40)):
        ledger.grant(p("r", number, f"p{number}"), tokens, 0)
    placement = pick(workers, FewestPrefillTokens(), Leg.PREFILL, 1, has_prefill_room)
    assert placement is not None
    assert placement.worker == "p1"
    assert placement.reason == "fewest outstanding prompt tokens"
    assert placement.candidates == (("p1", 10.0), ("p2", 20.0), ("p0", 30.0), ("p4", 40.0))


def test_ties_go_round() -> None:
    ledger, workers = loads("p0", "p1", "p2")
    picks = []
    for number in range(4):
        name = chosen(workers)
        assert name is not None
        picks.append(name)
        ledger.grant(p("r", number, name), 0, 0)
    assert picks == ["p0", "p1", "p2", "p0"]


def test_nobody_with_room() -> None:
    _, workers = loads("p0", max_seqs=0)
    assert chosen(workers) is None
    assert chosen([]) is None


def test_weights_divide_the_load() -> None:
    ledger = Ledger()
    workers = [ledger.put(worker("p0", weight=1.0)), ledger.put(worker("p1", weight=4.0))]
    ledger.grant(p("r", 1, "p0"), 100, 0)
    ledger.grant(p("r", 2, "p1"), 300, 0)
    assert chosen(workers) == "p1"


@pytest.mark.parametrize("weight", [0.0, float("nan")])
def test_a_worker_of_no_weight_takes_what_nobody_else_has_room_for(weight: float) -> None:
    ledger = Ledger()
    workers = [ledger.put(worker("p0", weight=weight)), ledger.put(worker("p1", max_seqs=2))]
    ledger.grant(p("r", 1, "p0"), 1, 0)
    ledger.grant(p("r", 2, "p1"), 1000, 0)
    assert chosen(workers) == "p1"
    ledger.grant(p("r", 3, "p1"), 1000, 0)
    assert chosen(workers) == "p0"


def test_kv_tokens_measure_decode_workers() -> None:
    ledger, workers = loads("d0", "d1")
    ledger.grant(d("r", 1, "d0"), 0, 100)
    placement = pick(workers, FewestKvTokens(), Leg.DECODE, 1, has_decode_room)
    assert placement is not None
    assert (placement.worker, placement.leg) == ("d1", Leg.DECODE)


@pytest.mark.parametrize(
    ("held", "tokens", "room"), [(0, 1000, True), (60, 40, True), (60, 41, False), (100, 0, True), (100, 1, False)]
)
def test_prefill_room(held: int, tokens: int, room: bool) -> None:
    ledger, (load,) = loads("p0", max_batch_tokens=100)
    ledger.grant(p("r", 1, "p0"), held, 0)
    assert has_prefill_room(load, tokens) is room


@pytest.mark.parametrize(
    ("capacity", "held", "tokens", "room"),
    [(None, 10**9, 10**9, True), (100, 60, 40, True), (100, 60, 41, False), (100, None, 1000, True)],
)
def test_decode_room(capacity: int | None, held: int | None, tokens: int, room: bool) -> None:
    ledger, (load,) = loads("d0", kv_capacity_tokens=capacity)
    if held is not None:
        ledger.grant(d("r", 1, "d0"), 0, held)
    assert has_decode_room(load, tokens) is room


def test_sequences_are_bounded_on_both_sides() -> None:
    ledger, (load,) = loads("d0", max_seqs=1)
    ledger.grant(d("r", 1, "d0"), 0, 0)
    assert not has_decode_room(load, 0)
    assert not has_prefill_room(load, 0)


def names(workers: object) -> list[str]:
    assert isinstance(workers, list)
    return [w.spec.name for w in workers]


def test_trust() -> None:
    ledger, workers = loads("p0", "p1", "p2")
    nobody: frozenset[str] = frozenset()
    assert trusted(workers, nobody, 0.0) is workers
    ledger.failed(workers[0], FailureKind.CONNECT, 0.0)
    assert names(trusted(workers, nobody, 1.0)) == ["p1", "p2"]
    assert names(trusted(workers, frozenset({"p1"}), 1.0)) == ["p2"]
    assert names(trusted(workers, frozenset({"p1", "p2"}), 1.0)) == ["p0"], "ejected before failed for this request"
    assert names(trusted(workers, frozenset({"p0", "p1", "p2"}), 1.0)) == ["p0", "p1", "p2"]
    assert trusted(workers, nobody, 10.0) is workers


def test_backups_are_used_when_no_other_can_be() -> None:
    ledger = Ledger()
    workers = [ledger.put(worker(f"p{n}", backup=n > 1)) for n in range(4)]
    nobody: frozenset[str] = frozenset()
    assert names(trusted(workers, nobody, 0.0)) == ["p0", "p1"]
    assert names(trusted(workers, frozenset({"p0"}), 0.0)) == ["p1"]
    assert names(trusted(workers, frozenset({"p0", "p1"}), 0.0)) == ["p2", "p3"], "they failed this request"
    for one in workers[:2]:
        ledger.failed(one, FailureKind.CONNECT, 0.0)
    assert names(trusted(workers, nobody, 1.0)) == ["p2", "p3"]
    assert names(trusted(workers, nobody, 10.0)) == ["p0", "p1"]
    for one in workers:
        ledger.failed(one, FailureKind.CONNECT, 20.0)
    assert names(trusted(workers, nobody, 21.0)) == ["p0", "p1", "p2", "p3"], "all are ejected"


def test_a_context_that_is_too_short_is_passed_over_unless_all_are() -> None:
    ledger = Ledger()
    workers = [ledger.put(worker(f"p{n}", max_model_len=limit)) for n, limit in enumerate((10, 20, None))]
    assert fitting(workers, 9) is workers
    assert names(fitting(workers, 10)) == ["p1", "p2"]
    assert names(fitting(workers, 20)) == ["p2"]
    assert names(fitting(workers[:2], 20)) == ["p0", "p1"]
