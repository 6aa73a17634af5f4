"""`omni-proxy simulate`: from options to a printed report."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from omni_proxy.config import Config, ConfigError, load
from omni_proxy.core import Core, CoreSettings
from omni_proxy.observe.recorder import Recorder
from omni_proxy.sim.ablations import ablations
from omni_proxy.sim.baselines import router
from omni_proxy.sim.cluster import SimWorker, slowed
from omni_proxy.sim.exact_index import ExactIndex
from omni_proxy.sim.figures import Slo
from omni_proxy.sim.outages import OutagePlan, parse_outage
from omni_proxy.sim.presets import chosen_model
from omni_proxy.sim.report import Report, comparison, make_report, to_json, to_text
from omni_proxy.sim.run import CoreLike
from omni_proxy.sim.setup import (
    LoadBasis,
    OutageChoice,
    WorkloadChoice,
    at_load,
    cluster_of,
    load_workload,
    offered_load,
    outage_plan,
)
from omni_proxy.sim.workload import Workload
from omni_proxy.sim.world import World

SettingsOf = Callable[[Config], CoreSettings]
COMPARED = ("match-ratio", "token-cost", "least-requests", "round-robin")


def simulate(options: argparse.Namespace, settings_of: SettingsOf, say: Callable[[str], None]) -> int:
    """Run, print, write. Raises ConfigError."""
    config = load(options.config) if options.config is not None else None
    model = chosen_model(options.preset, options.engine)
    slo = parse_slo(options.slo)
    workload = load_workload(WorkloadChoice(options.trace, options.synthetic, options.limit, options.seed))
    workers = cluster_of(config, options.prefill, options.decode, options.mixed, model)
    basis = LoadBasis(options.load_basis)
    if options.load is not None:
        workload = at_load(workload, workers, options.load, basis)
    described = _describe(options, offered_load(workload, workers, basis) if workload.span_s else None)
    workers = slowed(workers, dict(options.slow))  # the load is that of workers as they should be
    settings = settings_of(config or Config())
    outages = _outages(options, config or Config(), workers, workload)
    reports: list[Report] = []
    for title, make_core in _cores(settings, options.compare):
        begun = time.process_time()
        with _recording(options, settings if not reports else None) as observers:
            run = World(workload, workers, make_core, observers=observers, outages=outages).run()
        reports.append(make_report(run, slo, title, described, time.process_time() - begun))
    say(comparison(reports) if options.compare else to_text(reports[0]))
    if options.compare:
        say("\neach mechanism off in turn; ratios: all on by this one")
        say(comparison([reports[0], *_ablated(workload, workers, settings, slo, described)]))
    _write(options, reports)
    return 0


def _outages(
    options: argparse.Namespace, config: Config, workers: Sequence[SimWorker], workload: Workload
) -> OutagePlan:
    named = tuple(parse_outage(text) for text in options.outage)
    plan = outage_plan(OutageChoice(named, options.outages, options.seed), config, workers, workload)
    if plan.outages and options.compare:
        raise ConfigError("--compare: the other routers do not find out that workers are down; leave --outage out")
    return plan


def _ablated(
    workload: Workload, workers: Sequence[SimWorker], settings: CoreSettings, slo: Slo, described: dict[str, str]
) -> Iterator[Report]:
    for title, changed in ablations(settings):
        begun = time.process_time()
        run = World(workload, workers, lambda index, changed=changed: Core(changed)).run()  # type: ignore[misc]
        yield make_report(run, slo, title, described, time.process_time() - begun)


@contextmanager
def _recording(options: argparse.Namespace, settings: CoreSettings | None) -> Iterator[list[Recorder]]:
    """The recorder that was asked for, closed at the end; `settings` None: of this run nothing is recorded."""
    if options.record is None or settings is None:
        yield []
        return
    try:
        recorder = Recorder(options.record, settings)
    except OSError as exc:
        raise ConfigError(f"{options.record}: {exc.strerror or exc}") from exc
    try:
        yield [recorder]
    finally:
        recorder.close()


def _cores(settings: CoreSettings, compare: bool) -> list[tuple[str, Callable[[ExactIndex], CoreLike]]]:
    cores: list[tuple[str, Callable[[ExactIndex], CoreLike]]] = [
        ("omni-proxy", lambda index: Core(settings)),  # hears KV events and keeps its own index
    ]
    if compare:
        cores += [(name, router(name)) for name in COMPARED]
    return cores


def _describe(options: argparse.Namespace, offered: float | None) -> dict[str, str]:
    """The options that make the run what it is."""
    named = ("trace", "synthetic", "limit", "seed", "preset", "engine", "config", "load", "load_basis", "outages")
    chosen = {name: getattr(options, name) for name in named}
    text = {name: str(value.name if isinstance(value, Path) else value) for name, value in chosen.items()}
    settings = {name: value for name, value in text.items() if chosen[name] is not None}
    if offered is not None:
        settings["offered prefill work / capacity"] = f"{offered:.3f}"
    return settings


def _write(options: argparse.Namespace, reports: list[Report]) -> None:
    if options.json is not None:
        whole = to_json(reports[0]) if len(reports) == 1 else msgspec.json.encode(reports)
        write_file(options.json, whole)
    if options.html is not None:
        from omni_proxy.sim.html_report import to_html

        write_file(options.html, to_html(reports).encode())


def write_file(path: Path, data: bytes) -> None:
    """Write a result. Raises ConfigError."""
    try:
        path.write_bytes(data)
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror or exc}") from exc


def parse_slo(text: str) -> Slo:
    """`ttft=2,tpot=0.05`; what is left out has its default. Raises ConfigError."""
    values: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in Slo.__struct_fields__:
            raise ConfigError(f"--slo: there is no limit {name!r}; known are {', '.join(Slo.__struct_fields__)}")
        try:
            values[name] = float(value)
        except ValueError:
            raise ConfigError(f"--slo: {name}: must be a number of seconds, got {value!r}") from None
    try:
        return msgspec.convert(values, Slo)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"--slo: {exc}") from exc
