"""`omni-proxy devices`: what this machine has, and the parallel layout for a model on it or on given devices."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from omni_kernels.device import Device, detect
from omni_kernels.layout import LayoutError, Pinned, Workload, choose, parse_devices
from omni_kernels.layout.detected import plannable
from omni_kernels.layout.report import device_line, model_line, plan_data, plan_lines
from omni_kernels.layout.sizes import read_model


def run_devices(options: argparse.Namespace, default_model: Path, out: Callable[[str], object]) -> int:
    """Print what was found and the plan. Raises LayoutError."""
    workload = _workload(options)
    model = read_model(options.model or str(default_model), options.dtype)
    found: tuple[Device, ...] = () if options.devices else detect()
    devices = parse_devices(options.devices) if options.devices else plannable(found)
    plan = choose(model, devices, workload, Pinned(options.prefill_ranks, options.decode_ranks))
    if options.json:
        out(json.dumps(plan_data(plan, found), indent=1))
        return 0
    for line in (*map(device_line, found), model_line(model), *plan_lines(plan)):
        out(line)
    return 0


def _workload(options: argparse.Namespace) -> Workload:
    if not 0.0 <= options.cached_share < 1.0:
        raise LayoutError(f"cached-share: must be in 0..1, 1 excluded, got {options.cached_share}")
    for name in ("tpot_ms", "ttft_ms"):
        if not 0.0 < getattr(options, name) < 1e9:
            raise LayoutError(f"{name.replace('_', '-')}: must be above 0, got {getattr(options, name)}")
    return Workload(
        options.prompt_tokens,
        options.output_tokens,
        options.cached_share,
        options.tpot_ms / 1e3,
        options.ttft_ms / 1e3,
    )
