"""From what a user asks for to a world: workload, load, cluster, cores. Pure, except that traces are read here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from msgspec import structs

from omni_proxy.config import Config, ConfigError
from omni_proxy.messages import Role
from omni_proxy.sim.cluster import SimWorker, make_cluster, make_worker, prefill_workers
from omni_proxy.sim.engine_model import EngineModel
from omni_proxy.sim.outages import Outage, OutagePlan, checked, random_outages
from omni_proxy.sim.synthetic import parse_synthetic
from omni_proxy.sim.traces import read_trace
from omni_proxy.sim.workload import Workload


class LoadBasis(StrEnum):
    """Which prefill work `--load` counts."""

    COLD = "cold"
    """Every prompt whole, as if no worker had cached anything."""
    SHARED = "shared"
    """What is left when one cache without bounds, shared by all workers, has answered first."""


@dataclass(frozen=True, slots=True)
class WorkloadChoice:
    """Where requests come from. Exactly one of `trace` and `synthetic` is given."""

    trace: Path | None
    synthetic: str | None
    limit: int | None
    seed: int


def load_workload(choice: WorkloadChoice) -> Workload:
    """The requests that a user asks for. Raises ConfigError."""
    if (choice.trace is None) == (choice.synthetic is None):
        raise ConfigError("give either --trace or --synthetic")
    if choice.trace is not None:
        return read_trace(choice.trace, choice.limit)
    assert choice.synthetic is not None
    return parse_synthetic(choice.synthetic, choice.seed).head(choice.limit)


def cluster_of(
    config: Config | None, prefill: int, decode: int, mixed: int, model: EngineModel
) -> tuple[SimWorker, ...]:
    """The workers of a config file, or so many of each kind. Raises ConfigError where prompts or answers go nowhere."""
    if config is not None and config.workers and not (prefill or decode or mixed):
        workers = tuple(_configured(config, model))
    else:
        workers = make_cluster(prefill, decode, mixed, model)
    roles = {w.spec.role for w in workers}
    if Role.MIXED not in roles and not {Role.PREFILL, Role.DECODE} <= roles:
        raise ConfigError("there must be at least one prefill and one decode worker, or a mixed one")
    return workers


def _configured(config: Config, model: EngineModel) -> Iterable[SimWorker]:
    for worker in sorted(config.workers, key=lambda w: w.name):
        if worker.down:
            continue
        made = make_worker(worker.name, worker.role, model)
        spec = structs.replace(
            made.spec,
            group=worker.group,
            max_seqs=worker.max_seqs,
            max_batch_tokens=worker.max_batch_tokens,
            weight=worker.weight,
        )
        yield SimWorker(spec, made.model)


@dataclass(frozen=True, slots=True)
class OutageChoice:
    """Outages by name, and settings of random ones; None: there are none."""

    named: tuple[Outage, ...]
    random: str | None
    seed: int


def outage_plan(choice: OutageChoice, config: Config, workers: Sequence[SimWorker], workload: Workload) -> OutagePlan:
    """The outages that a user asks for, found out as a gateway with this config would. Raises ConfigError."""
    names = [worker.spec.name for worker in workers]
    outages = list(choice.named)
    if choice.random is not None:
        outages += random_outages(choice.random, names, workload.span_s, choice.seed)
    return plan_for(checked(outages, names), config)


def plan_for(outages: tuple[Outage, ...], config: Config) -> OutagePlan:
    """Outages as a gateway with this config finds out about them."""
    health, usual = config.health, OutagePlan()
    down_after_s = (health.failures_down - 0.5) * health.interval_s
    return OutagePlan(outages, down_after_s, min(usual.up_after_s, health.interval_s / 2), bool(config.resume))


def offered_load(workload: Workload, workers: Sequence[SimWorker], basis: LoadBasis) -> float:
    """Seconds of prefill that the workload asks of its workers, for each second that it lasts and each worker.

    A prompt counts with the time that it takes on an idle worker; a mixed worker counts as a prefill worker.
    """
    able = prefill_workers(workers)
    if workload.span_s <= 0:
        raise ConfigError("--load: the workload's requests all arrive at once; there is no rate to scale")
    work = prefill_work(workload, able[0].model, basis)
    return work / (workload.span_s * len(able))


def prefill_work(workload: Workload, model: EngineModel, basis: LoadBasis) -> float:
    """Seconds of prefill in a workload."""
    if basis is LoadBasis.COLD:
        return sum(model.alone_s(request.prompt_tokens) for request in workload.requests)
    pairs = zip(workload.requests, known_tokens(workload), strict=True)
    return sum(model.alone_s(request.prompt_tokens - known, known) for request, known in pairs)


def known_tokens(workload: Workload) -> Iterable[int]:
    """For each request, the prompt tokens that a cache without bounds, shared by all workers, would hold by then."""
    seen: set[int] = set()
    for request in workload.requests:
        keys = request.full_blocks(workload.block_tokens)
        known = next((place for place, key in enumerate(keys) if key not in seen), len(keys))
        seen.update(keys)
        yield min(known * workload.block_tokens, request.prompt_tokens - 1)


def at_load(workload: Workload, workers: Sequence[SimWorker], load: float, basis: LoadBasis) -> Workload:
    """The workload with its instants scaled so that the offered prefill work is `load` of the capacity."""
    return workload.stretched(offered_load(workload, workers, basis) / load)


def at_rate(workload: Workload, rate: float) -> Workload:
    """The workload with so many requests a second on average. Raises ConfigError."""
    if workload.span_s <= 0:
        raise ConfigError("--rate: the workload's requests all arrive at once; there is no rate to scale")
    return workload.stretched(len(workload.requests) / workload.span_s / rate)
