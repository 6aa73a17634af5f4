"""Fixed splits of workers against mixed ones that change sides, on a load that shifts between prompts and answers."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.scheduler.compare import scheduler
from omni_proxy.sim.cluster import make_cluster
from omni_proxy.sim.figures import Slo, figures
from omni_proxy.sim.presets import preset
from omni_proxy.sim.synthetic import parse_synthetic
from omni_proxy.sim.world import World

WORKLOAD = "shift,requests=9600,rate=20,phase=120,swing=4,prompt=1800,output=200,spread=0.4"
SLO = Slo(ttft=2.0, tpot=0.03)


def compare_splits(workers: int, say: Callable[[str], None]) -> None:
    """Print the table: each split of so many workers, all mixed without sides, and all mixed with sides."""
    workload = parse_synthetic(WORKLOAD, 0)
    say(f"{WORKLOAD}, {workers} workers; limits: TTFT {SLO.ttft:g} s, TPOT {1000 * SLO.tpot:g} ms")
    say(f"{'':16}{'TTFT mean':>10}{'p90':>8}{'p99':>8}{'TPOT mean':>11}{'p99':>9}{'goodput':>10}{'in time':>9}")
    rows = [(f"{p}P + {workers - p}D", p, workers - p, 0, False) for p in range(3, workers - 2)]
    rows += [("mixed", 0, 0, workers, False), ("elastic", 0, 0, workers, True)]
    for name, prefill, decode, mixed, elastic in rows:
        cluster = make_cluster(prefill, decode, mixed, preset("h200-deepseek-r1"))
        found = figures(World(workload, cluster, scheduler({"elastic_roles": elastic})).run().records, SLO)
        ttft, tpot = found.ttft, found.tpot
        assert ttft is not None
        assert tpot is not None
        say(
            f"{name:16}{ttft.mean:8.2f} s{ttft.p90:6.2f} s{ttft.p99:6.2f} s{1000 * tpot.mean:8.1f} ms"
            f"{1000 * tpot.p99:6.1f} ms{found.goodput:8.2f}/s{found.attained:9.1%}"
        )
