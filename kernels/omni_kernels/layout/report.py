"""A plan in words and as plain data. Formats only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from omni_kernels.device import Device
from omni_kernels.layout.choose import Plan, ttft
from omni_kernels.layout.cost import Estimate
from omni_kernels.layout.sizes import ModelSizes


def device_line(device: Device) -> str:
    """One device that was found."""
    unit = {"cpu": "cores", "cuda": "multiprocessors", "npu": "AI cores"}[device.kind]
    memory = f"{_gb(device.free_bytes)} of {_gb(device.memory_bytes)} GB free"
    name = "CPU" if device.kind == "cpu" else f"{device.kind}:{device.index}"
    parts = [f"{name}: {device.name}", f"{device.cores} {unit}", memory]
    if device.features:
        parts.append(" ".join(device.features))
    if device.kind != "cpu":
        peers = ", ".join(map(str, device.peers))
        parts.append(f"reads the memory of {peers}" if peers else "reads no other's memory")
    return ", ".join(parts)


def model_line(model: ModelSizes) -> str:
    """The model's size."""
    kind = f"{model.experts} experts top-{model.top_k}" if model.experts else "dense"
    weights = _gb(model.parameters * model.weight_bytes)
    kv = model.layers * model.kv_bytes(1) / 1e3
    return (
        f"{model.name}: {_count(model.parameters)} parameters ({_count(model.active)} active), {model.layers} layers, "
        f"{kind}; weights {weights} GB as {model.weight_type}; KV cache {kv:.3g} kB a token"
    )


def plan_lines(plan: Plan) -> list[str]:
    """The layout with memory and times."""
    chip, devices, work = plan.devices.chip, plan.devices, plan.workload
    total = f"{devices.count} x {chip.name}" if chip.kind != "cpu" else f"{devices.count} CPU core(s)"
    ranks = f" = {devices.ranks} dies" if chip.ranks > 1 else ""
    rates = (
        f"{chip.memory_bytes / 1e9:.3g} GB, {chip.read_bytes_s / 1e9:.4g} GB/s, {chip.flop_s / 1e12:.3g} TFLOP/s a rank"
    )
    lines = [f"layout for {total}{ranks} ({rates})"]
    if plan.prefill is not None:
        lines += _instance(plan, plan.prefill, plan.prefill_count, "prefill")
    lines += _instance(plan, plan.decode, plan.decode_count, "decode" if plan.prefill else "mixed")
    idle = devices.ranks - plan.used_ranks
    lines.append(
        f"together: {plan.requests_s:.3g} requests/s of {work.prompt_tokens} prompt tokens "
        f"({work.cached_share:.0%} cached) and {work.output_tokens} output tokens, "
        f"{plan.requests_s * work.output_tokens:.0f} output tokens/s; {idle} rank(s) idle"
    )
    if not plan.within_limits:
        lines.append(
            f"note: no layout keeps TPOT {work.tpot_s * 1e3:.3g} ms and TTFT {work.ttft_s * 1e3:.4g} ms; "
            "this is the nearest"
        )
    return lines


def _instance(plan: Plan, estimate: Estimate, count: int, role: str) -> list[str]:
    layout, model, chip = estimate.layout, plan.model, plan.devices.chip
    sizes = [f"TP {layout.tp}", f"DP {layout.dp}"]
    if model.experts and layout.ranks > 1:
        sizes.append(f"EP {layout.ranks}: {layout.slots} experts a rank, {layout.redundant(model)} redundant copies")
    unit = "thread(s)" if chip.kind == "cpu" else "rank(s)"
    lines = [f"  {count} x {role} of {layout.ranks} {unit}: {', '.join(sizes)}"]
    memory = f"weights {_gb(estimate.weight_bytes)} + KV {_gb(estimate.kv_bytes)} of {_gb(chip.memory_bytes)} GB a rank"
    rate = f"{estimate.tokens_s * count:.0f} tokens/s in all, {estimate.per_rank:.4g} a rank"
    if role == "prefill":
        first = ttft(estimate, plan.workload) * 1e3
        shown = f"{estimate.batch} tokens a group in {estimate.step_s * 1e3:.4g} ms, TTFT {first:.4g} ms"
    else:
        shown = f"{estimate.batch} sequences a group, TPOT {estimate.step_s * 1e3:.3g} ms"
    lines += [f"    memory: {memory}", f"    time: {shown}; {rate}"]
    return lines


def plan_data(plan: Plan, found: Sequence[Device]) -> dict[str, Any]:
    """The same as plain data."""
    return {
        "found": [asdict(device) for device in found],
        "model": {**asdict(plan.model), "parameters": plan.model.parameters, "active": plan.model.active},
        "devices": {"count": plan.devices.count, "ranks": plan.devices.ranks, "chip": asdict(plan.devices.chip)},
        "workload": asdict(plan.workload),
        "prefill": _estimate_data(plan, plan.prefill, plan.prefill_count) if plan.prefill else None,
        "decode" if plan.prefill else "mixed": _estimate_data(plan, plan.decode, plan.decode_count),
        "requests_s": plan.requests_s,
        "within_limits": plan.within_limits,
    }


def _estimate_data(plan: Plan, estimate: Estimate, count: int) -> dict[str, Any]:
    layout = estimate.layout
    sizes = {**asdict(layout), "dp": layout.dp, "redundant": layout.redundant(plan.model)}
    return {"instances": count, **asdict(estimate), "layout": sizes}


def _gb(value: float) -> str:
    return f"{value / 1e9:.3g}"


def _count(value: float) -> str:
    return f"{value / 1e9:.3g} B" if value >= 1e9 else f"{value / 1e6:.3g} M"
