"""`python -m benchmarks.routing`: the same requests at the same instants to the same workers through each gateway."""

import argparse
import importlib.util
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.routing.fleet import Fleet, fleet
from benchmarks.routing.gateways import FAMILIES, Gateway, chosen
from benchmarks.routing.kept import Kept
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
    parser.add_argument(
        "--gateways",
        default=",".join(FAMILIES),
        metavar="NAME,...",
        help=f"families ({', '.join(FAMILIES)}) or FAMILY/POLICY",
    )
    parser.add_argument("--quick", action="store_true", help="one slice of 150 requests at load 0.75")
    parser.add_argument(
        "--json", type=Path, default=None, metavar="FILE", help="keep each result here; what it holds is not run again"
    )
    return parser.parse_args()


def main() -> int:
    """Run; 0 unless nothing could be measured, 130 where it was interrupted."""
    options = _options()
    if options.quick:
        options.requests, options.seeds, options.loads = 150, 1, "0.75"
    code = 0
    try:
        gateways = chosen(options.gateways)
        kept = Kept.of(options.json, _conditions(options))
        try:
            _run(options, gateways, kept)
        except KeyboardInterrupt:
            code = 130
    except ConfigError as exc:
        print(f"benchmarks.routing: {exc}", file=sys.stderr)
        return 2
    results = _in_order(gateways, kept)
    print(_head(options))
    print(report(results))
    return code or (0 if any(result.figures is not None for result in results) else 1)


def _conditions(options: argparse.Namespace) -> dict[str, str]:
    """What has to be the same for results to stand in one table. Loads, slices and gateways may be added later."""
    named = ("requests", "load_basis", "prefill", "decode", "preset", "speed", "slo")
    source = options.trace.name if options.trace is not None else options.synthetic
    return {"source": str(source), **{name: str(getattr(options, name)) for name in named}}


def _in_order(gateways: Sequence[Gateway], kept: Kept) -> list[Result]:
    """The results of these gateways in the table's order."""
    rows = [gateway.row for gateway in gateways]
    found = [result for result in kept.results.values() if result.gateway in rows]
    return sorted(found, key=lambda result: (result.load, result.seed, rows.index(result.gateway)))


def _head(options: argparse.Namespace) -> str:
    source = options.trace.stem if options.trace is not None else options.synthetic
    compressed = f", time compressed {options.speed:g} times" if options.speed != 1 else ""
    core = importlib.util.find_spec("omni_proxy.core")
    built = "compiled" if core is not None and str(core.origin).endswith(".so") else "not compiled"
    return (
        f"{source}, {options.requests} requests a slice, {options.prefill}P + {options.decode}D of {options.preset}"
        f"{compressed}; load counts prefill work {'without' if options.load_basis == 'cold' else 'after'} cache hits; "
        f"omni-proxy {built}\n"
    )


@dataclass(frozen=True, slots=True)
class _Round:
    """One load of one slice, and who is to be measured with it."""

    load: float
    seed: int
    workload: Workload
    gateways: tuple[Gateway, ...]

    def seconds(self, speed: float) -> float:
        """About how long it takes."""
        return len(self.gateways) * (_START_S + (self.workload.span_s + _TAIL_S) / speed)


_START_S = 6.0
"""About how long a gateway takes to start and workers to become idle."""
_TAIL_S = 20.0
"""About how long the last answers take after the last arrival, in the run's seconds."""


def _run(options: argparse.Namespace, gateways: Sequence[Gateway], kept: Kept) -> None:
    rounds = _rounds(options, gateways, kept)
    if not rounds:
        return
    seconds = sum(each.seconds(options.speed) for each in rounds)
    count = sum(len(each.gateways) for each in rounds)
    print(f"{count} runs to do, {len(kept.results)} kept; about {seconds / 60:.0f} minutes", file=sys.stderr)
    gateway_cpus, other_cpus = _cpus()
    with tempfile.TemporaryDirectory(prefix="routing-") as name:
        folder = Path(name)
        folder.chmod(0o711)
        words = write_word_model(folder / "model")
        model = preset(options.preset)
        arguments = (options.prefill, options.decode, options.preset, model, options.speed, other_cpus, folder)
        with fleet(*arguments) as workers:
            for each in rounds:
                conditions = Conditions(
                    each.workload, each.load, each.seed, options.speed, parse_slo(options.slo), gateway_cpus,
                    other_cpus, folder, words, make_prompts(each.workload),
                )  # fmt: skip
                _measure_round(each.gateways, workers, conditions, kept)


def _rounds(options: argparse.Namespace, gateways: Sequence[Gateway], kept: Kept) -> list[_Round]:
    """What is left to do: every load of a slice before the next slice, so that half a run is half a table."""
    cluster = make_cluster(options.prefill, options.decode, 0, preset(options.preset))
    loads, basis = [_number(text) for text in options.loads.split(",")], LoadBasis(options.load_basis)
    found = []
    for seed, workload in enumerate(_slices(options)):
        for load in loads:
            left = tuple(gateway for gateway in gateways if not kept.has((gateway.row, load, seed)))
            if left:
                found.append(_Round(load, seed, at_load(workload, cluster, load, basis), left))
    return found


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 100:
        raise ConfigError(f"--loads: must be numbers above 0, got {text!r}")
    return value


def _measure_round(gateways: Sequence[Gateway], workers: Fleet, conditions: Conditions, kept: Kept) -> None:
    """Every gateway once, in an order of the slice's own, so that no one always comes after the same other."""
    order = list(gateways)
    random.Random(f"{conditions.seed} {conditions.load}").shuffle(order)
    for gateway in order:
        result = measure(gateway, workers, conditions)
        kept.add(result)
        mean = "-" if result.figures is None or result.figures.ttft is None else f"{result.figures.ttft.mean:.2f} s"
        place = f"load {conditions.load:g}, slice {conditions.seed}"
        print(f"{place}: {gateway.row}: mean TTFT {mean} {result.reason} [{result.wall_s:.0f} s]", file=sys.stderr)


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
