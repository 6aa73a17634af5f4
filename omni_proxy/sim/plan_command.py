"""`omni-proxy plan`: from options to a printed answer."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import msgspec

from omni_proxy.config import Config, ConfigError, load
from omni_proxy.core import Core, CoreSettings
from omni_proxy.sim.cluster import make_cluster
from omni_proxy.sim.commands import SettingsOf, parse_slo, write_file
from omni_proxy.sim.engine_model import EngineModel
from omni_proxy.sim.figures import Figures, Slo, figures
from omni_proxy.sim.plan import Planner, Target, check_possible, plan_text
from omni_proxy.sim.presets import chosen_model
from omni_proxy.sim.setup import WorkloadChoice, at_rate, load_workload
from omni_proxy.sim.workload import Workload
from omni_proxy.sim.world import World

EXIT_NOT_MET = 1


def run_plan(options: argparse.Namespace, settings_of: SettingsOf, say: Callable[[str], None]) -> int:
    """The command: 0 where a split meets the limits, 1 where none does. Raises ConfigError."""
    if options.attain > 1:
        raise ConfigError(f"--attain: must be a share, at most 1, got {options.attain:g}")
    settings = settings_of(load(options.config) if options.config is not None else Config())
    model = chosen_model(options.preset, options.engine)
    workload = load_workload(WorkloadChoice(options.trace, options.synthetic, options.limit, options.seed))
    if options.rate is not None:
        workload = at_rate(workload, options.rate)
    target = Target(parse_slo(options.slo), options.attain)
    check_possible(workload, model, target)
    simulate = _Simulator(model, settings, target.slo)
    found = Planner(workload, target, simulate).plan(options.workers)
    say(plan_text(found))
    if options.json is not None:
        write_file(options.json, msgspec.json.format(msgspec.json.encode(found), indent=1))
    return 0 if found.fewest is not None else EXIT_NOT_MET


class _Simulator:
    """Runs the live core on so many workers."""

    def __init__(self, model: EngineModel, settings: CoreSettings, slo: Slo) -> None:
        self._model = model
        self._settings = settings
        self._slo = slo

    def __call__(self, workload: Workload, prefill: int, decode: int) -> Figures:
        workers = make_cluster(prefill, decode, 0, self._model)
        run = World(workload, workers, lambda index: Core(self._settings)).run()
        return figures(run.records, self._slo)
