"""The commands that plan and measure: the simulator's, `place` and `devices`."""

from __future__ import annotations

import argparse
from pathlib import Path

from omni_proxy.cli.arguments import Commands, positive, whole
from omni_proxy.config import ConfigError
from omni_proxy.demo import demo_model
from omni_proxy.sim import options as sim_options


def add_planning(commands: Commands) -> None:
    """Add the commands."""
    _add_place(commands)
    _add_devices(commands)
    sim_options.add_simulate(commands, _simulate)
    sim_options.add_plan(commands, _plan)
    sim_options.add_replay(commands, _replay)
    sim_options.add_bench(commands, _bench)
    sim_options.add_fit(commands, _fit)
    sim_options.add_fidelity(commands, _fidelity)


def _add_place(commands: Commands) -> None:
    place = commands.add_parser("place", help="place experts on ranks from their loads, and compare before and after")
    place.add_argument("--loads", type=Path, required=True, metavar="FILE", help="tokens per layer and expert")
    place.add_argument("--ranks", type=positive, required=True, metavar="N")
    slots = place.add_mutually_exclusive_group()
    slots.add_argument("--redundancy", type=whole, default=None, metavar="N", help="extra replicas per layer")
    slots.add_argument("--slots", type=positive, default=None, metavar="N", help="experts per rank and layer instead")
    place.add_argument("--nodes", type=positive, default=1, metavar="N", help="keep expert groups on one node each")
    place.add_argument("--groups", type=positive, default=1, metavar="N", help="expert groups of the router")
    place.add_argument("--layers", type=positive, default=None, metavar="N", help="layers the loads must have")
    place.add_argument("--split", choices=("even", "proportional"), default="even", help="of tokens over replicas")
    place.add_argument("--memory", choices=("fixed", "pooled"), default="fixed", help="slots per layer, or in all")
    place.add_argument("--from", dest="start", type=Path, default=None, metavar="FILE", help="placement that runs now")
    place.add_argument("--max-moves", type=whole, default=None, metavar="N", help="per layer, starting --from")
    place.add_argument("--expert-bytes", type=positive, default=None, metavar="BYTES", help="weights of one expert")
    place.add_argument("--out", type=Path, default=None, metavar="FILE", help="write the placement as JSON")
    place.add_argument("--pattern", type=Path, default=None, metavar="FILE", help="write it as 0/1 array (.npy)")
    place.add_argument("--heatmap", type=Path, default=None, metavar="FILE", help="write heat maps (.html)")
    place.set_defaults(run=_place)


def _add_devices(commands: Commands) -> None:
    devices = commands.add_parser("devices", help="show devices and the parallel layout for a model on them")
    model = "folder, config.json, or a known name such as deepseek-v3 (default: the demo model)"
    devices.add_argument("model", nargs="?", default=None, metavar="MODEL", help=model)
    devices.add_argument("--devices", default=None, metavar="CHIP:N", help="plan for these, not for what is found")
    devices.add_argument("--dtype", default=None, metavar="TYPE", help="of the weights (default: as the config says)")
    devices.add_argument("--prompt-tokens", type=positive, default=4096, metavar="N")
    devices.add_argument("--output-tokens", type=positive, default=1024, metavar="N")
    devices.add_argument(
        "--cached-share", type=float, default=0.0, metavar="SHARE", help="of prompt tokens (default 0)"
    )
    devices.add_argument("--tpot-ms", type=float, default=50.0, metavar="MS", help="limit (default 50)")
    devices.add_argument("--ttft-ms", type=float, default=2000.0, metavar="MS", help="limit of prefill (default 2000)")
    for role in ("prefill", "decode"):
        devices.add_argument(f"--{role}-ranks", type=positive, default=None, metavar="N", help="ranks of an instance")
    devices.add_argument("--json", action="store_true", help="print JSON")
    devices.set_defaults(run=_devices)


def _simulate(options: argparse.Namespace) -> int:
    from omni_proxy.parts import core_settings
    from omni_proxy.sim.commands import simulate

    return simulate(options, core_settings, print)


def _plan(options: argparse.Namespace) -> int:
    from omni_proxy.parts import core_settings
    from omni_proxy.sim.plan_command import run_plan

    return run_plan(options, core_settings, print)


def _replay(options: argparse.Namespace) -> int:
    from omni_proxy.core import Core
    from omni_proxy.sim.replay import run_replay

    return run_replay(options, Core, print)


def _bench(options: argparse.Namespace) -> int:
    from omni_proxy.sim.bench.command import bench

    return bench(options, print)


def _fit(options: argparse.Namespace) -> int:
    from omni_proxy.sim.fit_command import run_fit

    return run_fit(options, print)


def _fidelity(options: argparse.Namespace) -> int:
    from omni_proxy.parts import core_settings
    from omni_proxy.sim.fidelity import run_fidelity

    return run_fidelity(options, core_settings, print)


def _place(options: argparse.Namespace) -> int:
    try:
        from omni_proxy.workers.engine.placement.command import PlaceOptions, run_place
        from omni_proxy.workers.engine.placement.errors import PlacementError
    except ImportError as exc:
        raise ConfigError(f"placement needs the extra [worker]: pip install 'omni-proxy[worker]' ({exc})") from exc
    given = {name: value for name, value in vars(options).items() if name not in ("run", "command")}
    try:
        return run_place(PlaceOptions(**given), print)
    except PlacementError as exc:
        raise ConfigError(str(exc)) from exc


def _devices(options: argparse.Namespace) -> int:
    try:
        from omni_kernels.layout import LayoutError
        from omni_proxy.devices import run_devices
    except ImportError as exc:
        raise ConfigError(f"devices needs the extra [worker]: pip install 'omni-proxy[worker]' ({exc})") from exc
    try:
        return run_devices(options, demo_model(), print)
    except LayoutError as exc:
        raise ConfigError(str(exc)) from exc
