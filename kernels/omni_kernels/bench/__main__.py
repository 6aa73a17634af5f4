"""Measures and prints the table; `--json FILE` also writes it. See `--help`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from omni_kernels import registry
from omni_kernels.bench.cases import SHAPES, Case, MoeLayer, row_ops
from omni_kernels.bench.decoder import random_weights, step_case
from omni_kernels.bench.peers import transformers_peers, vllm_times
from omni_kernels.bench.timing import Machine, least, repeated

COLUMNS = ("op", "shape", "backend", "ms", "GB/s", "GF/s", "of bound", "x torch", "x HF", "x vLLM")


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m omni_kernels.bench", description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=7, help="rounds of which the least time counts")
    parser.add_argument("--shapes", nargs="*", choices=sorted(SHAPES), default=sorted(SHAPES))
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 64, 512])
    parser.add_argument("--ops", nargs="*", choices=["moe", "rows", "decoder"], default=["moe", "rows", "decoder"])
    parser.add_argument("--float32", action="store_true", help="transformers in float32 too (4.8 GB more for qwen)")
    parser.add_argument("--vllm-venv", type=Path, help="a venv that has vLLM for CPUs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


def measure(case: Case, machine: Machine, turns: int, extra: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Rows of the table: the case's contestants and the machine's limits take turns."""
    counted = {name: repeated(run) for name, run in case.runs.items()}
    short = {name for name, (_, count) in counted.items() if count > 1}
    times = least({**{name: run for name, (run, _) in counted.items()}, **machine.runs()}, turns, short)
    limits = machine.limits(times)
    seconds = {name: times[name] / count for name, (_, count) in counted.items()}
    seconds.update(extra)
    for name, took in seconds.items():
        read = case.bytes_by_run.get(name, 0.0)
        bound = max(read / limits.read_bytes_s, case.flop / limits.multiplies(name))
        yield {
            "op": case.op,
            "shape": case.shape,
            "backend": name,
            "ms": took * 1e3,
            "GB/s": read / took / 1e9,
            "GF/s": case.flop / took / 1e9,
            "of bound": bound / took,
            "x torch": _ratio(seconds, "torch", took),
            "x HF": _ratio(seconds, "transformers", took),
            "x vLLM": _ratio(seconds, "vLLM", took),
            "limits": limits.per_s(),
        }


def _ratio(seconds: dict[str, float], prefix: str, took: float) -> float | None:
    """How many times as fast as the best of the contestants whose name starts so."""
    found = [value for name, value in seconds.items() if name.startswith(prefix)]
    return min(found) / took if found else None


def cases(args: argparse.Namespace, notes: list[str]) -> Iterator[tuple[Case, dict[str, float]]]:
    """All that the options ask for, with times measured elsewhere."""
    for name in args.shapes if "moe" in args.ops else ():
        shape = SHAPES[name]
        layer = MoeLayer(shape)
        peers, reason = transformers_peers(shape, layer.w13, layer.w2, float32=args.float32 or name == "demo")
        elsewhere, absent = vllm_times(args.vllm_venv, shape, args.rows, args.threads, args.turns)
        notes += [note for note in (reason, absent) if note and note not in notes]
        for rows in args.rows:
            extra = {"vLLM bf16": elsewhere[rows]} if rows in elsewhere else {}
            yield layer.case(rows, peers), extra
        del layer, peers
    if "rows" in args.ops:
        for rows in args.rows:
            for case in row_ops(rows, 2048, 32, 128, 512 if rows <= 64 else 64):
                yield case, {}
    if "decoder" in args.ops:
        weights = random_weights()
        for sequences, keys, each in ((1, 128, 1), (8, 128, 1), (32, 128, 1), (1, 512, 512)):
            yield step_case(weights, sequences, keys, each), {}


def heading() -> str:
    """The table's first line."""
    widths = (16, 34, 28, 10, 7, 7, 9, 7, 7, 7)
    cells = zip(COLUMNS, widths, strict=True)
    return " ".join(f"{name:<{width}}" if width > 10 else f"{name:>{width}}" for name, width in cells)


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    cells = [f"{row['op']:<16}", f"{row['shape']:<34}", f"{row['backend']:<28}", f"{row['ms']:>10.3f}"]
    cells += [f"{row[name]:>7.1f}" for name in ("GB/s", "GF/s")] + [f"{row['of bound']:>9.2f}"]
    cells += [f"{'-' if row[name] is None else format(row[name], '.2f'):>7}" for name in ("x torch", "x HF", "x vLLM")]
    return " ".join(cells)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    args = options(arguments)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    machine = Machine()
    notes: list[str] = []
    rows: list[dict[str, Any]] = []
    library = registry.cpu_library()
    isa = "none" if library is None else library.omni_isa_name(library.omni_isa_current()).decode()
    out = sys.stdout
    out.write(f"torch {torch.__version__}, {args.threads} thread(s), instruction set {isa}, least of {args.turns}\n")
    out.write(f"{heading()}\n")
    with torch.inference_mode():
        for case, extra in cases(args, notes):
            for row in measure(case, machine, args.turns, extra):
                rows.append(row)
                out.write(line(row) + "\n")
                out.flush()
    for note in notes:
        out.write(f"left out: {note}\n")
    if args.json is not None:
        report = {"torch": torch.__version__, "threads": args.threads, "isa": isa, "rows": rows, "left_out": notes}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
