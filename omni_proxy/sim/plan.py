"""`omni-proxy plan`: which split into prefill and decode workers meets latency limits, and how few workers do.

Every point is a simulation of the whole workload with the live scheduler. Points are looked at in a fixed order and
each once, so the same question has the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec import Struct

from omni_proxy.config import ConfigError
from omni_proxy.messages import Role
from omni_proxy.sim.engine_model import EngineModel
from omni_proxy.sim.figures import Figures, Slo, percentile
from omni_proxy.sim.report import seconds_text, table
from omni_proxy.sim.run import Delays
from omni_proxy.sim.setup import known_tokens
from omni_proxy.sim.workload import Workload

Simulate = Callable[[Workload, int, int, Role | None], Figures]
"""A workload on so many P and D; one worker of the role, where one is named, dies in the middle and stays away."""
GROWTH = (1.1, 1.25, 1.5, 2.0, 3.0)
"""By how much the rate is raised to see what breaks."""


class Point(Struct, frozen=True):
    """One split and what came of it."""

    prefill: int
    decode: int
    figures: Figures

    @property
    def workers(self) -> int:
        return self.prefill + self.decode

    @property
    def name(self) -> str:
        return f"{self.prefill}P + {self.decode}D"


class Breaking(Struct, frozen=True):
    """What gives way when the rate grows."""

    factor: float
    limit: str
    """`ttft` or `tpot`: the limit that fewer requests meet."""
    point: Point


class Loss(Struct, frozen=True):
    """What the fewest workers come to when one of them dies in the middle of the workload and stays away."""

    role: Role
    point: Point


class Plan(Struct, frozen=True):
    """The answer."""

    slo: Slo
    attain: float
    curve: tuple[Point, ...]
    """Every split of all workers."""
    fewest: Point | None
    """The fewest workers that meet the limits, or None where even all do not."""
    tried: tuple[Point, ...]
    """Smaller clusters that were tried."""
    breaking: Breaking | None
    losses: tuple[Loss, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """What is to be met: `attain` of all requests within `slo`."""

    slo: Slo
    attain: float

    def met(self, point: Point) -> bool:
        return point.figures.attained >= self.attain


class Planner:
    """Looks for the smallest cluster. `simulate` runs a workload on so many P and D."""

    def __init__(self, workload: Workload, target: Target, simulate: Simulate) -> None:
        self._workload = workload
        self._target = target
        self._simulate = simulate
        self._points: dict[tuple[int, int], Point] = {}

    def plan(self, workers: int) -> Plan:
        """All splits of `workers`, then fewer as long as the limits are met."""
        curve = tuple(self._at(p, workers - p) for p in range(1, workers))
        fewest = _best(filter(self._target.met, curve))
        tried: list[Point] = []
        while fewest is not None and fewest.workers > 2:
            smaller = [self._at(p, d) for p, d in _neighbours(fewest, fewest.workers - 1)]
            tried += smaller
            met = _best(filter(self._target.met, smaller))
            if met is None:
                break
            fewest = met
        if fewest is None:
            return Plan(self._target.slo, self._target.attain, curve, None, tuple(tried), None)
        losses = tuple(Loss(role, self._without(fewest, role)) for role in (Role.PREFILL, Role.DECODE))
        breaking = self._breaking(fewest)
        return Plan(self._target.slo, self._target.attain, curve, fewest, tuple(tried), breaking, losses)

    def _at(self, prefill: int, decode: int) -> Point:
        point = self._points.get((prefill, decode))
        if point is None:
            point = Point(prefill, decode, self._simulate(self._workload, prefill, decode, None))
            self._points[prefill, decode] = point
        return point

    def _without(self, point: Point, role: Role) -> Point:
        found = self._simulate(self._workload, point.prefill, point.decode, role)
        return Point(point.prefill, point.decode, found)

    def _breaking(self, point: Point) -> Breaking | None:
        for factor in GROWTH:
            denser = self._workload.stretched(1 / factor)
            grown = Point(point.prefill, point.decode, self._simulate(denser, point.prefill, point.decode, None))
            if not self._target.met(grown):
                return Breaking(factor, weaker_limit(grown.figures), grown)
        return None


def _neighbours(point: Point, workers: int) -> list[tuple[int, int]]:
    """Splits of `workers` near the proportion of a point."""
    centre = round(point.prefill * workers / point.workers)
    chosen = sorted({min(max(1, p), workers - 1) for p in (centre - 1, centre, centre + 1)})
    return [(p, workers - p) for p in chosen]


def _best(points: Iterable[Point]) -> Point | None:
    return max(points, key=lambda p: (p.figures.attained, p.figures.goodput, -p.prefill), default=None)


def weaker_limit(found: Figures) -> str:
    """The limit that fewer requests meet."""
    return "ttft" if found.ttft_attained <= found.tpot_attained else "tpot"


def check_possible(workload: Workload, model: EngineModel, target: Target) -> None:
    """Raise ConfigError for limits that no number of workers meets: each request alone already takes longer."""
    ttft, tpot = [], []
    for request, known in zip(workload.requests, known_tokens(workload), strict=True):
        ttft.append(_alone_ttft(request.prompt_tokens, known, model))
        if request.output_tokens > 1:
            tpot.append(model.step_s + model.decode_step_s(1, request.prompt_tokens))
    _check("ttft", target.slo.ttft, ttft, target.attain)
    # Answers of one token have no TPOT and meet any limit.
    _check("tpot", target.slo.tpot, tpot + [0.0] * (len(ttft) - len(tpot)), target.attain)


def _alone_ttft(prompt: int, known: int, model: EngineModel) -> float:
    delays = Delays()
    gateway = delays.tokenize_s + delays.tokenize_token_s * prompt + 4 * delays.network_s
    handoff = model.transfer_s(prompt - known) + model.link_s
    first = model.step_s + model.decode_step_s(1, prompt)
    outside = 2 * model.request_s + 2 * model.first_token_s
    return gateway + model.alone_s(prompt - known, known) + handoff + first + outside


def _check(name: str, limit: float, alone: list[float], attain: float) -> None:
    needed = percentile(sorted(alone), attain)
    if needed > limit:
        raise ConfigError(
            f"--slo: {name}={limit:g} cannot be met by any number of workers: {attain:.0%} of the requests, each alone "
            f"on idle workers, need {seconds_text(needed)}, {needed / limit:.1f} times the limit"
        )


# ------------------------------------------------------------------------------------------------ words


def plan_text(plan: Plan) -> str:
    """The answer for a terminal."""
    limits = f"TTFT ≤ {seconds_text(plan.slo.ttft)} and TPOT ≤ {seconds_text(plan.slo.tpot)}"
    parts = [f"Splits of {plan.curve[0].workers} workers, {limits} for {plan.attain:.0%} of requests:"]
    parts.append(_points_table(plan.curve, plan.attain))
    if plan.tried:
        parts += ["Fewer workers:", _points_table(plan.tried, plan.attain)]
    parts.append(_verdict(plan))
    return "\n\n".join(parts)


def _points_table(points: Iterable[Point], attain: float) -> str:
    rows = [["split", "met", "TTFT met", "TPOT met", "TTFT mean", "p90", "TPOT mean", "p90", "goodput", ""]]
    for point in points:
        found = point.figures
        ttft = ["-", "-"] if found.ttft is None else [seconds_text(found.ttft.mean), seconds_text(found.ttft.p90)]
        tpot = ["-", "-"] if found.tpot is None else [seconds_text(found.tpot.mean), seconds_text(found.tpot.p90)]
        shares = [f"{share:.1%}" for share in (found.attained, found.ttft_attained, found.tpot_attained)]
        meets = "meets" if found.attained >= attain else ""
        rows.append([point.name, *shares, *ttft, *tpot, f"{found.goodput:.2f}/s", meets])
    return table(rows)


def _verdict(plan: Plan) -> str:
    if plan.fewest is None:
        best = _best(plan.curve)
        assert best is not None
        found = best.figures
        return (
            f"No split of {best.workers} workers meets the limits. The best, {best.name}, reaches {found.attained:.1%} "
            f"of {plan.attain:.0%}: TTFT {found.ttft_attained:.1%}, TPOT {found.tpot_attained:.1%}."
        )
    lines = [f"Fewest workers: {plan.fewest.workers}, as {plan.fewest.name}."]
    broken = plan.breaking
    if broken is None:
        lines.append(f"Nothing breaks up to {GROWTH[-1]:g} times the rate.")
    else:
        found = broken.point.figures
        share = found.ttft_attained if broken.limit == "ttft" else found.tpot_attained
        side = "prefill" if broken.limit == "ttft" else "decode"
        lines.append(
            f"{broken.limit.upper()} breaks first, at {broken.factor:g} times the rate: {share:.1%} of requests meet "
            f"it there. More {side} workers come next."
        )
    lines += [_loss_text(loss, plan.attain) for loss in plan.losses]
    return "\n".join(lines)


def _loss_text(loss: Loss, attain: float) -> str:
    found = loss.point.figures
    ttft = "" if found.ttft is None else f", mean TTFT {seconds_text(found.ttft.mean)}"
    lost = found.requests - found.outcomes.get("completed", 0)
    kept = "the limits are still met" if found.attained >= attain else f"less than the {attain:.0%} that are asked for"
    shares = f"TTFT {found.ttft_attained:.1%}, TPOT {found.tpot_attained:.1%}"
    return (
        f"When one {loss.role.value} worker dies in the middle and stays away, {found.attained:.1%} of requests meet "
        f"the limits ({shares}){ttft}, {lost} are not answered: {kept}."
    )
