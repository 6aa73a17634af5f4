"""A state as lines of a terminal. Pure: knows no terminal and no gateway.

Whatever comes from outside is shown without control characters: a request's id cannot move the cursor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Final

from omni_proxy.messages import Stage
from omni_proxy.ui.points import Point
from omni_proxy.ui.rows import Row
from omni_proxy.ui.top.state import SeenWorker, State
from omni_proxy.ui.top.text import Line, Style, bar, clean, count, cut, length, seconds

LEAST_WIDTH: Final = 60
_SPARKS: Final = "▁▂▃▄▅▆▇█"
_ROLES: Final = ("prefill", "decode", "mixed", "encode")
_COMPUTES: Final = {
    Stage.PREFILL_SCHEDULED: "P",
    Stage.PREFILL_RUNNING: "P",
    Stage.DECODE_SCHEDULED: "D",
    Stage.DECODE_RUNNING: "D",
}
_STATES: Final = {"up": Style.GOOD, "down": Style.BAD, "ejected": Style.BAD, "draining": Style.WARN}
_CELLS: Final = {"P": Style.PREFILL, "D": Style.DECODE, "X": Style.BOTH, ".": Style.DIM, " ": Style.PLAIN}


def render(state: State, width: int) -> list[Line]:
    """All lines, none wider than `width` (at least LEAST_WIDTH)."""
    width = max(width, LEAST_WIDTH)
    lines = [*_figures(state, width), [], *_charts(state.points, width)]
    for role in _ROLES:
        pool = sorted((w for w in state.workers if w.current_role == role), key=lambda w: w.name)
        if pool:
            lines += [[], *_pool(role, pool, width)]
    if not state.workers:
        lines += [[], [("No worker is a member.", Style.DIM)]]
    lines += _experts(state)
    lines += [[], *_requests(state, width)]
    return [cut(line, width) for line in lines]


def _figures(state: State, width: int) -> list[Line]:
    ready = ("ready", Style.GOOD) if state.ready else ("not ready to serve", Style.BAD)
    title: Line = [("Omni Proxy ", Style.STRONG), (clean(state.version), Style.DIM), ("   ", Style.PLAIN), ready]
    lines: list[Line] = [title, []]
    for name, value in _values(state):
        style = Style.BAD if name == "failed" and state.window.failed else Style.STRONG
        pieces: Line = [(f"{name} ", Style.DIM), (value, style)]
        if length(lines[-1]) + length(pieces) + 3 > width:
            lines.append([])
        lines[-1] += ([("   ", Style.PLAIN)] if lines[-1] else []) + pieces
    return lines


def _values(state: State) -> list[tuple[str, str]]:
    recent = state.window
    rate = 1 / recent.seconds
    share = recent.cached_tokens / recent.prompt_tokens if recent.prompt_tokens else None
    return [
        ("waiting", f"{count(state.waiting)} ({count(state.waiting_tokens)} tok)"),
        ("live", count(state.live_count)),
        ("goodput", f"{recent.good * rate:.1f}/s of {recent.ended * rate:.1f}/s"),
        ("ttft", f"{seconds(recent.ttft_p50_s)} p95 {seconds(recent.ttft_p95_s)}"),
        ("tpot", f"{seconds(recent.tpot_p50_s)} p95 {seconds(recent.tpot_p95_s)}"),
        ("cached", "-" if share is None else f"{share:.0%}"),
        ("output", f"{recent.generated_tokens * rate:.0f} tok/s"),
        ("failed", str(recent.failed)),
    ]


def _charts(points: Sequence[Point], width: int) -> list[Line]:
    shown = points[-max(width - 28, 8) :]
    charts: list[tuple[str, Callable[[Point], float | None], Callable[[float | None], str]]] = [
        ("ttft p50", lambda p: p.ttft_p50_s, seconds),
        ("tpot p50", lambda p: p.tpot_p50_s, seconds),
        ("goodput", lambda p: p.good / p.seconds, lambda v: "-" if v is None else f"{v:.1f}/s"),
    ]
    lines: list[Line] = []
    for name, of, show in charts:
        values = [of(p) for p in shown]
        most = max((v for v in values if v is not None), default=None)
        chart = (_spark(values, most), Style.PREFILL)
        lines.append([(f"{name:9}", Style.DIM), chart, (f" max {show(most)}", Style.DIM)])
    return lines


def _spark(values: Sequence[float | None], most: float | None) -> str:
    top = most or 1.0
    return "".join(" " if v is None else _SPARKS[min(int(v / top * 8), 7)] for v in values)


def _pool(role: str, pool: Sequence[SeenWorker], width: int) -> list[Line]:
    names = max(10, min(max(len(w.name) for w in pool), width - 64))
    bars = max(4, min(16, (width - names - 60) // 2))
    head = f"{role.capitalize():{names + 1}} {'state':9}{'running':{bars + 9}}{'prompt':>7}  "
    head += f"{'KV tokens':{bars + 20}}free in"
    lines: list[Line] = [[(head, Style.STRONG)]]
    for worker in pool:
        lines.append(_worker(worker, names, bars))
        if worker.state != "up" and worker.reason:
            lines.append([(f"   {clean(worker.reason)}", Style.DIM)])
    return lines


def _worker(w: SeenWorker, names: int, bars: int) -> Line:
    decodes = w.current_role == "decode"
    colour = Style.DECODE if decodes else Style.PREFILL
    free = "-" if decodes else seconds(w.prefill_free_s) if w.prefill_free_s > 0 else "now"
    return [
        (f" {_short(w.name, names):{names}} ", Style.PLAIN),
        (f"{clean(w.state):9}", _STATES.get(w.state, Style.PLAIN)),
        *bar(w.sequences, w.max_sequences, bars, colour),
        (f" {w.sequences}/{w.max_sequences}".ljust(9), Style.PLAIN),
        (f"{count(w.prefill_tokens):>7}  ", Style.PLAIN),
        *bar(w.kv_tokens, w.kv_capacity_tokens, bars, colour),
        (_kv(w).ljust(19) + " ", Style.PLAIN),
        (free, Style.PLAIN),
    ]


def _kv(w: SeenWorker) -> str:
    whole = "" if w.kv_capacity_tokens is None else f"/{count(w.kv_capacity_tokens)}"
    stranded = f" !{count(w.stranded_kv_tokens)}" if w.stranded_kv_tokens else ""
    return f" {count(w.kv_tokens)}{whole}{stranded}"


def _experts(state: State) -> list[Line]:
    lines: list[Line] = []
    for heat in state.experts or ():
        mean = sum(heat.imbalance) / len(heat.imbalance)
        worst = max(range(len(heat.imbalance)), key=heat.imbalance.__getitem__)
        said = f"{len(heat.layers)} layers x {heat.experts}, max/mean {mean:.2f}, "
        said += f"{heat.imbalance[worst]:.2f} in layer {heat.layers[worst]}, {heat.idle} idle"
        lines.append([("experts  ", Style.DIM), (f"{clean(heat.worker)}: {said}", Style.PLAIN)])
    return [[], *lines] if lines else []


def _requests(state: State, width: int) -> list[Line]:
    rows = [*sorted(state.live, key=lambda r: -r.arrived), *state.ended]
    if not rows:
        return [[("No request has come yet.", Style.DIM)]]
    ways = max(7, min(22, max(len(_way(row)) for row in rows)))
    bars = max(width - ways - 51, 6)
    scale = max(max(row.e2e_s for row in rows), 0.01)
    head = f"{'Requests':15}{'workers':{ways + 1}}{f'0 … {seconds(scale)}':{bars}} {'ttft':>8}{'total':>8}  state"
    return [[(head, Style.STRONG)], *(_request(row, ways, bars, scale) for row in rows)]


def _request(row: Row, ways: int, bars: int, scale: float) -> Line:
    outcome = row.outcome or row.stage.lower().replace("_", " ")
    style = {None: Style.PREFILL, "completed": Style.DIM, "cancelled": Style.DIM}.get(row.outcome, Style.BAD)
    return [
        (f" {_short(row.id, 13):13} {_short(_way(row), ways):{ways}} ", Style.PLAIN),
        *_stages(row, bars, scale),
        (f" {seconds(row.ttft_s):>8}{seconds(row.e2e_s):>8}  ", Style.PLAIN),
        (clean(outcome), style),
    ]


def _way(row: Row) -> str:
    return " → ".join(worker for worker in (row.prefill, row.decode) if worker is not None) or "-"


def _stages(row: Row, width: int, scale: float) -> Line:
    """One character for each stretch of time: P or D computes, both do (X), or it waits (.)."""
    cells = [" "] * width
    for number, begin, lasts in row.spans:
        kind = _COMPUTES.get(Stage(number), ".")
        first = min(int(begin / scale * width), width - 1)
        end = min(width, max(first + (lasts > 0), round((begin + lasts) / scale * width)))
        for at in range(first, end):
            cells[at] = "X" if row.mode == "parallel" and {cells[at], kind} == {"P", "D"} else kind
    return [("".join(group), _CELLS[kind]) for kind, group in groupby(cells)]


def _short(text: str, width: int) -> str:
    text = clean(text)
    return text if len(text) <= width else text[: width - 1] + "…"
