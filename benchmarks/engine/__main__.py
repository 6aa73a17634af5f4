"""`python -m benchmarks.engine`: prefill, decode, drafts, handoff and start of the embedded engine, with ratios."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.engine import agreeing, generating, handing, speculating, vllm_cpu
from benchmarks.engine.models import demo, random_moe
from benchmarks.engine.report import Line, report

PARTS = ("demo", "agreement", "moe", "drafts", "heads", "handoff")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="rounds in which all take turns (default 5)")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part alone; may be given several times")
    parser.add_argument("--vllm-venv", type=Path, default=None, metavar="VENV", help="an environment with vllm-cpu")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the lines there")
    options = parser.parse_args()
    if options.turns < 1:
        parser.error(f"--turns must be at least 1, got {options.turns}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        lines = []
        for line in _lines(options, Path(scratch)):
            print(f"  {line.what}: {line.ours:.4g} {line.unit}", flush=True)
            lines.append(line)
    print("\n" + report(lines))
    if options.json is not None:
        options.json.write_text(json.dumps([{**asdict(line), "reached": line.reached} for line in lines], indent=1))


def _lines(options: argparse.Namespace, scratch: Path) -> Iterator[Line]:
    parts, turns = options.only or PARTS, options.turns
    if "demo" in parts:
        yield from generating.measure(demo(), turns)
    if "agreement" in parts:
        yield from agreeing.measure(demo())
    if "moe" in parts:
        moe = random_moe(scratch)
        yield from generating.measure(moe, turns)
        if options.vllm_venv is not None:
            yield from vllm_cpu.measure(options.vllm_venv, moe, turns)
    if "drafts" in parts:
        yield from speculating.measure(demo(), turns)
    if "heads" in parts:
        yield from speculating.measure_heads(scratch, turns)
    if "handoff" in parts:
        yield from handing.measure(demo(), turns)


if __name__ == "__main__":
    main()
