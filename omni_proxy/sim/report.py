"""What a simulation says of itself: figures, workers, queues; as an object, JSON and a table. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from omni_proxy.sim.figures import Figures, Latency, Slo, Spread, figures, latency
from omni_proxy.sim.outages import Outage, OutageFigures, outage_figures
from omni_proxy.sim.run import Run


class WorkerFigures(Struct, frozen=True):
    """One worker over the whole run."""

    name: str
    role: str
    utilisation: float
    """Share of the run in which it computed."""
    prefill_tokens: int
    cached_tokens: int
    generated_tokens: int
    pulled_tokens: int
    mean_batch: float
    """Sequences in a decode pass, weighted by time; 0 where there was none."""
    kv_peak: float
    """Largest share of its KV memory in use."""
    preemptions: int


class QueuePoint(Struct, frozen=True):
    """The queues at one instant."""

    at: float
    waiting: int
    waiting_tokens: int
    engine_waiting: int
    running_prefill: int
    running_decode: int


class Report(Struct, frozen=True):
    """Everything that a simulation tells."""

    title: str
    workload: str
    cluster: str
    settings: dict[str, str]
    """What was asked for, so that the run can be had again."""
    cpu_s: float
    """Processor time of the simulation itself."""
    events: int
    figures: Figures
    workers: tuple[WorkerFigures, ...]
    queues: tuple[QueuePoint, ...]
    latencies: tuple[Latency, ...]
    outages: tuple[Outage, ...] = ()
    outage_figures: OutageFigures | None = None


def make_report(run: Run, slo: Slo, title: str, settings: dict[str, str], cpu_s: float) -> Report:
    """The report of a finished run."""
    answered = tuple(found for record in run.records if (found := latency(record)) is not None)
    return Report(
        title=title,
        workload=f"{run.workload.name}, {len(run.workload.requests)} requests",
        cluster=describe_cluster(run),
        settings=settings,
        cpu_s=cpu_s,
        events=run.events,
        figures=figures(run.records, slo),
        workers=tuple(_workers(run)),
        queues=tuple(_queues(run)),
        latencies=tuple(sorted(answered, key=lambda found: found.at)),
        outages=run.outages,
        outage_figures=outage_figures(run.outages, run.records) if run.outages else None,
    )


def describe_cluster(run: Run) -> str:
    """`6P + 6D`."""
    counts: dict[str, int] = {}
    for worker in run.workers:
        letter = worker.spec.role.value[0].upper()
        counts[letter] = counts.get(letter, 0) + 1
    return " + ".join(f"{count}{letter}" for letter, count in counts.items())


def _workers(run: Run) -> Iterable[WorkerFigures]:
    seconds = max(run.ended_at, 1e-9)
    for worker, engine in zip(run.workers, run.engines, strict=True):
        done = engine.counters
        yield WorkerFigures(
            name=worker.spec.name,
            role=worker.spec.role.value,
            utilisation=done.busy_s / seconds,
            prefill_tokens=done.prefill_tokens,
            cached_tokens=done.cached_tokens,
            generated_tokens=done.generated_tokens,
            pulled_tokens=done.pulled_tokens,
            mean_batch=done.decode_seq_s / done.decode_busy_s if done.decode_busy_s else 0.0,
            kv_peak=done.kv_peak_tokens / worker.model.kv_capacity_tokens,
            preemptions=done.preemptions,
        )


def _queues(run: Run) -> Iterable[QueuePoint]:
    prefill = [worker.spec.role.value == "prefill" for worker in run.workers]
    for sample in run.samples:
        at_p = sum(count for count, is_p in zip(sample.running, prefill, strict=True) if is_p)
        at_d = sum(sample.running) - at_p
        yield QueuePoint(sample.at, sample.waiting, sample.waiting_tokens, sample.engine_waiting, at_p, at_d)


def to_json(report: Report) -> bytes:
    """The report as JSON, indented."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1)


# ------------------------------------------------------------------------------------------------ tables


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns under their heads: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *others = (
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *others]).rstrip())
    return "\n".join(lines)


def seconds_text(value: float) -> str:
    """Three significant digits with a unit: `1.64 s`, `17.7 ms`."""
    if value >= 99.95:
        return f"{value:.0f} s"
    if value >= 0.9995:
        return f"{value:.3g} s"
    return f"{value * 1000:.3g} ms"


def _spread_row(name: str, values: Spread | None) -> list[str]:
    if values is None:
        return [name, "-", "-", "-", "-", "-"]
    return [name, *map(seconds_text, (values.mean, values.p50, values.p90, values.p99, values.max))]


def to_text(report: Report) -> str:
    """The report for a terminal."""
    found = report.figures
    head = f"{report.title}: {report.workload}, {report.cluster}, {seconds_text(found.seconds)} simulated"
    parts = [
        f"{head} in {report.cpu_s:.1f} s of CPU",
        latency_table(found),
        summary(found),
        stage_table(found),
        _worker_table(report.workers),
        _queue_table(report.queues),
    ]
    if report.outage_figures is not None:
        parts.append(outages_text(report.outages, report.outage_figures))
    return "\n\n".join(parts)


def latency_table(found: Figures) -> str:
    """TTFT, TPOT and E2E."""
    rows = [["", "mean", "p50", "p90", "p99", "max"]]
    rows += [_spread_row(*row) for row in (("TTFT", found.ttft), ("TPOT", found.tpot), ("E2E", found.e2e))]
    return table(rows)


def summary(found: Figures) -> str:
    """Goodput, throughput, cache and ends, one line each."""
    slo = found.slo
    limits = f"TTFT {seconds_text(slo.ttft)}, TPOT {seconds_text(slo.tpot)}"
    ends = ", ".join(f"{count} {name}" for name, count in found.outcomes.items())
    return "\n".join(
        [
            f"goodput  {found.goodput:.2f} requests/s within {limits}: {found.attained:.1%} of all "
            f"(TTFT {found.ttft_attained:.1%}, TPOT {found.tpot_attained:.1%})",
            f"QPM      {found.qpm:.0f} answered requests a minute",
            f"cached   {found.cached_share:.1%} of {found.prompt_tokens} prompt tokens",
            f"ended    {ends}",
        ]
    )


def stage_table(found: Figures) -> str:
    """Time in each stage."""
    rows = [["stage", "mean", "p50", "p90", "p99", "max"]]
    rows += [_spread_row(name.lower(), values) for name, values in found.stages.items()]
    return table(rows)


def _worker_table(workers: Iterable[WorkerFigures]) -> str:
    rows = [["worker", "busy", "computed", "cached", "generated", "batch", "KV peak", "preempted"]]
    for worker in workers:
        rows.append(
            [
                worker.name,
                f"{worker.utilisation:.1%}",
                str(worker.prefill_tokens),
                str(worker.cached_tokens),
                str(worker.generated_tokens),
                f"{worker.mean_batch:.1f}",
                f"{worker.kv_peak:.1%}",
                str(worker.preemptions),
            ]
        )
    return table(rows)


_QUEUE_ROWS: Final = 8


def _queue_table(points: Sequence[QueuePoint]) -> str:
    """The queues over time: means over equal parts of the run."""
    rows = [["seconds", "waiting", "tokens", "in workers", "P busy with", "D busy with"]]
    size = max(1, -(-len(points) // _QUEUE_ROWS))
    for begin in range(0, len(points), size):
        part = points[begin : begin + size]
        sums = [
            sum(getattr(point, name) for point in part) / len(part)
            for name in ("waiting", "waiting_tokens", "engine_waiting", "running_prefill", "running_decode")
        ]
        rows.append([f"{part[0].at:.0f} to {part[-1].at:.0f}", *(f"{value:.1f}" for value in sums)])
    return table(rows)


def outages_text(outages: Sequence[Outage], found: OutageFigures) -> str:
    """Who was down when, and what came of it."""
    downs = [f"{o.worker} from {o.begin:.4g} s" + (" on" if o.end is None else f" to {o.end:.4g} s") for o in outages]
    shown = ", ".join(downs[:10]) + (f" and {len(downs) - 10} more" if len(downs) > 10 else "")
    rows = [["TTFT of requests that came", "mean", "p50", "p90", "p99", "max"]]
    rows += [_spread_row("while a worker was down", found.ttft_during), _spread_row("at other times", found.ttft_else)]
    return (
        f"outages  {shown}\n"
        f"         {found.touched} requests lived during them; {found.retried} retried, {found.resumed} answers "
        f"continued elsewhere, {found.failed} not answered whole\n\n{table(rows)}"
    )


def comparison(reports: Sequence[Report]) -> str:
    """Several runs of one workload side by side; ratios are to the first."""
    rows = [["", "TTFT mean", "p50", "p90", "p99", "TPOT p99", "goodput", "answered", "cached", "P busy", "D busy"]]
    first = reports[0].figures
    for report in reports:
        rows.append(_comparison_row(report, first))
    return table(rows)


def _comparison_row(report: Report, first: Figures) -> list[str]:
    found = report.figures
    cells = [report.title]
    ttft, base = found.ttft, first.ttft
    for name in ("mean", "p50", "p90", "p99"):
        cells.append(_with_ratio(getattr(ttft, name, None), getattr(base, name, None)))
    cells.append(_with_ratio(getattr(found.tpot, "p99", None), getattr(first.tpot, "p99", None)))
    ratio = f" ({first.goodput / found.goodput:.2f})" if found is not first and found.goodput else ""
    cells.append(f"{found.goodput:.2f}/s{ratio}")
    cells.append(f"{found.outcomes.get('completed', 0) / found.requests:.1%}")
    cells.append(f"{found.cached_share:.1%}")
    cells += [_busy(report.workers, decode=False), _busy(report.workers, decode=True)]
    return cells


def _with_ratio(value: float | None, base: float | None) -> str:
    """The value, and what the first row's is of it."""
    if value is None:
        return "-"
    text = seconds_text(value)
    return text if base is None or base == value or not value else f"{text} ({base / value:.2f})"


def _busy(workers: Iterable[WorkerFigures], decode: bool) -> str:
    chosen = [w.utilisation for w in workers if (w.role == "decode") is decode]
    return f"{sum(chosen) / len(chosen):.0%}" if chosen else "-"
