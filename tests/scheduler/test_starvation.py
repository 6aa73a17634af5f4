"""A hard bound: however much short work comes, who is starved waits only for those starved before, at their share."""

from __future__ import annotations

from random import Random

import pytest

from omni_proxy.messages import RequestRecord, Stage
from omni_proxy.scheduler.registry import ORDERS
from omni_proxy.scheduler.settings import SchedulingSettings
from omni_proxy.sim.workload import SimRequest, Workload
from tests.sim.helpers import BLOCK, SMALL, simulate

TIMEOUT_S = 3.0


def flood(seed: int) -> Workload:
    """Few long prompts among so many short ones that a worker could always do something shorter."""
    rng, at, rows = Random(seed), 0.0, []
    for number in range(400):
        at += rng.expovariate(20.0)
        prompt = 400 if number % 50 == 10 else rng.randrange(16, 60)
        rows.append(SimRequest(at, prompt, 2, tuple(range(1000 * number, 1000 * number + -(-prompt // BLOCK)))))
    return Workload("flood", BLOCK, tuple(rows))


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_nobody_waits_longer_than_the_timeout_and_what_was_begun(order: str, seed: int, share: float) -> None:
    scheduling = SchedulingSettings(order=order, starvation_timeout_s=TIMEOUT_S, starved_share=share)
    run = simulate(flood(seed), prefill=1, decode=2, scheduling=scheduling)
    assert len(run.records) == 400
    longest = SMALL.alone_s(400) + 8 * SMALL.alone_s(60)
    for record in run.records:
        sent = _sent_at(record)
        starved_before = sum(
            other.arrived_at < record.arrived_at and _sent_at(other) > record.arrived_at + TIMEOUT_S
            for other in run.records
        )
        assert sent - record.arrived_at <= TIMEOUT_S + (1 + starved_before) * longest / share


def _sent_at(record: RequestRecord) -> float:
    return next(at for stage, at, _ in record.marks if stage is Stage.PREFILL_SCHEDULED)
