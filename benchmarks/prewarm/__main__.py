"""`python -m benchmarks.prewarm`: what computing ahead gains next turns and costs others, by load, in the simulator."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.prewarm.live import live
from omni_proxy.core import Core, CoreSettings
from omni_proxy.flow.prewarm_settings import PrewarmSettings
from omni_proxy.flow.prewarming import PrewarmCounts
from omni_proxy.scheduler.settings import SchedulingSettings
from omni_proxy.sim.cluster import SimWorker, make_cluster
from omni_proxy.sim.next_turns import next_turns
from omni_proxy.sim.presets import PRESETS
from omni_proxy.sim.setup import LoadBasis, WorkloadChoice, at_load, load_workload
from omni_proxy.sim.workload import Workload
from omni_proxy.sim.world import World

TURNS = "turns,requests=4000,prompt=500,output=400,prefix=1000,turns=5,think=10,rate=10"
HEAD = f"{'load':>5} {'prewarm':>8} {'TTFT 2+':>9} {'p90':>8} {'first':>9} {'p99 all':>8} {'sent':>6} {'cancelled':>9} "
HEAD += f"{'used':>7} {'wasted':>7} {'of prompts':>10}"


@dataclass(frozen=True)
class Outcome:
    """Of one run; seconds."""

    later: list[float]
    first: list[float]
    counts: PrewarmCounts | None


def measure(workload: Workload, workers: Sequence[SimWorker], prewarm: PrewarmSettings | None) -> Outcome:
    """Time to the first token of next turns and of all others."""
    cores: list[Core] = []

    def make(_: object) -> Core:
        scheduling = SchedulingSettings()
        cores.append(Core(CoreSettings(prefix_aware=True, scheduling=scheduling, prewarm=prewarm)))
        return cores[0]

    run = World(workload, workers, make).run()
    followers = set(next_turns(workload).values())
    outcome = Outcome([], [], cores[0].prewarms())
    for record in run.records:
        if record.first_token_at is not None:
            into = outcome.later if int(record.rid[1:]) in followers else outcome.first
            into.append(record.first_token_at - record.arrived_at)
    return outcome


def line(load: float, name: str, outcome: Outcome, prompt_tokens: int) -> str:
    """One row of the table: milliseconds, and tokens as shares."""
    every = sorted(outcome.later + outcome.first)
    later = sorted(outcome.later)
    text = f"{load:5.2f} {name:>8} {_mean(later):9.1f} {1000 * later[len(later) * 9 // 10]:8.1f} "
    text += f"{_mean(outcome.first):9.1f} {1000 * every[len(every) * 99 // 100]:8.0f}"
    c = outcome.counts
    if c is None or not c.sent_tokens:
        return text
    used, wasted = c.used_tokens / c.sent_tokens, c.wasted_tokens / c.sent_tokens
    return f"{text} {c.sent:6} {c.cancelled:9} {used:7.1%} {wasted:7.1%} {c.sent_tokens / prompt_tokens:10.1%}"


def _mean(values: Sequence[float]) -> float:
    return 1000 * sum(values) / max(1, len(values))


def main() -> None:
    """Print a table for each workload."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prewarm")
    parser.add_argument("--trace", type=Path, default=None)
    parser.add_argument("--synthetic", default=None, help=f"({TURNS})")
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--load", type=float, action="append", help="of the shared prefill work; several times")
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--prefill", type=int, default=3)
    parser.add_argument("--decode", type=int, default=6)
    parser.add_argument("--preset", default=next(iter(PRESETS)), choices=sorted(PRESETS))
    parser.add_argument("--live", type=int, default=None, metavar="N", help="N conversations with real processes")
    options = parser.parse_args()
    if options.live is not None:
        live(options.live, options.preset, say)
        return
    synthetic = options.synthetic if options.trace is not None else options.synthetic or TURNS
    whole = load_workload(WorkloadChoice(options.trace, synthetic, options.limit, 1))
    workers = make_cluster(options.prefill, options.decode, 0, PRESETS[options.preset])
    prompts = sum(r.prompt_tokens for r in whole.requests)
    later = len(next_turns(whole))
    say(f"{whole.name}: {len(whole.requests)} requests, {later} of them next turns, {prompts} prompt tokens; ms")
    say(HEAD)
    for load in options.load or [0.1, 0.25, 0.5, 0.75, 0.95]:
        workload = at_load(whole, workers, load, LoadBasis.SHARED)
        for name, settings in (("off", None), ("on", PrewarmSettings(share=options.share))):
            say(line(load, name, measure(workload, workers, settings), prompts))


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
