"""The table: one row for each gateway, the median over seeds, and ratios to the best peer."""

from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.routing.measure import Result
from omni_proxy.sim.report import seconds_text, table

OURS = "omni-proxy"
_HEAD = (
    "", "TTFT mean", "p50", "p90", "p99", "TPOT mean", "p99", "goodput", "cached", "completed", "rejected", "errors",
    "gateway CPU",
)  # fmt: skip


def report(results: Sequence[Result]) -> str:
    """All loads, one table each, with what is to be said below it."""
    parts = []
    for load in sorted({r.load for r in results}):
        chosen = [r for r in results if r.load == load]
        seeds = len({r.seed for r in chosen})
        parts.append(f"Load {load:g}, median of {seeds} slice{'s' if seeds > 1 else ''}")
        parts.append(_table(chosen))
        parts += [line for line in (*_verdicts(chosen), _noise(chosen)) if line]
        parts += [f"{r.gateway}: {fault}" for r in chosen for fault in r.faults[:2]]
        parts += [f"{r.gateway}: no figures: {r.reason}" for r in chosen if r.figures is None]
    return "\n\n".join(parts)


def _by_gateway(results: Sequence[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.gateway, []).append(result)
    return found


def _table(results: Sequence[Result]) -> str:
    rows = [list(_HEAD)]
    for name, mine in _by_gateway(results).items():
        rows.append(_row(name, [r for r in mine if r.figures is not None and r.figures.ttft is not None]))
    return table(rows)


def _row(name: str, results: Sequence[Result]) -> list[str]:
    if not results:
        return [name, *["-"] * (len(_HEAD) - 1)]
    cells = [name]
    cells += [seconds_text(ttft(results, which)) for which in ("mean", "p50", "p90", "p99")]
    tpots = [r.figures.tpot for r in results if r.figures is not None and r.figures.tpot is not None]
    cells += [seconds_text(median(getattr(t, which) for t in tpots)) if tpots else "-" for which in ("mean", "p99")]
    cells.append(f"{goodput(results):.2f}/s")
    cells.append(f"{median(r.cached_share for r in results):.1%}")
    for outcomes in (("completed",), ("rejected",), ("error", "cut", "timeout")):
        cells.append(str(sum(_count(r, name) for r in results for name in outcomes)))
    return [*cells, f"{median(r.gateway_cpu_s for r in results):.1f} s"]


def _count(result: Result, outcome: str) -> int:
    return 0 if result.figures is None else result.figures.outcomes.get(outcome, 0)


def ttft(results: Sequence[Result], which: str) -> float:
    """The median over seeds of one number of TTFT."""
    spreads = [r.figures.ttft for r in results if r.figures is not None and r.figures.ttft is not None]
    return median(float(getattr(spread, which)) for spread in spreads)


def goodput(results: Sequence[Result]) -> float:
    """The median over seeds."""
    return median(r.figures.goodput for r in results if r.figures is not None)


def _verdicts(results: Sequence[Result]) -> list[str]:
    """Ours against the best peer, number by number: first those with PD, then those whose workers do both."""
    found = {
        name: mine
        for name, every in _by_gateway(results).items()
        if (mine := [r for r in every if r.figures is not None and r.figures.ttft is not None])
    }
    ours = found.pop(OURS, None)
    if ours is None:
        return []
    with_pd = {name: mine for name, mine in found.items() if mine[0].pd}
    without = {name: mine for name, mine in found.items() if not mine[0].pd}
    kinds = (("the best peer with PD", with_pd), ("without PD, where every worker does both", without))
    return [_verdict(kind, ours, peers) for kind, peers in kinds if peers]


def _verdict(kind: str, ours: Sequence[Result], peers: Mapping[str, Sequence[Result]]) -> str:
    parts = []
    for which in ("mean", "p50", "p90", "p99"):
        best = min(peers, key=lambda name: ttft(peers[name], which))
        ratio = ttft(ours, which) / ttft(peers[best], which)
        parts.append(f"TTFT {which} {ratio:.2f} ({best}{'' if ratio < 1 else ' wins'})")
    best = max(peers, key=lambda name: goodput(peers[name]))
    other = goodput(peers[best])
    parts.append(f"goodput {goodput(ours) / other:.2f} ({best})" if other else "goodput: nobody has any")
    return f"omni-proxy to {kind}: {', '.join(parts)}."


def _noise(results: Sequence[Result]) -> str:
    latest = max((r.lag_p99_s for r in results), default=0.0)
    return f"The client was late by {seconds_text(latest)} at p99, at most." if latest else ""
