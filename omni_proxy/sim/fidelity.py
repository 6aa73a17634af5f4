"""`omni-proxy fidelity`: the same requests live and simulated, and how far apart their mean TTFT is.

Starts workers and a gateway on this machine, measures one worker alone for its engine model (or takes the preset that
its workers pretend to be), sends the workload, simulates it, and compares.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from typing import Final

import uvloop
from msgspec import structs

from omni_proxy.config import ConfigError, parse
from omni_proxy.core import Core, CoreSettings
from omni_proxy.sim.bench.client import BenchPlan, send_all
from omni_proxy.sim.bench.measure import bench_figures, faults, uncompressed
from omni_proxy.sim.bench.prompts import PromptForm, Prompts
from omni_proxy.sim.cluster import make_cluster
from omni_proxy.sim.commands import SettingsOf, parse_slo
from omni_proxy.sim.engine_model import EngineModel
from omni_proxy.sim.figures import Figures, Slo, figures
from omni_proxy.sim.fit import fit_model, least_squares
from omni_proxy.sim.fit_command import fit_text, probe_worker
from omni_proxy.sim.live import Live, LivePlan, cluster
from omni_proxy.sim.presets import chosen_model, preset
from omni_proxy.sim.report import seconds_text, table
from omni_proxy.sim.setup import LoadBasis, WorkloadChoice, at_load, load_workload
from omni_proxy.sim.workload import SimRequest, Workload
from omni_proxy.sim.world import World

EXIT_APART: Final = 1


def run_fidelity(options: argparse.Namespace, settings_of: SettingsOf, say: Callable[[str], None]) -> int:
    """The command: 0 within the tolerance, 1 apart. Raises ConfigError."""
    slo = parse_slo(options.slo)
    workload = load_workload(WorkloadChoice(options.trace, options.synthetic, options.limit, options.seed))
    gateway = {"kv_cache_policy": "independent"}
    with cluster(LivePlan(options.prefill, options.decode, _worker_arguments(options), gateway)) as live:
        model = _model(options, live, say)
        workers = make_cluster(options.prefill, options.decode, 0, model)
        if options.load is not None:
            workload = at_load(workload, workers, options.load, LoadBasis(options.load_basis))
        say(f"{workload.name}, {len(workload.requests)} requests over {seconds_text(workload.span_s)}")
        measured = _measure(options, live, workload, slo, say)
    settings = settings_of(parse(gateway, "fidelity"))
    run = World(workload, workers, lambda index: Core(settings)).run()
    return _compare(measured, figures(run.records, slo), options.tolerance, say)


def _worker_arguments(options: argparse.Namespace) -> tuple[str, ...]:
    if options.simulate is None:
        return ()
    preset(options.simulate)  # an unknown name is known before anything starts
    return ("--simulate", options.simulate, "--speed", str(options.speed), "--block-size", "64")


def _model(options: argparse.Namespace, live: Live, say: Callable[[str], None]) -> EngineModel:
    if options.simulate is not None:
        return preset(options.simulate)
    if options.engine is not None:
        return chosen_model("demo", options.engine)
    url = live.workers[0][2]
    runs = probe_worker(url, preset("demo"), PromptForm.IDS, options.vocabulary, options.seed)
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
    settings = CoreSettings(queue_timeout_s=1e9)
    run = World(apart, make_cluster(1, 1, 0, free), lambda index: Core(settings)).run()
    predicted = [record.first_token_at - record.arrived_at for record in run.records if record.first_token_at]
    plan = BenchPlan("omni-demo", chat=False, stream=True, concurrency=1, timeout_s=300.0)
    prompts = Prompts(PromptForm.IDS, 64, options.vocabulary)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seen = runner.run(send_all(live.url, apart, prompts, plan))
    rest = [
        ((1.0, float(length)), max(1e-6, one.first - one.sent - alone))
        for length, one, alone in zip(lengths, seen, predicted, strict=True)
        if one.first is not None
    ]
    constant, per_token = least_squares(rest)
    return structs.replace(model, link_s=constant, link_bytes_per_s=model.kv_bytes_per_token / max(per_token, 1e-12))


def _measure(
    options: argparse.Namespace, live: Live, workload: Workload, slo: Slo, say: Callable[[str], None]
) -> Figures:
    form = PromptForm.WORDS if options.simulate is not None else PromptForm.IDS
    prompts = Prompts(form, workload.block_tokens, options.vocabulary)
    name = "simulated" if options.simulate is not None else "omni-demo"
    plan = BenchPlan(name, chat=False, stream=True, concurrency=None, timeout_s=600.0, speed=options.speed)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seen = [uncompressed(one, options.speed) for one in runner.run(send_all(live.url, workload, prompts, plan))]
    for line in faults(seen):
        say(line)
    return bench_figures(seen, slo)


def _compare(live: Figures, simulated: Figures, tolerance: float, say: Callable[[str], None]) -> int:
    if live.ttft is None or simulated.ttft is None:
        raise ConfigError("nothing was answered; there is nothing to compare")
    rows = [["", "TTFT mean", "p50", "p90", "p99", "TPOT mean", "answered"]]
    for name, found in (("live", live), ("simulated", simulated)):
        ttft = found.ttft
        assert ttft is not None
        tpot = "-" if found.tpot is None else seconds_text(found.tpot.mean)
        cells = [seconds_text(value) for value in (ttft.mean, ttft.p50, ttft.p90, ttft.p99)]
        rows.append([name, *cells, tpot, str(found.outcomes.get("completed", 0))])
    say(table(rows))
    apart = simulated.ttft.mean / live.ttft.mean - 1
    within = abs(apart) <= tolerance
    say(f"mean TTFT simulated {apart:+.1%} of live: {'within' if within else 'more than'} {tolerance:.0%}")
    return 0 if within else EXIT_APART
