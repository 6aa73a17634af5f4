"""Which worker makes an answer, and what answers teach."""

from __future__ import annotations

from math import inf

import pytest

from omni_proxy.lifecycle.request import Request
from omni_proxy.scheduler.answers import pick_answering
from omni_proxy.scheduler.decoding import Decoding
from omni_proxy.scheduler.ledger import Ledger
from omni_proxy.scheduler.load import WorkerLoad
from tests.core.steps import d, worker
from tests.scheduler.test_orders import waiting


def loads(*names: str, **more: object) -> tuple[Ledger, list[WorkerLoad]]:
    ledger = Ledger()
    return ledger, [ledger.put(worker(name, **more)) for name in names]


def chosen(request: Request, workers: list[WorkerLoad]) -> str | None:
    choice = pick_answering(request, workers, 256, 0.05, 0.0)
    return None if choice is None else choice.worker.name


def handed_over(rid: str, tokens: int = 1000) -> Request:
    request = waiting(rid, tokens)
    request.handoff_from = "p0"
    return request


def test_the_least_loaded_makes_the_answer_and_the_others_are_told() -> None:
    ledger, workers = loads("d0", "d1", "d2")
    ledger.grant(d("a", 1, "d0"), 0, 50_000)
    ledger.grant(d("b", 1, "d0"), 0, 50_000)
    ledger.grant(d("c", 1, "d1"), 0, 1000)
    choice = pick_answering(handed_over("r"), workers, 256, 0.05, 0.0)
    assert choice is not None
    assert [name for name, _ in choice.placement.candidates] == ["d2", "d1", "d0"]
    assert choice.worker.name == "d2"
    assert choice.prefill_s == 0.0


def test_a_slow_worker_gets_less_by_its_own_model() -> None:
    ledger, workers = loads("d0", "d1")
    for _ in range(20):
        workers[0].decoding.cost.observe(1, 1000, 0.060)
        workers[1].decoding.cost.observe(1, 1000, 0.020)
    assert chosen(handed_over("r"), workers) == "d1"
    for n in range(31):
        ledger.grant(d(str(n), 1, "d1"), 0, 0)
    workers[1].decoding.cost.fit.weights = (0.02, 0.002, 0.0)
    assert chosen(handed_over("r"), workers) == "d0", "less, not none"


def test_a_prefix_that_it_holds_need_not_be_moved() -> None:
    _, workers = loads("d0", "d1")
    request = handed_over("r")
    request.match({"d1": 900}, 0.0)
    assert chosen(request, workers) == "d1"


def test_who_computes_as_well_begins_later() -> None:
    _, workers = loads("m0", "m1")
    workers[0].backlog.granted(d("a", 1, "m0"), 50_000, 0, 0.0)
    choice = pick_answering(waiting("r", 1000), workers, 256, 0.05, 0.0)
    assert choice is not None
    assert (choice.worker.name, choice.prefill_s) == ("m1", pytest.approx(workers[1].backlog.cost.seconds(1000, 0)))


def test_ties_go_round_and_nobody_with_room_is_nobody() -> None:
    ledger, workers = loads("d0", "d1", max_seqs=1)
    assert chosen(handed_over("r"), workers) == "d0"
    ledger.grant(d("a", 1, "d0"), 0, 0)
    ledger.release(d("a", 1, "d0"))
    assert chosen(handed_over("r"), workers) == "d1"
    ledger.grant(d("a", 1, "d0"), 0, 0)
    ledger.grant(d("b", 1, "d1"), 0, 0)
    assert chosen(handed_over("r"), workers) is None
    assert chosen(handed_over("r"), []) is None


def test_answers_teach_what_steps_take() -> None:
    decoding, now = Decoding(), 0.0
    for n in range(60):
        seqs = 1 + n % 5
        leases = [d(f"{n}-{k}", 1, "d0") for k in range(seqs)]
        for lease in leases:
            decoding.begun(lease, 1000, now)
        now += 99 * (0.010 + 0.005 * seqs)
        for lease in leases:
            decoding.ended(lease, 100, now)
        now += 5.0
    assert decoding.cost.step_s(3, 3000) == pytest.approx(0.025, rel=0.05)
    assert len(decoding) == 0


def test_pauses_are_no_part_of_steps() -> None:
    decoding = Decoding()
    for n in range(20):
        lease, begin = d(str(n), 1, "d0"), 10.0 * n
        decoding.begun(lease, 1000, begin)
        decoding.paused(1.0)
        decoding.ended(lease, 100, begin + 1.0 + 99 * 0.02)
    assert decoding.step_s(1, 1000) == pytest.approx(0.02, rel=0.05)


def test_answers_are_ahead_by_what_the_least_of_them_is() -> None:
    decoding = Decoding()
    assert decoding.ahead_s(0.05, 0.02, 3.0) == inf
    decoding.begun(d("a", 1, "d0"), 1000, 0.0)
    assert decoding.ahead_s(0.05, 0.02, 2.0) == pytest.approx(3.0)  # 100 tokens for which 5 s were promised
    decoding.paused(1.0)
    assert decoding.ahead_s(0.05, 0.02, 3.0) == pytest.approx(2.0)
    decoding.begun(d("b", 1, "d0"), 1000, 3.0)
    assert decoding.ahead_s(0.05, 0.02, 3.4) == pytest.approx(0.6)
    assert decoding.ahead_s(0.05, 0.06, 3.4) < 0.0, "steps are too slow for the limit"


def test_cut_and_uncounted_answers_teach_nothing() -> None:
    decoding = Decoding()
    decoding.begun(d("a", 1, "d0"), 10, 0.0)
    decoding.ended(d("a", 1, "d0"), None, 9.0)
    decoding.ended(d("a", 1, "d0"), 100, 9.0)
    decoding.begun(d("b", 1, "d0"), 10, 9.0)
    decoding.ended(d("b", 1, "d0"), 2, 10.0)
    assert decoding.cost.fit.observations == 0
