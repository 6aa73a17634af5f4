"""The command-line options of the simulator's commands. Imports nothing heavy: every command builds the parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[[argparse.Namespace], int]


def number_from(least: int) -> Callable[[str], int]:
    """A parser of whole numbers from `least` on."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least}, got {text!r}")
        return value

    return parse


def above_zero(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def named_factor(text: str) -> tuple[str, float]:
    """`NAME=X`."""
    name, _, value = text.rpartition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"must be NAME=X, got {text!r}")
    return name, above_zero(value)


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Where requests come from."""
    parser.add_argument("--trace", type=Path, default=None, metavar="FILE", help="Mooncake .jsonl or Azure .csv")
    parser.add_argument(
        "--synthetic",
        default=None,
        metavar="KIND,key=value,...",
        help="poisson, bursts, shift, prefixes, fanout or turns",
    )
    parser.add_argument("--limit", type=number_from(1), default=None, metavar="N", help="the first N requests only")
    parser.add_argument(
        "--seed", type=number_from(0), default=0, metavar="S", help="of generated workloads (default 0)"
    )


def add_engine(parser: argparse.ArgumentParser) -> None:
    """How fast workers are."""
    parser.add_argument(
        "--preset", default="h200-deepseek-r1", metavar="NAME", help="engine model (default h200-deepseek-r1)"
    )
    parser.add_argument("--engine", type=Path, default=None, metavar="FILE", help="engine model from a YAML file")


def add_load(parser: argparse.ArgumentParser) -> None:
    """How dense arrivals are."""
    parser.add_argument(
        "--load", type=above_zero, default=None, metavar="X", help="scale arrivals: offered prefill work / capacity"
    )
    parser.add_argument(
        "--load-basis", choices=("cold", "shared"), default="cold", help="count work without or with cache hits"
    )
    parser.add_argument("--slo", default="", metavar="ttft=S,tpot=S", help="limits for goodput (ttft=2,tpot=0.05)")


def add_simulate(commands: Any, run: Run) -> None:
    """`omni-proxy simulate`."""
    parser = commands.add_parser("simulate", help="run the scheduler on simulated workers")
    add_workload(parser)
    add_engine(parser)
    add_load(parser)
    parser.add_argument("--prefill", type=number_from(0), default=0, metavar="N", help="prefill workers")
    parser.add_argument("--decode", type=number_from(0), default=0, metavar="M", help="decode workers")
    parser.add_argument("--mixed", type=number_from(0), default=0, metavar="K", help="workers that do both")
    parser.add_argument("-c", "--config", type=Path, default=None, metavar="FILE", help="a gateway's config")
    parser.add_argument(
        "--slow",
        action="append",
        default=[],
        type=named_factor,
        metavar="NAME=X",
        help="this worker takes X times as long",
    )
    parser.add_argument(
        "--outage",
        action="append",
        default=[],
        metavar="NAME@FROM-TO",
        help="this worker is dead between two instants of the run, in seconds",
    )
    parser.add_argument(
        "--outages", default=None, metavar="every=S,down=S", help="random ones: mean time between, and mean length"
    )
    parser.add_argument("--record", type=Path, default=None, metavar="FILE", help="write the event log for replay")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="run other routing methods, too, and the scheduler with each mechanism off",
    )
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write everything as JSON")
    parser.add_argument("--html", type=Path, default=None, metavar="FILE", help="write a page with plots")
    parser.set_defaults(run=run)


def add_plan(commands: Any, run: Run) -> None:
    """`omni-proxy plan`."""
    parser = commands.add_parser("plan", help="find the split into prefill and decode workers that meets limits")
    add_workload(parser)
    add_engine(parser)
    parser.add_argument("--slo", default="", metavar="ttft=S,tpot=S", help="limits (default ttft=2,tpot=0.05)")
    parser.add_argument(
        "--attain", type=above_zero, default=0.9, metavar="SHARE", help="of requests that must meet both (default 0.9)"
    )
    parser.add_argument("--workers", type=number_from(2), required=True, metavar="N", help="most workers to use")
    parser.add_argument(
        "--rate", type=above_zero, default=None, metavar="R", help="requests a second instead of the trace's"
    )
    parser.add_argument("-c", "--config", type=Path, default=None, metavar="FILE", help="a gateway's config")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the curve as JSON")
    parser.set_defaults(run=run)


def add_bench(commands: Any, run: Run) -> None:
    """`omni-proxy bench`."""
    parser = commands.add_parser("bench", help="send a workload to a server and measure its answers")
    parser.add_argument("--url", required=True, metavar="URL", help="http://HOST:PORT of a gateway or a worker")
    parser.add_argument("--model", default=None, metavar="NAME", help="default: the first of /v1/models")
    add_workload(parser)
    parser.add_argument("--rate", type=above_zero, default=None, metavar="R", help="requests a second, on average")
    parser.add_argument(
        "--concurrency", type=number_from(1), default=None, metavar="N", help="closed loop: N at a time"
    )
    parser.add_argument(
        "--speed", type=above_zero, default=1.0, metavar="X", help="compress time as workers with --speed X do"
    )
    parser.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    parser.add_argument("--prompt", choices=("words", "ids"), default="words", help="write prompts as words or ids")
    parser.add_argument("--vocabulary", type=number_from(64), default=4096, metavar="N", help="ids are below N")
    parser.add_argument("--no-stream", action="store_true", help="ask for whole answers")
    parser.add_argument("--respect-eos", action="store_true", help="let answers end by themselves")
    parser.add_argument("--header", action="append", default=[], metavar="NAME: VALUE", help="send this header, too")
    parser.add_argument("--timeout", type=above_zero, default=600.0, metavar="S", help="of one request (default 600)")
    parser.add_argument("--slo", default="", metavar="ttft=S,tpot=S", help="limits for goodput (ttft=2,tpot=0.05)")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write everything as JSON")
    parser.set_defaults(run=run)


def add_fit(commands: Any, run: Run) -> None:
    """`omni-proxy fit`."""
    parser = commands.add_parser("fit", help="measure a worker and write its engine model for the simulator")
    parser.add_argument("--url", default=None, metavar="URL", help="of one idle worker that does both")
    parser.add_argument("--runs", type=Path, nargs="+", default=[], metavar="FILE", help="results of bench --json")
    parser.add_argument("--base", default="demo", metavar="PRESET", help="for what cannot be measured (default demo)")
    parser.add_argument("--engine", type=Path, default=None, metavar="FILE", help="the same from a YAML file")
    parser.add_argument("--prompt", choices=("words", "ids"), default="ids", help="write prompts as words or ids")
    parser.add_argument("--vocabulary", type=number_from(64), default=512, metavar="N", help="ids are below N")
    parser.add_argument("--seed", type=number_from(0), default=0, metavar="S")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE", help="write the model as YAML")
    parser.set_defaults(run=run)


def add_fidelity(commands: Any, run: Run) -> None:
    """`omni-proxy fidelity`."""
    parser = commands.add_parser("fidelity", help="run a workload live and simulated, and compare")
    add_workload(parser)
    add_load(parser)
    parser.add_argument("--prefill", type=number_from(1), default=2, metavar="N", help="prefill workers (default 2)")
    parser.add_argument("--decode", type=number_from(1), default=1, metavar="M", help="decode workers (default 1)")
    parser.add_argument("--simulate", default=None, metavar="PRESET", help="pretending workers instead of embedded")
    parser.add_argument("--speed", type=above_zero, default=1.0, metavar="X", help="of pretending workers")
    parser.add_argument("--engine", type=Path, default=None, metavar="FILE", help="engine model instead of a fit")
    parser.add_argument("--vocabulary", type=number_from(64), default=512, metavar="N", help="ids are below N")
    parser.add_argument("--runs", type=number_from(1), default=3, metavar="N", help="live runs (default 3)")
    parser.add_argument("--tolerance", type=above_zero, default=0.2, metavar="SHARE", help="default 0.2")
    parser.set_defaults(run=run)


def add_pretending(worker: argparse.ArgumentParser) -> None:
    """The options of `omni-proxy worker` that only a pretending one has."""
    group = worker.add_argument_group("pretending", "spend simulated time instead of computing")
    group.add_argument("--simulate", default=None, metavar="PRESET", help="pretend to be a worker of this kind")
    group.add_argument("--engine", type=Path, default=None, metavar="FILE", help="engine model from a YAML file")
    group.add_argument("--speed", type=above_zero, default=1.0, metavar="X", help="simulated seconds in a real one")
    group.add_argument(
        "--output-tokens", type=number_from(1), default=128, metavar="N", help="of answers without limit"
    )
    group.add_argument("--enable-scale-out", action="store_true", help="tell token ids of prompts (/render), as vLLM")
    group.add_argument("--bootstrap-port", type=number_from(1), default=None, metavar="P", help="as SGLang's prefill")


def add_replay(commands: Any, run: Run) -> None:
    """`omni-proxy replay`."""
    parser = commands.add_parser("replay", help="feed a recorded event log to a fresh core and compare")
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.set_defaults(run=run)
