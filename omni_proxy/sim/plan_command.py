"""`omni-proxy plan`: from options to a printed answer."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import msgspec

from omni_proxy.config import Config, ConfigError, load
from omni_proxy.core import Core, CoreSettings
from omni_proxy.messages import Role
from omni_proxy.sim.cluster import make_cluster
from omni_proxy.sim.commands import SettingsOf, parse_slo, write_file
from omni_proxy.sim.engine_model import EngineModel
from omni_proxy.sim.figures import Figures, Slo, figures
from omni_proxy.sim.outages import Outage
from omni_proxy.sim.plan import Planner, Target, check_possible, plan_text
from omni_proxy.sim.presets import chosen_model
from omni_proxy.sim.setup import WorkloadChoice, at_rate, load_workload, plan_for
from omni_proxy.sim.workload import Workload
from omni_proxy.sim.world import World

EXIT_NOT_MET = 1


def run_plan(options: argparse.Namespace, settings_of: SettingsOf, say: Callable[[str], None]) -> int:
    """The command: 0 where a split meets the limits, 1 where none does. Raises ConfigError."""
    if options.attain > 1:
        raise ConfigError(f"--attain: must be a share, at most 1, got {options.attain:g}")
    config = load(options.config) if options.config is not None else Config()
    settings = settings_of(config)
    model = chosen_model(options.preset, options.engine)
    workload = load_workload(WorkloadChoice(options.trace, options.synthetic, options.limit, options.seed))
    if options.rate is not None:
        workload = at_rate(workload, options.rate)
    target = Target(parse_slo(options.slo), options.attain)
    check_possible(workload, model, target)
    simulate = _Simulator(model, settings, target.slo, config)
    found = Planner(workload, target, simulate).plan(options.workers)
    say(plan_text(found))
    if options.json is not None:
        write_file(options.json, msgspec.json.format(msgspec.json.encode(found), indent=1))
    return 0 if found.fewest is not None else EXIT_NOT_MET


class _Simulator:
    """Runs the live core on so many workers."""

    def __init__(self, model: EngineModel, settings: CoreSettings, slo: Slo, config: Config) -> None:
        self._model = model
        self._settings = settings
        self._slo = slo
        self._config = config

    def __call__(self, workload: Workload, prefill: int, decode: int, lost: Role | None) -> Figures:
        workers = make_cluster(prefill, decode, 0, self._model)
        outages = plan_for(() if lost is None else (_loss(workload, lost),), self._config)
        run = World(workload, workers, lambda index: Core(self._settings), outages=outages).run()
        return figures(run.records, self._slo)


def _loss(workload: Workload, role: Role) -> Outage:
    """The first worker of a role dies in the middle of the workload."""
    first = next(request.arrival_s for request in workload.requests if request.after is None)
    return Outage(f"{role.value}-0", first + workload.span_s / 2, None)
