"""Which workers could take a leg, and which of them does."""

from __future__ import annotations

import pytest

from omni_proxy.messages import FailureKind
from omni_proxy.scheduler.ledger import Ledger
from omni_proxy.scheduler.load import WorkerLoad
from omni_proxy.scheduler.placement import fitting, has_decode_room, trusted
from tests.core.steps import d, worker


def loads(*names: str, **more: object) -> tuple[Ledger, list[WorkerLoad]]:
    ledger = Ledger()
    return ledger, [ledger.put(worker(name, **more)) for name in names]


@pytest.mark.parametrize(
    ("capacity", "held", "tokens", "room"),
    [(None, 10**9, 10**9, True), (100, 60, 40, True), (100, 60, 41, False), (100, None, 1000, True)],
)
def test_decode_room(capacity: int | None, held: int | None, tokens: int, room: bool) -> None:
    ledger, (load,) = loads("d0", kv_capacity_tokens=capacity)
    if held is not None:
        ledger.grant(d("r", 1, "d0"), 0, held)
    assert has_decode_room(load, tokens) is room


def test_sequences_are_bounded() -> None:
    ledger, (load,) = loads("d0", max_seqs=1)
    ledger.grant(d("r", 1, "d0"), 0, 0)
    assert not has_decode_room(load, 0)


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
