"""`python -m benchmarks.routing`: the same requests at the same instants to the same workers through each gateway."""

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.routing.fleet import Fleet, fleet
from benchmarks.routing.gateways import FAMILIES, GATEWAYS, Gateway
from benchmarks.routing.measure import Conditions, Result, make_prompts, measure
from benchmarks.routing.report import report
from benchmarks.routing.words import write_word_model
from omni_proxy.config import ConfigError
from omni_proxy.sim.cluster import make_cluster
from omni_proxy.sim.commands import parse_slo
from omni_proxy.sim.presets import preset
from omni_proxy.sim.setup import LoadBasis, WorkloadChoice, at_load, load_workload
from omni_proxy.sim.workload import Workload


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing", description=__doc__)
    parser.add_argument("--trace", type=Path, default=None, metavar="FILE")
    parser.add_argument("--synthetic", default=None, metavar="KIND,key=value,...")
    parser.add_argument("--requests", type=int, default=600, metavar="N", help="of one slice (default 600)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="slices of the trace (default 3)")
    parser.add_argument("--loads", default="0.5,0.75,0.95", metavar="X,X,...")
    parser.add_argument("--load-basis", choices=("cold", "shared"), default="cold")
    parser.add_argument("--prefill", type=int, default=6)
    parser.add_argument("--decode", type=int, default=6)
    parser.add_argument("--preset", default="h200-deepseek-r1")
    parser.add_argument("--speed", type=float, default=1.0, metavar="X", help="compress time, the same for all")
    parser.add_argument("--slo", default="", metavar="ttft=S,tpot=S")
    parser.add_argument("--gateways", default=",".join(FAMILIES), help=f"families out of {', '.join(FAMILIES)}")
    parser.add_argument("--quick", action="store_true", help="one slice of 150 requests at load 0.75")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    return parser.parse_args()


def main() -> int:
    """Run; 0 unless nothing could be measured."""
    options = _options()
    if options.quick:
        options.requests, options.seeds, options.loads = 150, 1, "0.75"
    try:
        results = _run(options)
    except ConfigError as exc:
        print(f"benchmarks.routing: {exc}", file=sys.stderr)
        return 2
    print(_head(options))
    print(report(results))
    if options.json is not None:
        options.json.write_text(json.dumps([result.as_json() for result in results], indent=1))
    return 0 if any(result.figures is not None for result in results) else 1


def _head(options: argparse.Namespace) -> str:
    source = options.trace.stem if options.trace is not None else options.synthetic
    compressed = f", time compressed {options.speed:g} times" if options.speed != 1 else ""
    return (
        f"{source}, {options.requests} requests a slice, {options.prefill}P + {options.decode}D of {options.preset}"
        f"{compressed}; load counts prefill work {'without' if options.load_basis == 'cold' else 'after'} cache hits\n"
    )


def _run(options: argparse.Namespace) -> list[Result]:
    model = preset(options.preset)
    gateways = _chosen(options.gateways)
    loads = [float(text) for text in options.loads.split(",")]
    slices = list(_slices(options))
    gateway_cpus, other_cpus = _cpus()
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="routing-") as name:
        folder = Path(name)
        folder.chmod(0o711)
        words = write_word_model(folder / "model")
        arguments = (options.prefill, options.decode, options.preset, model, options.speed, other_cpus, folder)
        with fleet(*arguments) as workers:
            for load in loads:
                for seed, workload in enumerate(slices):
                    cluster = make_cluster(options.prefill, options.decode, 0, model)
                    loaded = at_load(workload, cluster, load, LoadBasis(options.load_basis))
                    conditions = Conditions(
                        loaded, load, seed, options.speed, parse_slo(options.slo), gateway_cpus, folder, words,
                        make_prompts(loaded),
                    )  # fmt: skip
                    results += _round(gateways, workers, conditions)
    return results


def _round(gateways: Sequence[Gateway], workers: Fleet, conditions: Conditions) -> list[Result]:
    """Every gateway once, in an order of the slice's own, so that no one always comes after the same other."""
    order = list(gateways)
    random.Random(f"{conditions.seed} {conditions.load}").shuffle(order)
    found = {}
    for gateway in order:
        result = found[gateway.row] = measure(gateway, workers, conditions)
        mean = "-" if result.figures is None or result.figures.ttft is None else f"{result.figures.ttft.mean:.2f} s"
        place = f"load {conditions.load:g}, slice {conditions.seed}"
        print(f"{place}: {gateway.row}: mean TTFT {mean} {result.reason}", file=sys.stderr)
    return [found[gateway.row] for gateway in gateways]


def _chosen(text: str) -> list[Gateway]:
    wanted = text.split(",")
    unknown = [name for name in wanted if name not in FAMILIES]
    if unknown:
        raise ConfigError(f"--gateways: there is no {unknown[0]!r}; known are {', '.join(FAMILIES)}")
    return [gateway for gateway in GATEWAYS if gateway.family in wanted]


def _slices(options: argparse.Namespace) -> list[Workload]:
    """Slices of a trace that follow each other, each beginning at its own zero; of a generated load, other seeds."""
    if options.synthetic is not None:
        choices = [WorkloadChoice(None, options.synthetic, options.requests, seed) for seed in range(options.seeds)]
        return [load_workload(choice) for choice in choices]
    whole = load_workload(WorkloadChoice(options.trace, None, options.requests * options.seeds, 0))
    found = []
    for seed in range(options.seeds):
        part = whole.requests[seed * options.requests : (seed + 1) * options.requests]
        if len(part) < 2:
            raise ConfigError(f"--seeds: the trace has no {options.seeds} slices of {options.requests} requests")
        begin = part[0].arrival_s
        found.append(replace(whole, requests=tuple(replace(r, arrival_s=r.arrival_s - begin) for r in part)))
    return found


def _cpus() -> tuple[list[int], list[int]]:
    """One core for the gateway, the others for workers and client; all of them where there is one only."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        return cpus, cpus
    os.sched_setaffinity(0, cpus[1:])
    return cpus[:1], cpus[1:]


if __name__ == "__main__":
    raise SystemExit(main())
