"""Routers and the scheduler on slices of a trace with cold caches, of which `benchmarks.routing` takes two live."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.scheduler.compare import contestants
from benchmarks.scheduler.floor import floor_ttfts
from omni_proxy.messages import RequestRecord, Stage
from omni_proxy.sim.cluster import SimWorker
from omni_proxy.sim.figures import Figures, Slo, figures, spread
from omni_proxy.sim.presets import preset
from omni_proxy.sim.setup import LoadBasis, WorkloadChoice, at_load, cluster_of, known_tokens, load_workload
from omni_proxy.sim.workload import Workload
from omni_proxy.sim.world import World

AGAINST = "token-cost"
_WHAT = ("mean", "p50", "p90", "p99")


def slices_of(trace: Path, requests: int) -> Iterator[Workload]:
    """All whole slices that follow each other, each beginning at its own zero."""
    whole = load_workload(WorkloadChoice(trace, None, None, 0))
    for begin in range(0, len(whole.requests) - requests + 1, requests):
        part = whole.requests[begin : begin + requests]
        yield replace(whole, requests=tuple(replace(r, arrival_s=r.arrival_s - part[0].arrival_s) for r in part))


@dataclass(frozen=True, slots=True)
class Parts:
    """Of a mean TTFT, in seconds: where it goes."""

    waiting: float
    """For a worker, in the gateway or in the worker's queue."""
    missed: float
    """Computing what some worker had cached."""
    computing: float
    """The rest, alone on a worker with all that anybody computed before."""
    around: float
    """Tokenizer, network, handoff, the first step."""


def parts_of(records: Sequence[RequestRecord], workload: Workload, workers: Sequence[SimWorker]) -> Parts:
    """Where the time until the first tokens went."""
    model, known = workers[0].model, list(known_tokens(workload))
    sums = [0.0, 0.0, 0.0, 0.0]
    for record in records:
        number = int(record.rid[1:])
        tokens, cached = workload.requests[number].prompt_tokens, record.cached_tokens or 0
        assert record.first_token_at is not None
        alone_s = model.alone_s(tokens - cached, cached)
        least_s = model.alone_s(tokens - known[number], known[number])
        in_line_s = 0.0  # a prompt that needs no handoff is computed with others' answers, and waits for nobody
        if record.prefill_done_at is not None:
            lined_up = next(at for stage, at, _ in record.marks if stage is Stage.PREFILL_WAITING)
            in_line_s = record.prefill_done_at - lined_up - alone_s
        whole_s = record.first_token_at - record.marks[0][1]
        for place, value in enumerate((in_line_s, alone_s - least_s, least_s, whole_s - in_line_s - alone_s)):
            sums[place] += value / len(records)
    return Parts(*sums)


def compare_slices(
    trace: Path, requests: int, load: float, basis: str, ablate: bool, say: Callable[[str], None]
) -> None:
    """Print the table: means over all slices, in brackets the mean ratio to `token-cost` with its standard error."""
    workers = cluster_of(None, 6, 6, 0, preset("h200-deepseek-r1"))
    slices = [at_load(part, workers, load, LoadBasis(basis)) for part in slices_of(trace, requests)]
    say(f"{trace.name}, 6P + 6D, load {load:g} ({basis}), {len(slices)} slices of {requests} requests")
    say(f"{'':32}" + "".join(f"{what:>20}" for what in (*_WHAT, "goodput")) + "   waiting missed computing around")
    runs: dict[str, list[Figures]] = {}
    for name, make in contestants(ablate).items():
        done = [World(part, workers, make).run().records for part in slices]
        runs[name] = [figures(records, Slo()) for records in done]
        parts = [parts_of(records, part, workers) for records, part in zip(done, slices, strict=True)]
        where = "".join(
            f"{fmean(getattr(p, what) for p in parts):9.3f}" for what in ("waiting", "missed", "computing", "around")
        )
        say(f"{name:32}{_cells(runs[name], runs.get(AGAINST))}{where}")
    floors = [spread(list(floor_ttfts(part, workers[0].model))) for part in slices]
    say(f"{'nobody waits (the floor)':32}" + "".join(f"{fmean(getattr(f, w) for f in floors):20.2f}" for w in _WHAT))


def _cells(found: Sequence[Figures], against: Sequence[Figures] | None) -> str:
    cells = []
    for what in (*_WHAT, "goodput"):
        values = [_value(each, what) for each in found]
        text = f"{fmean(values):.2f}"
        if against is not None and found is not against:
            ratios = [value / _value(other, what) for value, other in zip(values, against, strict=True)]
            text += f" ({fmean(ratios):.2f} ± {stdev(ratios) / sqrt(len(ratios)):.2f})"
        cells.append(text.rjust(20))
    return "".join(cells)


def _value(found: Figures, what: str) -> float:
    if what == "goodput":
        return found.goodput
    assert found.ttft is not None
    value: float = getattr(found.ttft, what)
    return value
