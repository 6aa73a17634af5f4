"""Picks a layout: the best batch of every candidate in each role, then how many instances of which for P and for D.

What counts is requests per second within the limits; of plans that are nearly as good the one with smaller instances,
which lose less with a lost device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from omni_kernels.layout import cost
from omni_kernels.layout.chips import Chip, Devices
from omni_kernels.layout.cost import Estimate, Layout, Workload
from omni_kernels.layout.errors import LayoutError
from omni_kernels.layout.sizes import ModelSizes

NEARLY: Final = 0.97
MOST_BATCH: Final = 1024
CHUNKS: Final = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Prompt tokens of a step that are tried."""
ACTIVATION_ROWS: Final = 24.0
"""Hidden rows of 16 bits that a token in flight takes, buffers of the exchange included."""
SCRATCH_BYTES: Final = 2e9
"""On an accelerator's rank, for graphs and buffers of the libraries."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """What the operator has decided: ranks of an instance, by role."""

    prefill: int | None = None
    decode: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The layout chosen. Without `prefill` the decode instances do both."""

    model: ModelSizes
    devices: Devices
    workload: Workload
    prefill: Estimate | None
    prefill_count: int
    decode: Estimate
    decode_count: int
    requests_s: float

    @property
    def used_ranks(self) -> int:
        """Ranks that have work."""
        prefill = self.prefill.layout.ranks * self.prefill_count if self.prefill else 0
        return prefill + self.decode.layout.ranks * self.decode_count

    @property
    def within_limits(self) -> bool:
        """Whether both times keep the workload's limits."""
        late = self.prefill is not None and ttft(self.prefill, self.workload) > self.workload.ttft_s
        return self.decode.step_s <= self.workload.tpot_s and not late


def ttft(estimate: Estimate, workload: Workload) -> float:
    """Seconds that the prompt of one request takes, its group's steps one after the other."""
    return estimate.step_s * max(1.0, -(-workload.computed_tokens // estimate.batch))


def choose(model: ModelSizes, devices: Devices, workload: Workload, pinned: Pinned = Pinned()) -> Plan:
    """The best plan. Raises LayoutError when the model does not fit, or a pinned size cannot be."""
    decodes = _best_by_ranks(model, devices, workload, pinned.decode, "decode")
    prefills = _best_by_ranks(model, devices, workload, pinned.prefill, "prefill")
    plans = list(_split(model, devices, workload, prefills, decodes))
    if pinned == Pinned():
        plans += _mixed(model, devices, workload, prefills)
    if not plans:
        least = min(p.layout.ranks for p in prefills) + min(d.layout.ranks for d in decodes)
        raise LayoutError(f"devices: prefill and decode instances need {least} ranks, got {devices.ranks}")
    kept = [plan for plan in plans if plan.within_limits] or plans
    most = max(plan.requests_s for plan in kept)
    near = [plan for plan in kept if plan.requests_s >= NEARLY * most]
    return min(near, key=lambda plan: (_largest(plan), -plan.requests_s))


def _largest(plan: Plan) -> int:
    return plan.decode.layout.ranks + (plan.prefill.layout.ranks if plan.prefill else 0)


def _layouts(model: ModelSizes, chip: Chip, ranks: int) -> Iterator[Layout]:
    tp = 1
    while tp <= min(ranks, chip.node_ranks):
        if ranks % tp == 0 and model.heads % tp == 0 and (model.experts or tp == ranks):
            for slots in {cost.slots_for(model, ranks), cost.slots_for(model, ranks, 0.0)}:
                yield Layout(ranks, tp, slots)
        tp *= 2


def _sizes(model: ModelSizes, chip: Chip, total: int) -> list[int]:
    """Ranks of an instance that make sense: powers of two inside a node, then whole nodes while experts last."""
    inside = [1 << i for i in range(12) if 1 << i <= min(total, chip.node_ranks)]
    most = min(total, model.experts + model.experts // 4) if model.experts and chip.kind != "cpu" else 0
    return inside + list(range(2 * chip.node_ranks, most + 1, chip.node_ranks))


def _best_by_ranks(
    model: ModelSizes, devices: Devices, workload: Workload, pinned: int | None, role: str
) -> list[Estimate]:
    """The best estimate for each number of ranks; those within the limit if there are any.

    Copies of experts are dropped only where the model does not fit with them.
    """
    sizes = _sizes(model, devices.chip, devices.ranks) if pinned is None else [_checked(pinned, devices, role)]
    found: list[Estimate] = []
    for ranks in sizes:
        made = [
            estimate
            for layout in _layouts(model, devices.chip, ranks)
            if (estimate := estimate_role(model, devices.chip, layout, workload, role)) is not None
        ]
        fewest = cost.slots_for(model, ranks)
        made = [e for e in made if e.layout.slots >= fewest] or made
        kept = [e for e in made if _keeps(e, workload, role)] or made
        if kept:
            found.append(max(kept, key=lambda e: e.per_rank))
    if not found:
        raise _too_small(model, devices, workload, role, pinned)
    return [e for e in found if _keeps(e, workload, role)] or found


def _checked(pinned: int, devices: Devices, role: str) -> int:
    if not 1 <= pinned <= devices.ranks:
        raise LayoutError(f"{role}-ranks: must be from 1 to the {devices.ranks} ranks there are, got {pinned}")
    return pinned


def _keeps(estimate: Estimate, workload: Workload, role: str) -> bool:
    return estimate.step_s <= workload.tpot_s if role == "decode" else ttft(estimate, workload) <= workload.ttft_s


def estimate_role(model: ModelSizes, chip: Chip, layout: Layout, workload: Workload, role: str) -> Estimate | None:
    """The layout at its best batch; None if the weights and one sequence do not fit."""
    scratch = SCRATCH_BYTES if chip.kind != "cpu" else 0.0
    weights = cost.weight_bytes(model, layout)
    room = chip.memory_bytes * cost.USABLE - scratch - weights
    if role == "decode":
        return _decode(model, chip, layout, workload, weights, room)
    return _prefill(model, chip, layout, workload, weights, room)


def _prefill(
    model: ModelSizes,
    chip: Chip,
    layout: Layout,
    workload: Workload,
    weights: float,
    room: float,
    longest_s: float = float("inf"),
) -> Estimate | None:
    """The best number of tokens a step: the fastest that keeps the TTFT limit, in steps of at most `longest_s`."""
    best: Estimate | None = None
    for tokens in CHUNKS:
        kv = tokens * model.layers * model.kv_bytes(layout.tp)
        held = kv + tokens * model.hidden * 2.0 * ACTIVATION_ROWS
        step = cost.prefill_step(model, chip, layout, tokens, workload.prompt_tokens)
        needless = tokens >= 4 * workload.computed_tokens or step > longest_s
        if held > room or (tokens > CHUNKS[0] and needless):
            break
        this = Estimate(layout, tokens, step, tokens * layout.dp / step, weights, kv)
        better = best is None or this.per_rank > best.per_rank
        if best is None or (better and ttft(this, workload) <= max(workload.ttft_s, ttft(best, workload))):
            best = this
    return best


def _decode(
    model: ModelSizes, chip: Chip, layout: Layout, workload: Workload, weights: float, room: float
) -> Estimate | None:
    one = (workload.prompt_tokens + workload.output_tokens) * model.layers * model.kv_bytes(layout.tp)
    low, high = 1, min(MOST_BATCH, int(room / one)) if room > 0 else 0
    if high < 1:
        return None
    context = workload.mean_context

    def step(batch: int) -> float:
        return cost.decode_step(model, chip, layout, batch, context)

    while low < high:  # the largest batch within the limit; 1 if none is
        middle = (low + high + 1) // 2
        low, high = (middle, high) if step(middle) <= workload.tpot_s else (low, middle - 1)
    return Estimate(layout, low, step(low), low * layout.dp / step(low), weights, low * one)


def _too_small(model: ModelSizes, devices: Devices, workload: Workload, role: str, pinned: int | None) -> LayoutError:
    """Says how many devices would do."""
    chip = devices.chip
    total = model.parameters * model.weight_bytes / 1e9
    have = f"{pinned} ranks" if pinned is not None else f"{devices.count} x {chip.name}"
    start = f"devices: {model.name} ({total:.3g} GB of weights) does not fit {have} for {role}"
    for ranks in _sizes(model, chip, 1 << 12):
        for layout in _layouts(model, chip, ranks):
            if ranks > (pinned or devices.ranks) and estimate_role(model, chip, layout, workload, role) is not None:
                return LayoutError(f"{start}: needs {-(-ranks // chip.ranks)} x {chip.name} an instance")
    return LayoutError(f"{start} of {chip.memory_bytes / 1e9:.3g} GB a rank, however many there are")


def _split(
    model: ModelSizes, devices: Devices, workload: Workload, prefills: list[Estimate], decodes: list[Estimate]
) -> Iterator[Plan]:
    """Plans with instances of their own for each role."""
    total = devices.ranks
    for prefill in prefills:
        for decode in decodes:
            p, d = prefill.layout.ranks, decode.layout.ranks
            if p + d > total:
                continue
            made = prefill.tokens_s / workload.computed_tokens
            spent = decode.tokens_s / workload.output_tokens
            ideal = int(total / (d + p * spent / made))
            for count in {max(1, min(ideal + more, (total - p) // d)) for more in (0, 1)}:
                others = (total - count * d) // p
                wanted = min(others, -(-count * spent // made))
                others = max(1, int(wanted)) if wanted * made >= count * spent else others
                rate = min(others * made, count * spent)
                yield Plan(model, devices, workload, prefill, others, decode, count, rate)


def _mixed(model: ModelSizes, devices: Devices, workload: Workload, prefills: list[Estimate]) -> Iterator[Plan]:
    """Plans whose instances do both: each token waits for one chunk of a prompt, so both get half of TPOT's limit."""
    halved = replace(workload, tpot_s=workload.tpot_s / 2)
    chip = devices.chip
    for layout in (prefill.layout for prefill in prefills):
        decode = estimate_role(model, chip, layout, halved, "decode")
        if decode is None:
            continue
        room = chip.memory_bytes * cost.USABLE - decode.weight_bytes - decode.kv_bytes
        prefill = _prefill(model, chip, layout, workload, decode.weight_bytes, room, halved.tpot_s)
        if prefill is None:
            continue
        count = devices.ranks // layout.ranks
        seconds = workload.computed_tokens / prefill.tokens_s + workload.output_tokens / decode.tokens_s
        yield Plan(model, devices, workload, None, 0, decode, count, count / seconds)
