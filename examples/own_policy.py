"""An order of one's own, measured in the simulator against the one that ships.

    python examples/own_policy.py

An order gives each waiting request a number; the lowest goes first. It reads no clock and draws no chance, so it can be
simulated, replayed and tested as it is. In the repository it is a class in `scheduler/orders.py`, a line in
`scheduler/registry.py` and a name in `config.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from omni_proxy.core import Core, CoreSettings
from omni_proxy.lifecycle.request import Request
from omni_proxy.scheduler.orders import Order
from omni_proxy.scheduler.registry import ORDERS
from omni_proxy.scheduler.settings import SchedulingSettings
from omni_proxy.sim.cluster import make_cluster
from omni_proxy.sim.exact_index import ExactIndex
from omni_proxy.sim.figures import Slo
from omni_proxy.sim.presets import preset
from omni_proxy.sim.report import Report, comparison, make_report
from omni_proxy.sim.setup import LoadBasis, at_load
from omni_proxy.sim.synthetic import parse_synthetic
from omni_proxy.sim.world import World


class LongestFirst:
    """Most uncached work first: what a job that must end as a whole might want."""

    def __init__(self, settings: SchedulingSettings) -> None:
        pass

    def ranks(self, waiting: Sequence[Request], now: float) -> list[float]:
        return [-float(r.prompt_tokens - r.best_cached) for r in waiting]


def measure(order: str) -> Report:
    """The same requests on the same workers, in that order."""
    workers = make_cluster(2, 2, 0, preset("h200-deepseek-r1"))
    workload = at_load(parse_synthetic("poisson,requests=300", seed=0), workers, 0.95, LoadBasis.COLD)
    settings = CoreSettings(scheduling=SchedulingSettings(order=order), prefix_aware=True)

    def make_core(index: ExactIndex) -> Core:
        return Core(settings)

    return make_report(World(workload, workers, make_core).run(), Slo(2.0, 0.05), order, {}, 0.0)


def main() -> None:
    cast("dict[str, type[Order]]", ORDERS)["longest-first"] = LongestFirst
    print(comparison([measure(order) for order in ("longest-first", "weighted", "fcfs")]))


if __name__ == "__main__":
    main()
