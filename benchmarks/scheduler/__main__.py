"""`python -m benchmarks.scheduler passes | compare | slices | mechanisms | elastic`: what planning costs and gains."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.scheduler.compare import compare
from benchmarks.scheduler.elastic import compare_splits
from benchmarks.scheduler.mechanisms import compare_mechanisms
from benchmarks.scheduler.passes import print_passes
from benchmarks.scheduler.slices import compare_slices


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduler")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("passes", help="CPU time of planning")
    commands.add_parser("mechanisms", help="for each mechanism a workload that needs it, with it and without")
    splits = commands.add_parser("elastic", help="mixed workers that change sides, against fixed splits")
    splits.add_argument("--workers", type=int, default=12)
    chosen = commands.add_parser("compare", help="routers and the scheduler on traces, in the simulator")
    chosen.add_argument("--limit", type=int, default=None, help="the first requests only")
    cut = commands.add_parser("slices", help="the same on slices of traces with cold caches")
    cut.add_argument("--requests", type=int, default=400, help="of a slice (400)")
    for command in (chosen, cut):
        command.add_argument("trace", type=Path, nargs="+")
        command.add_argument("--load", type=float, action="append", help="may be given several times (0.95)")
        command.add_argument("--load-basis", choices=("cold", "shared"), default="cold")
        command.add_argument("--ablate", action="store_true", help="each mechanism off in turn")
    options = parser.parse_args()
    if options.command == "passes":
        print_passes(say)
        return
    if options.command == "mechanisms":
        compare_mechanisms(say)
        return
    if options.command == "elastic":
        compare_splits(options.workers, say)
        return
    for trace in options.trace:
        for load in options.load or [0.95]:
            if options.command == "slices":
                compare_slices(trace, options.requests, load, options.load_basis, options.ablate, say)
            else:
                compare(trace, load, options.load_basis, options.limit, options.ablate, say)
            say("")


if __name__ == "__main__":
    main()
