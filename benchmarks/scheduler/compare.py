"""Routers and the scheduler on one workload, and the scheduler with each mechanism off in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.scheduler.floor import floor_ttfts
from omni_proxy.core import Core, CoreSettings
from omni_proxy.scheduler.settings import SchedulingSettings
from omni_proxy.sim.ablations import ablations
from omni_proxy.sim.baselines import router
from omni_proxy.sim.exact_index import ExactIndex
from omni_proxy.sim.figures import Figures, Slo, Spread, figures, spread
from omni_proxy.sim.presets import preset
from omni_proxy.sim.run import CoreLike
from omni_proxy.sim.setup import LoadBasis, WorkloadChoice, at_load, cluster_of, load_workload
from omni_proxy.sim.world import World

Make = Callable[[ExactIndex], CoreLike]


def scheduler(settings: Mapping[str, object]) -> Make:
    """The live core with these settings."""
    chosen = SchedulingSettings(**settings)  # type: ignore[arg-type]
    return lambda index: Core(CoreSettings(prefix_aware=True, queue_timeout_s=1e6, scheduling=chosen))


def contestants(ablate: bool) -> dict[str, Make]:
    """Who runs: routers first, then the scheduler."""
    found: dict[str, Make] = {name: router(name) for name in ("match-ratio", "least-requests", "token-cost")}
    found["omni-proxy"] = scheduler({})
    if ablate:
        for name, settings in ablations(CoreSettings(prefix_aware=True, queue_timeout_s=1e6)):
            found[name] = lambda index, settings=settings: Core(settings)  # type: ignore[misc]
    return found


def compare(trace: Path, load: float, basis: str, limit: int | None, ablate: bool, say: Callable[[str], None]) -> None:
    """Print the table of one workload; in brackets, what the better of the first two routers has of it is 1."""
    workers = cluster_of(None, 6, 6, 0, preset("h200-deepseek-r1"))
    workload = at_load(load_workload(WorkloadChoice(trace, None, limit, 0)), workers, load, LoadBasis(basis))
    say(f"{trace.name}, 6P + 6D, load {load:g} ({basis}), {len(workload.requests)} requests")
    say(
        f"{'':25}{'mean':>14}{'p50':>14}{'p90':>14}{'p99':>14}{'max':>8}{'TPOT p99':>10}{'goodput':>9}{'cached':>8} CPU"
    )
    best: Figures | None = None
    for name, make in contestants(ablate).items():
        begun = time.process_time()
        found = figures(World(workload, workers, make).run().records, Slo())
        spent = time.process_time() - begun
        say(_row(name, found, best, spent))
        if name == "match-ratio" or (name == "least-requests" and _mean(found) < _mean(best)):
            best = found
    least = spread(list(floor_ttfts(workload, workers[0].model)))
    assert least is not None
    say(f"{'nobody waits (the floor)':25}{_cells(least, best)}{least.max:8.1f}")


def _mean(found: Figures | None) -> float:
    assert found is not None
    assert found.ttft is not None
    return found.ttft.mean


def _row(name: str, found: Figures, best: Figures | None, spent: float) -> str:
    assert found.ttft is not None
    cells = _cells(found.ttft, None if name == "least-requests" else best)
    tpot = "-" if found.tpot is None else f"{1000 * found.tpot.p99:.1f} ms"
    good = f"{found.goodput:.2f}/s"
    return f"{name:25}{cells}{found.ttft.max:8.1f}{tpot:>10}{good:>9}{found.cached_share:8.1%}{spent:5.0f}"


def _cells(ttft: Spread, best: Figures | None) -> str:
    cells = []
    for what in ("mean", "p50", "p90", "p99"):
        value = getattr(ttft, what)
        against = "" if best is None else f" ({value / getattr(best.ttft, what):.2f})"
        cells.append(f"{value:.2f}{against}".rjust(14))
    return "".join(cells)
