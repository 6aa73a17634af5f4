"""One run: so many gateways before 6P + 6D."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omni_proxy.core import Core, CoreSettings
from omni_proxy.sim.figures import Slo, Spread, figures
from omni_proxy.sim.presets import preset
from omni_proxy.sim.replicas import Replicas
from omni_proxy.sim.setup import LoadBasis, WorkloadChoice, at_load, cluster_of, load_workload
from omni_proxy.sim.world import World


@dataclass(frozen=True, slots=True)
class Row:
    """What a run came to; TTFT in seconds, `cached` as a share of prompt tokens."""

    ttft: Spread
    cached: float
    outcomes: dict[str, int]


def run(
    trace: Path, limit: int | None, load: float, basis: str, count: int, interval_s: float | None, delay_s: float
) -> Row:
    """`count` gateways that report every `interval_s`, None: never."""
    workers = cluster_of(None, 6, 6, 0, preset("h200-deepseek-r1"))
    workload = at_load(load_workload(WorkloadChoice(trace, None, limit, 0)), workers, load, LoadBasis(basis))
    world = World(
        workload,
        workers,
        lambda index: Replicas(count, _core, interval_s, delay_s),
    )
    found = figures(world.run().records, Slo())
    assert found.ttft is not None
    return Row(found.ttft, found.cached_share, found.outcomes)


def _core(number: int) -> Core:
    return Core(CoreSettings(prefix_aware=True, queue_timeout_s=1e6, seed=number))
