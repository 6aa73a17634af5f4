"""Four gateways before the same simulated workers, against one."""

from __future__ import annotations

import pytest

from omni_proxy.core import Core, CoreSettings
from omni_proxy.messages import Outcome
from omni_proxy.sim.cluster import make_cluster
from omni_proxy.sim.figures import Figures, Slo, figures
from omni_proxy.sim.presets import preset
from omni_proxy.sim.replicas import Replicas
from omni_proxy.sim.setup import LoadBasis, at_load
from omni_proxy.sim.synthetic import parse_synthetic
from omni_proxy.sim.world import World


def core(number: int) -> Core:
    return Core(CoreSettings(prefix_aware=True, queue_timeout_s=1e6, seed=number))


def simulated(count: int, interval_s: float | None) -> tuple[Figures, Replicas]:
    workers = make_cluster(4, 4, 0, preset("h200-deepseek-r1"))
    workload = parse_synthetic("turns,requests=500,rate=5,turns=4", 3)
    workload = at_load(workload, workers, 0.75, LoadBasis.COLD)
    made: list[Replicas] = []

    def make(index: object) -> Replicas:
        made.append(Replicas(count, core, interval_s))
        return made[0]

    return figures(World(workload, workers, make).run().records, Slo()), made[0]


@pytest.mark.slow
def test_four_gateways_with_a_view_of_each_other_are_nearly_one() -> None:
    one, _ = simulated(1, None)
    four, replicas = simulated(4, 0.005)
    blind, _ = simulated(4, None)
    assert one.ttft is not None
    assert four.ttft is not None
    assert blind.ttft is not None
    assert four.outcomes == {Outcome.COMPLETED.value: 500}
    assert four.ttft.mean < 1.15 * one.ttft.mean
    assert four.ttft.mean < blind.ttft.mean
    assert abs(four.cached_share - one.cached_share) < 0.03
    for made in replicas.cores:
        made.check()
        assert made.live_count() == 0


def test_one_gateway_among_replicas_is_the_plain_core() -> None:
    workers = make_cluster(2, 2, 0, preset("h200-deepseek-r1"))
    workload = parse_synthetic("poisson,requests=60,rate=5", 1)
    plain = World(workload, workers, lambda index: core(0)).run()
    alone = World(workload, workers, lambda index: Replicas(1, core)).run()
    assert alone.records == plain.records
