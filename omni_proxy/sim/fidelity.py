"""`omni-proxy fidelity`: the same requests live and simulated, and how far apart their mean TTFT is.

Starts workers and a gateway on this machine, measures one worker alone for its engine model (or takes the preset that
its workers pretend to be), sends the workload several times with cold caches, simulates it, and compares. Where workers
compute for real they share the machine's cores, caches and memory, with each other and with whoever else is there; the
simulated ones are as much slower as the kernel counted that the live ones waited for a core, and as the live ones spent
more on their cores than one worker alone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

import uvloop
from msgspec import structs

from omni_proxy.config import ConfigError, parse
from omni_proxy.core import Core, CoreSettings
from omni_proxy.sim.bench.client import BenchPlan, send_all
from omni_proxy.sim.bench.measure import Seen, bench_figures, faults, uncompressed
from omni_proxy.sim.bench.prompts import PromptForm, Prompts
from omni_proxy.sim.cluster import SimWorker, make_cluster, slowed
from omni_proxy.sim.commands import SettingsOf, parse_slo
from omni_proxy.sim.engine_model import EngineModel
from omni_proxy.sim.figures import Figures, Slo, figures
from omni_proxy.sim.fit import fit_model, least_squares
from omni_proxy.sim.fit_command import fit_text, probe_worker
from omni_proxy.sim.live import Live, LivePlan, cluster
from omni_proxy.sim.machine import Use, Watch, cores, ran_s, use
from omni_proxy.sim.presets import chosen_model, preset
from omni_proxy.sim.report import seconds_text, table
from omni_proxy.sim.run import Delays
from omni_proxy.sim.setup import LoadBasis, WorkloadChoice, at_load, load_workload
from omni_proxy.sim.workload import SimRequest, Workload
from omni_proxy.sim.world import World

EXIT_APART: Final = 1
EXIT_NOT_JUDGED: Final = 3
_DELAYS: Final = Delays(tokenize_s=0.0, tokenize_token_s=0.0)
"""The gateway here follows no prefixes, and therefore tokenizes nothing."""
MOST_OTHERS: Final = 0.15
"""Share of the machine that others may use in a run that is judged."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Measured:
    """One live run: its figures, how each process was kept from a core, and how the machine was used."""

    figures: Figures
    factors: dict[str, float]
    """By which factor each worker's engine was slower."""
    hops: dict[str, float]
    """How long each worker's connections waited before they were served, in seconds."""
    gateway_hop_s: float
    engines_s: dict[str, float]
    """What each worker's engine spent on a core."""
    use: Use | None


@dataclass(frozen=True, slots=True)
class _Pair:
    """A live run and its simulation."""

    live: Figures
    simulated: Figures
    use: Use | None

    @property
    def apart(self) -> float:
        assert self.live.ttft is not None
        assert self.simulated.ttft is not None
        return self.simulated.ttft.mean / self.live.ttft.mean - 1


def run_fidelity(options: argparse.Namespace, settings_of: SettingsOf, say: Say) -> int:
    """The command: 0 within the tolerance, 1 apart, 3 where others used too much of the machine. Raises ConfigError."""
    slo = parse_slo(options.slo)
    workload = load_workload(WorkloadChoice(options.trace, options.synthetic, options.limit, options.seed))
    gateway = {"kv_cache_policy": "independent"}
    settings = settings_of(parse(gateway, "fidelity"))
    pairs: list[_Pair] = []
    with cluster(LivePlan(options.prefill, options.decode, _worker_arguments(options), gateway)) as live:
        workers = make_cluster(options.prefill, options.decode, 0, _model(options, live, say))
        if options.load is not None:
            workload = at_load(workload, workers, options.load, LoadBasis(options.load_basis))
        say(f"{workload.name}, {len(workload.requests)} requests over {seconds_text(workload.span_s)}")
        for _ in range(options.runs):
            _make_cold(live)
            measured = _measure(options, live, workload, slo, say)
            pairs.append(_pair(measured, workload, workers, settings, slo, say))
    return _compare(pairs, options.tolerance, say)


def _worker_arguments(options: argparse.Namespace) -> tuple[str, ...]:
    if options.simulate is None:
        return ()
    preset(options.simulate)  # an unknown name is known before anything starts
    return ("--simulate", options.simulate, "--speed", str(options.speed), "--block-size", "64")


# ------------------------------------------------------------------------------------------- the model


def _model(options: argparse.Namespace, live: Live, say: Say) -> EngineModel:
    if options.simulate is not None:
        return preset(options.simulate)
    if options.engine is not None:
        return chosen_model("demo", options.engine)

    def look() -> Callable[[], float]:
        return Watch(live.worker_pids[:1]).factor

    runs = probe_worker(live.workers[0][2], preset("demo"), PromptForm.IDS, options.vocabulary, options.seed, look)
    found = fit_model(runs, preset("demo"))
    say(fit_text(found))
    model = _with_handoff(options, live, found.model)
    say(f"handoff  {seconds_text(model.link_s)} and {model.link_bytes_per_s / 1e6:.0f} MB/s beside what is modelled")
    return model


def _with_handoff(options: argparse.Namespace, live: Live, model: EngineModel) -> EngineModel:
    """The model with the time that a handoff takes: what requests, one by one, need more than without it."""
    free = structs.replace(model, link_s=0.0, link_bytes_per_s=1e15)
    lengths = [max(16, model.max_model_len * (n % 12 + 1) // 16) for n in range(24)]
    apart = Workload("handoffs", 64, tuple(SimRequest(1000.0 * n, length, 4) for n, length in enumerate(lengths)))
    run = World(
        apart, make_cluster(1, 1, 0, free), lambda index: Core(CoreSettings(queue_timeout_s=1e9)), _DELAYS
    ).run()
    predicted = [record.first_token_at - record.arrived_at for record in run.records if record.first_token_at]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seen = runner.run(_one_by_one(options, live, apart))
    rest = [
        ((1.0, float(length)), max(1e-6, one.first - one.sent - alone))
        for length, one, alone in zip(lengths, seen, predicted, strict=True)
        if one.first is not None
    ]
    constant, per_token = least_squares(rest)
    return structs.replace(model, link_s=constant, link_bytes_per_s=model.kv_bytes_per_token / max(per_token, 1e-12))


async def _one_by_one(options: argparse.Namespace, live: Live, apart: Workload) -> list[Seen]:
    """What each request takes alone, without what its workers waited for a core."""
    plan = BenchPlan("omni-demo", chat=False, stream=True, concurrency=1, timeout_s=300.0)
    prompts = Prompts(PromptForm.IDS, 64, options.vocabulary)
    found = []
    for number, request in enumerate(apart.requests):
        # Each prompt has blocks of its own, whatever its number within its run.
        keys = tuple(range(1000 * number, 1000 * number + -(-request.prompt_tokens // 64)))
        watch = Watch(live.worker_pids)
        (seen,) = await send_all(live.url, Workload("one", 64, (replace(request, block_keys=keys),)), prompts, plan)
        found.append(uncompressed(seen, 1 / watch.factor()))
    return found


# ---------------------------------------------------------------------------------------- live and simulated


def _make_cold(live: Live) -> None:
    """Empty the workers' prefix caches: the simulated ones begin empty."""
    for _, _, url in live.workers:
        try:
            with urllib.request.urlopen(f"{url}/reset_prefix_cache", data=b"", timeout=10):
                pass
        except OSError as exc:
            raise ConfigError(f"{url}: /reset_prefix_cache: {exc}") from exc


def _measure(options: argparse.Namespace, live: Live, workload: Workload, slo: Slo, say: Say) -> _Measured:
    form = PromptForm.WORDS if options.simulate is not None else PromptForm.IDS
    prompts = Prompts(form, workload.block_tokens, options.vocabulary)
    name = "simulated" if options.simulate is not None else "omni-demo"
    plan = BenchPlan(name, chat=False, stream=True, concurrency=None, timeout_s=600.0, speed=options.speed)
    pids = (*live.worker_pids, live.gateway_pid, os.getpid())
    watches, machine, all_ran = [Watch([pid]) for pid in live.worker_pids], cores(), ran_s(pids)
    gateway = Watch([live.gateway_pid])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seen = [uncompressed(one, options.speed) for one in runner.run(send_all(live.url, workload, prompts, plan))]
    used = use(machine, cores(), ran_s(pids) - all_ran)
    for line in faults(seen):
        say(line)
    found = bench_figures(seen, slo)
    if options.simulate is not None:  # what a pretending worker spends is simulated time, which nobody takes from it
        return _Measured(found, {}, {}, 0.0, {}, used)
    names = [worker for worker, _, _ in live.workers]
    factors = {name: watch.factor() for name, watch in zip(names, watches, strict=True)}
    hops = {name: watch.turn_wait_s() for name, watch in zip(names, watches, strict=True)}
    waits = ", ".join(f"{worker} {factor:.2f}" for worker, factor in factors.items())
    say(f"slower by waiting for a core: {waits}; gateway {seconds_text(gateway.turn_wait_s())} each time it woke up")
    ran = {name: watch.ran_s() for name, watch in zip(names, watches, strict=True)}
    return _Measured(found, factors, hops, gateway.turn_wait_s(), ran, used)


def _pair(
    measured: _Measured,
    workload: Workload,
    workers: tuple[SimWorker, ...],
    settings: CoreSettings,
    slo: Slo,
    say: Say,
) -> _Pair:
    delays = replace(_DELAYS, network_s=_DELAYS.network_s + measured.gateway_hop_s)
    slower = tuple(_hopping(worker, measured.hops) for worker in slowed(workers, measured.factors))
    run = World(workload, slower, lambda index: Core(settings), delays).run()
    if measured.engines_s:
        modelled = {
            worker.spec.name: engine.counters.busy_s / measured.factors[worker.spec.name]
            for worker, engine in zip(run.workers, run.engines, strict=True)
        }
        spent, meant = sum(measured.engines_s.values()), sum(modelled.values())
        say(f"engines spent {spent:.1f} s on a core where the model, from one that was alone, says {meant:.1f} s")
        beside = {name: measured.engines_s[name] / busy_s for name, busy_s in modelled.items() if busy_s}
        run = World(workload, slowed(slower, beside), lambda index: Core(settings), delays).run()
    return _Pair(measured.figures, figures(run.records, slo), measured.use)


def _hopping(worker: SimWorker, hops: dict[str, float]) -> SimWorker:
    """The worker whose connections wait for a core on their way in and out."""
    model, hop_s = worker.model, hops.get(worker.spec.name, 0.0)
    changed = structs.replace(model, request_s=model.request_s + hop_s, first_token_s=model.first_token_s + hop_s)
    return SimWorker(worker.spec, changed)


# ---------------------------------------------------------------------------------------------- the verdict


def _compare(pairs: list[_Pair], tolerance: float, say: Say) -> int:
    if any(pair.live.ttft is None or pair.simulated.ttft is None for pair in pairs):
        raise ConfigError("nothing was answered; there is nothing to compare")
    rows = [["run", "", "TTFT mean", "p50", "p90", "p99", "TPOT mean", "answered", "apart", "machine: we", "others"]]
    for number, pair in enumerate(pairs, 1):
        used = ["-", "-"] if pair.use is None else [f"{pair.use.own:.0%}", f"{pair.use.others:.0%}"]
        rows.append([str(number), "live", *_cells(pair.live), "", *used])
        rows.append(["", "simulated", *_cells(pair.simulated), f"{pair.apart:+.1%}", "", ""])
    say(table(rows))
    apart = median(pair.apart for pair in pairs)
    within = abs(apart) <= tolerance
    runs = f"median of {len(pairs)} runs: " if len(pairs) > 1 else ""
    say(f"{runs}mean TTFT simulated {apart:+.1%} of live: {'within' if within else 'more than'} {tolerance:.0%}")
    others = median(pair.use.others for pair in pairs if pair.use is not None) if pairs[0].use is not None else 0.0
    if others > MOST_OTHERS:
        say(
            f"not judged: others used {others:.0%} of the machine; a run that counts needs them below {MOST_OTHERS:.0%}"
        )
        return EXIT_NOT_JUDGED
    return 0 if within else EXIT_APART


def _cells(found: Figures) -> list[str]:
    assert found.ttft is not None
    times = [seconds_text(value) for value in (found.ttft.mean, found.ttft.p50, found.ttft.p90, found.ttft.p99)]
    tpot = "-" if found.tpot is None else seconds_text(found.tpot.mean)
    return [*times, tpot, str(found.outcomes.get("completed", 0))]
