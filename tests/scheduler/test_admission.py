"""Who may come in, and who may stay."""

from __future__ import annotations

import pytest

from omni_proxy.errors import ErrorCode, Refusal
from omni_proxy.lifecycle.request import Request
from omni_proxy.messages import WorkerSpec
from omni_proxy.scheduler.admission import Admission, retry_after_s
from omni_proxy.scheduler.ledger import Ledger
from omni_proxy.scheduler.pools import Pools
from omni_proxy.scheduler.queue import WaitingQueue
from tests.core.steps import spec, worker


def pools_of(*specs: WorkerSpec) -> Pools:
    ledger = Ledger()
    for one in specs:
        ledger.put(one)
    return Pools(ledger, None)


def queue_of(*tokens: int, model: str = "m") -> WaitingQueue:
    queue = WaitingQueue()
    for number, count in enumerate(tokens):
        queue.push(Request(f"q{number}", spec(count, model), 0.0), (model,), 9.0)
    return queue


def code(refusal: Refusal | None) -> ErrorCode | None:
    return None if refusal is None else refusal.code


PAIR = pools_of(worker("p0"), worker("d0"))
BOUNDS = Admission(max_waiting_requests=2, max_waiting_tokens=100)
FULL = ErrorCode.QUEUE_FULL


@pytest.mark.parametrize(
    ("waiting", "tokens", "expected"),
    [((), 1000, None), ((10,), 90, None), ((10,), 91, FULL), ((1, 1), 1, FULL)],
)
def test_bounds_at_arrival(waiting: tuple[int, ...], tokens: int, expected: ErrorCode | None) -> None:
    request = Request("r", spec(tokens), 0.0)
    refusal = BOUNDS.refuse_arrival(request, PAIR, (queue_of(*waiting), WaitingQueue()))
    assert code(refusal) is expected


def test_a_queue_of_another_model_refuses_nobody() -> None:
    queues = queue_of(1, 1, 1, model="other"), WaitingQueue()
    assert BOUNDS.refuse_arrival(Request("r", spec(), 0.0), PAIR, queues) is None


@pytest.mark.parametrize(
    ("waiting", "expected"), [((1000,), None), ((10, 90), None), ((10, 91), FULL), ((1, 1, 1), FULL)]
)
def test_bounds_of_those_who_wait(waiting: tuple[int, ...], expected: ErrorCode | None) -> None:
    queue = queue_of(*waiting)
    last = queue.requests()[-1]
    refusal = BOUNDS.refuse_wait(last, (WaitingQueue(), queue))
    assert code(refusal) is expected


def test_an_unknown_model() -> None:
    pools = pools_of(worker("p0", models=("a",)))
    refusal = BOUNDS.refuse_arrival(Request("r", spec(model="b'"), 0.0), pools, (WaitingQueue(), WaitingQueue()))
    assert code(refusal) is ErrorCode.MODEL_NOT_FOUND


LONG = ErrorCode.CONTEXT_LENGTH_EXCEEDED


@pytest.mark.parametrize(
    ("limits", "tokens", "expected"),
    [
        ({"p0": None, "d0": None}, 10**9, None),
        ({"p0": 100, "d0": 100}, 99, None),
        ({"p0": 100, "d0": 100}, 100, LONG),
        ({"p0": 100, "p1": 200, "d0": 200}, 150, None),
        ({"p0": 200, "d0": 100}, 150, LONG),
        ({"p0": 100, "d0": None}, 150, LONG),
        ({"p0": 100, "p1": None, "d0": None}, 150, None),
        ({"m0": 100}, 150, LONG),
        ({"p0": 100}, 150, None),
    ],
)
def test_length(limits: dict[str, int | None], tokens: int, expected: ErrorCode | None) -> None:
    pools = pools_of(*(worker(name, max_model_len=limit) for name, limit in limits.items()))
    refusal = Admission().refuse_length(Request("r", spec(tokens), 0.0), pools)
    assert code(refusal) is expected


def test_the_refusal_names_the_limit() -> None:
    refusal = Admission().refuse_length(Request("r", spec(150), 0.0), pools_of(worker("m0", max_model_len=100)))
    assert refusal is not None
    assert refusal.detail == "The prompt has 150 tokens; the model's context is 100, one of them for the answer."


@pytest.mark.parametrize(("first_at", "target", "refused"), [(5.0, 3.0, False), (5.1, 3.0, True), (99.0, None, False)])
def test_what_cannot_meet_its_target_is_refused_early(first_at: float, target: float | None, refused: bool) -> None:
    request = Request("r", spec(ttft_target_s=target), 2.0)
    assert (BOUNDS.refuse_late(request, first_at) is not None) is refused


@pytest.mark.parametrize(("drain_s", "expected"), [(0.0, 1.0), (3.0, 2.0), (40.0, 20.0), (1e6, 120.0)])
def test_when_to_come_back(drain_s: float, expected: float) -> None:
    assert retry_after_s(drain_s) == expected
