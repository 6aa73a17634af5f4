"""A report as one HTML page that needs nothing else: tables, and plots as inline SVG by matplotlib (extra [bench])."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from omni_proxy.config import ConfigError
from omni_proxy.sim.figures import Spread
from omni_proxy.sim.report import Report, WorkerFigures, comparison, outages_text, seconds_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS: Final = 400
"""Points of one curve: enough for the eye, few enough for a small page."""
_STYLE: Final = """
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}
table{border-collapse:collapse;margin:.5rem 0}
th,td{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #d8dee4}
th:first-child,td:first-child{text-align:left}th{font-weight:600;color:#57606a}
svg{width:100%;height:auto}pre{background:#f6f8fa;padding:.7rem;overflow-x:auto}
"""


def to_html(reports: Sequence[Report]) -> str:
    """One page about one run, or about several of the same workload. Raises ConfigError without matplotlib."""
    first = reports[0]
    body = [f"<h1>{_text(first.workload)} on {_text(first.cluster)}</h1>"]
    if len(reports) > 1:
        body += ["<h2>Comparison</h2>", f"<pre>{_text(comparison(reports))}</pre>"]
    body.append(_plots(reports))
    for report in reports:
        body += _tables(report)
    settings = "\n".join(f"{key}: {value}" for key, value in first.settings.items())
    body += ["<h2>Settings</h2>", f"<pre>{_text(settings)}</pre>"]
    head = f"<meta charset='utf-8'><title>{_text(first.workload)}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(body)}</body></html>\n"


def _text(value: str) -> str:
    return html.escape(value, quote=False)


def _tables(report: Report) -> list[str]:
    found = report.figures
    latencies = [("TTFT", found.ttft), ("TPOT", found.tpot), ("E2E", found.e2e)]
    stages: list[tuple[str, Spread | None]] = [(name.lower(), values) for name, values in found.stages.items()]
    workers = [_worker_row(worker) for worker in report.workers]
    ends = ", ".join(f"{count} {name}" for name, count in found.outcomes.items())
    facts = (
        f"Goodput {found.goodput:.2f} requests/s (TTFT ≤ {seconds_text(found.slo.ttft)}, TPOT ≤ "
        f"{seconds_text(found.slo.tpot)}: {found.attained:.1%} of all), {found.qpm:.0f} answered a minute, "
        f"{found.cached_share:.1%} of prompt tokens cached; {ends}."
    )
    outages = []
    if report.outage_figures is not None:
        outages.append(f"<pre>{_text(outages_text(report.outages, report.outage_figures))}</pre>")
    return [
        f"<h2>{_text(report.title)}</h2><p>{_text(facts)}</p>",
        _spreads("latency", latencies),
        _spreads("stage", stages),
        _table(["worker", "busy", "computed", "cached", "generated", "batch", "KV peak", "preempted"], workers),
        *outages,
    ]


def _worker_row(worker: WorkerFigures) -> list[str]:
    counts = (worker.prefill_tokens, worker.cached_tokens, worker.generated_tokens)
    shares = (f"{worker.mean_batch:.1f}", f"{worker.kv_peak:.1%}", str(worker.preemptions))
    return [worker.name, f"{worker.utilisation:.1%}", *map(str, counts), *shares]


def _spreads(name: str, rows: Sequence[tuple[str, Spread | None]]) -> str:
    filled = [
        [label, *map(seconds_text, (values.mean, values.p50, values.p90, values.p99, values.max))]
        for label, values in rows
        if values is not None
    ]
    return _table([name, "mean", "p50", "p90", "p99", "max"], filled)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{_text(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{_text(cell)}</td>" for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


# ------------------------------------------------------------------------------------------------- plots


def _plots(reports: Sequence[Report]) -> str:
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise ConfigError("--html needs the extra [bench]: pip install 'omni-proxy[bench]'") from exc
    # The salt makes the ids inside the SVG, and with them the page, the same for the same run.
    with rc_context({"svg.hashsalt": "omni-proxy", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(11, 10.5), layout="constrained")
        axes: Any = figure.subplots(3, 2)
        _distribution(axes[0][0], reports, "ttft", "TTFT, seconds")
        _distribution(axes[0][1], reports, "tpot", "TPOT, seconds")
        _over_time(axes[1][0], reports)
        _queue(axes[1][1], reports)
        _stages(axes[2][0], reports[0])
        _utilisation(axes[2][1], reports[0])
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _thin(values: Sequence[Any]) -> list[Any]:
    """About `_POINTS` of the values, the last among them."""
    step = max(1, len(values) // _POINTS)
    kept = list(values[::step])
    return kept if not values or kept[-1] is values[-1] else [*kept, values[-1]]


def _distribution(axes: Axes, reports: Sequence[Report], name: str, label: str) -> None:
    for report in reports:
        values = sorted(v for found in report.latencies if (v := getattr(found, name)) is not None and v > 0)
        points = _thin([(value, (rank + 1) / len(values)) for rank, value in enumerate(values)])
        axes.plot([p[0] for p in points], [p[1] for p in points], label=report.title)
    axes.axvline(getattr(reports[0].figures.slo, name), color="0.5", linestyle=":", linewidth=1)
    axes.set(xscale="log", xlabel=label, ylabel="share of requests", ylim=(0, 1))
    if len(reports) > 1:
        axes.legend()


def _over_time(axes: Axes, reports: Sequence[Report]) -> None:
    """Mean TTFT of those that arrived in the same hundredth of the run."""
    for report in reports:
        width = max(report.figures.seconds / 100, 1e-9)
        sums: dict[int, list[float]] = {}
        for found in report.latencies:
            sums.setdefault(int(found.at / width), []).append(found.ttft)
        bins = sorted(sums)
        axes.plot([b * width for b in bins], [sum(sums[b]) / len(sums[b]) for b in bins], label=report.title)
    axes.set(xlabel="arrival, seconds", ylabel="mean TTFT, seconds", ylim=(0, None))


def _queue(axes: Axes, reports: Sequence[Report]) -> None:
    for report in reports:
        points = _thin(report.queues)
        axes.plot([p.at for p in points], [p.waiting + p.engine_waiting for p in points], label=report.title)
    axes.set(xlabel="seconds", ylabel="requests waiting, gateway and workers", ylim=(0, None))


def _stages(axes: Axes, report: Report) -> None:
    stages = [(name, values) for name, values in report.figures.stages.items() if values.mean > 0]
    axes.barh([name.lower() for name, _ in stages], [values.mean for _, values in stages])
    axes.invert_yaxis()
    axes.set(xlabel=f"mean seconds in stage ({report.title})")


def _utilisation(axes: Axes, report: Report) -> None:
    names = [worker.name for worker in report.workers]
    axes.barh(names, [worker.utilisation for worker in report.workers])
    axes.invert_yaxis()
    axes.set(xlabel=f"share of time busy ({report.title})", xlim=(0, 1))
