"""``python -m benchmarks.relay``: measures the chosen gateways in turns and prints the table."""

import argparse
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NoReturn

from benchmarks.relay import report
from benchmarks.relay.bench import DIRECT, Bench, Failed
from benchmarks.relay.build import Missing, compile_tool
from benchmarks.relay.gateways import FAMILIES, GATEWAYS, Gateway
from benchmarks.relay.measure import (
    FULL,
    MEASUREMENTS,
    QUICK,
    Measurer,
    Notes,
    Plan,
    processes,
    two_cores,
)

ONLY: Final = (*MEASUREMENTS, "processes")


@dataclass(frozen=True, slots=True)
class Run:
    """What was asked for, and where it is written down."""

    gateways: Sequence[Gateway]
    only: Sequence[str]
    cpus: Sequence[int]
    plan: Plan
    results: report.Results
    notes: Notes

    @property
    def rows(self) -> list[str]:
        """Row names in the table's order."""
        return [DIRECT, *(gateway.row for gateway in self.gateways)]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the arguments ask for; 0 unless the omni row has failed somewhere."""
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, _terminate)
    _raise_file_limit()
    plan = replace(QUICK if args.quick else FULL, json=args.request == "json")
    if args.repetitions:
        plan = replace(plan, repetitions=args.repetitions)
    chosen = [g for g in GATEWAYS if g.family in args.gateways and (plan.extra_rows or not g.extra)]
    cpus, notes = sorted(os.sched_getaffinity(0)), Notes()
    if args.quick:
        notes.add("quick: no rows with the peers' default policy, two processes of omni only")
    run = Run(chosen, args.only, cpus, plan, report.Results(), notes)
    started = time.monotonic()
    try:
        mock, load = compile_tool("mock"), compile_tool("load")
        os.sched_setaffinity(0, args.load_cpu)
        with Bench(mock, load, args.gateway_cpu, args.load_cpu) as bench:
            measure_all(bench, run)
    except (Missing, Failed) as exc:
        sys.stderr.write(f"cannot measure: {exc}\n")
        return 2
    except KeyboardInterrupt:
        run.notes.add("interrupted: the figures are of what had been measured until then")
    _print_report(run, args, time.monotonic() - started)
    failed = any(g.family == "omni" and g.row in run.results.failures for g in chosen)
    return 1 if failed else 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.relay", description=__doc__)
    add = parser.add_argument
    add("--gateways", type=_choice_of(FAMILIES), default=list(FAMILIES), help=",".join(FAMILIES))
    add("--only", type=_choice_of(ONLY), default=list(ONLY), help=",".join(ONLY))
    add("--quick", action="store_true", help="once, shortly, without additional rows")
    add("--repetitions", type=int, default=0, help="instead of the plan's 3 (quick: 1)")
    add("--request", choices=("json", "stream"), default="json", help="kind of answer")
    add("--gateway-cpu", type=_cpus, default=(0,), help="core of the gateway (0)")
    add("--load-cpu", type=_cpus, default=(1,), help="core of mocks and load (1)")
    add("--json", type=Path, metavar="FILE", help="write all samples there")
    args = parser.parse_args(argv)
    missing = {*args.gateway_cpu, *args.load_cpu} - os.sched_getaffinity(0)
    if missing:
        parser.error(f"no such core: {sorted(missing)}")
    return args


def _choice_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {unknown}; known: {', '.join(known)}")
        return [name for name in known if name in names]

    return parse


def _cpus(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def measure_all(bench: Bench, run: Run) -> None:
    """All repetitions; the gateways take turns, so that slow drift hits them alike."""
    on_one = [name for name in MEASUREMENTS if name in run.only]
    for repetition in range(run.plan.repetitions if on_one else 0):
        _measure(bench, run, None, _names(on_one, repetition))
        for gateway in run.gateways:
            if repetition == 0 or not gateway.extra:
                _measure(bench, run, gateway, _names(on_one, repetition))
    if "processes" in run.only:
        _measure_processes(bench, run, None)
        for gateway in run.gateways:
            if gateway.family == "omni" or (run.plan.extra_rows and not gateway.extra):
                _measure_processes(bench, run, gateway)


def _names(names: Sequence[str], repetition: int) -> list[str]:
    return [name for name in names if repetition == 0 or name != "rss"]


def _measure(bench: Bench, run: Run, gateway: Gateway | None, names: Sequence[str]) -> None:
    row = DIRECT if gateway is None else gateway.row
    left = list(names)
    while left and not run.results.failure(row, "all"):
        try:
            with bench.subject(gateway) as subject:
                measurer = Measurer(subject, run.plan, run.notes, row)
                # What a failure leaves behind must not meet the next measurement: start afresh.
                while left and _attempt(run, row, left.pop(0), measurer):
                    pass
        except (Failed, Missing) as exc:
            run.results.fail(row, "all", str(exc))
            _progress(f"{row}: {exc}")


def _attempt(run: Run, row: str, name: str, measurer: Measurer) -> bool:
    try:
        figures = MEASUREMENTS[name](measurer)
    except Failed as exc:
        run.results.fail(row, name, str(exc))
        _progress(f"{row}: {name} fails: {exc}")
        return False
    run.results.add(row, figures)
    shown = ", ".join(f"{key} {value:.2f}" for key, value in figures.items())
    _progress(f"{row}: {shown}")
    return True


def _measure_processes(bench: Bench, run: Run, gateway: Gateway | None) -> None:
    row = DIRECT if gateway is None else gateway.row
    if run.results.failure(row, "all"):
        return
    cores = two_cores(bench.gateway_cpus, bench.load_cpus, run.cpus)
    try:
        figures = processes(bench, gateway, run.plan, run.notes, cores)
    except (Failed, Missing) as exc:
        run.results.fail(row, "processes", str(exc))
        _progress(f"{row}: processes fails: {exc}")
        return
    run.results.add(row, figures)
    _progress(f"{row}: " + ", ".join(f"{key} {value:.2f}" for key, value in figures.items()))
    if not cores.load_apart:
        run.notes.add(
            "two processes: there are but two cores here, mocks and load share one of them with "
            "the gateway; `ratio by CPU` is what two cores of its own would allow at these costs"
        )


def _print_report(run: Run, args: argparse.Namespace, seconds: float) -> None:
    out = sys.stdout.write
    kind = "a whole answer" if run.plan.json else "a stream"
    out(
        "\nCPU microseconds of the gateway (user + system, its whole process tree), core "
        f"{args.gateway_cpu}; mocks and load on {args.load_cpu}.\n"
        f"A request asks for {kind} of two tokens, both legs counted; medians of "
        f"{run.plan.repetitions}; added ms: less the direct row, which has one leg; "
        "memory: RSS, of several processes the sum of PSS.\n\n"
    )
    if any(name != "processes" for name in run.only):
        yardsticks = [g.row for g in run.gateways if g.yardstick]
        judged = next((g.row for g in run.gateways if g.family == "omni"), None)
        out(report.table(run.results, run.rows, report.COLUMNS) + "\n\n")
        if yardsticks and judged:
            out(report.ratio_table(run.results, run.rows, yardsticks, judged) + "\n\n")
    if "processes" in run.only:
        out("Two processes (two cores for gateways of threads), and 1,024 streams at 20 ms:\n\n")
        out(report.table(run.results, run.rows, report.PROCESS_COLUMNS) + "\n\n")
    for line in [*report.failure_lines(run.results), *run.notes.lines()]:
        out(f"- {line}\n")
    out(f"- took {seconds:.0f} s\n")
    if args.json:
        document = {**run.results.as_json(), "notes": run.notes.lines(), "seconds": seconds}
        args.json.write_text(json.dumps(document, indent=1) + "\n")


def _progress(line: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")


def _raise_file_limit() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _terminate(_signal: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
