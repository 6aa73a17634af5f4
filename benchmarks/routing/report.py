"""The table: one row for each gateway, the median over seeds, and ratios to the best peer.

The last column tells how busy cores were at most: the gateway's, and that of workers and client.
"""

from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.routing.measure import Result
from omni_proxy.sim.report import seconds_text, table

OURS = ("omni-proxy", "omni-proxy, TPOT limit")
_HEAD = (
    "", "TTFT mean", "p50", "p90", "p99", "TPOT mean", "p99", "goodput", "cached", "completed", "rejected", "errors",
    "gateway CPU", "cores",
)  # fmt: skip


def report(results: Sequence[Result]) -> str:
    """All loads, one table each, with what is to be said below it."""
    parts = []
    for load in sorted({r.load for r in results}):
        chosen = [r for r in results if r.load == load]
        seeds = len({r.seed for r in chosen})
        parts.append(f"Load {load:g}, median of {seeds} slice{'s' if seeds > 1 else ''}")
        parts.append(_table(chosen))
        parts += _verdicts(chosen)
        parts += _unfair(chosen)
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
    busy = [max(of(r) for r in results) for of in (_gateway_core, _other_cores)]
    return [*cells, f"{median(r.gateway_cpu_s for r in results):.1f} s", "/".join(f"{share:.0%}" for share in busy)]


def _gateway_core(result: Result) -> float:
    return result.shares.gateway


def _other_cores(result: Result) -> float:
    """Of workers and client."""
    return result.shares.workers + result.shares.client


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
    ours = {name: found.pop(name) for name in OURS if name in found}
    with_pd = {name: mine for name, mine in found.items() if mine[0].pd}
    without = {name: mine for name, mine in found.items() if not mine[0].pd}
    kinds = (("the best peer with PD", with_pd), ("without PD, where every worker does both", without))
    return [_verdict(name, kind, mine, peers) for name, mine in ours.items() for kind, peers in kinds if peers]


def _verdict(name: str, kind: str, ours: Sequence[Result], peers: Mapping[str, Sequence[Result]]) -> str:
    parts = []
    for which in ("mean", "p50", "p90", "p99"):
        best = min(peers, key=lambda name: ttft(peers[name], which))
        ratio = ttft(ours, which) / ttft(peers[best], which)
        parts.append(f"TTFT {which} {ratio:.2f} ({best}{'' if ratio < 1 else ' wins'})")
    best = max(peers, key=lambda name: goodput(peers[name]))
    other = goodput(peers[best])
    parts.append(f"goodput {goodput(ours) / other:.2f} ({best})" if other else "goodput: nobody has any")
    return f"{name} to {kind}: {', '.join(parts)}."


def _unfair(results: Sequence[Result]) -> list[str]:
    """Which runs were disturbed or saturated; one line where none was."""
    measured = [r for r in results if r.figures is not None]
    if not measured:
        return []
    found = [
        f"Not to be trusted: {r.gateway}, slice {r.seed}: {'; '.join(faults)}."
        for r in measured
        if (faults := r.shares.faults(r.lag_p99_s))
    ]
    latest = max(r.lag_p99_s for r in measured)
    foreign = max(r.shares.foreign for r in measured)
    quiet = f"The client was late by at most {seconds_text(latest)} at p99; others used at most {foreign:.0%}."
    return [*found, quiet]
