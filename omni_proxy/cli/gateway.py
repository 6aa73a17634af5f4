"""The commands that run a gateway: `up` and `serve`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from pathlib import Path

from omni_proxy.cli.arguments import Commands, add_drafts, add_expert_parallel, count, log_to_stderr, port
from omni_proxy.config import Config, ConfigError, ScheduleMode, effective, load
from omni_proxy.demo import DEMO_NAME, demo_model


def add_gateway(commands: Commands) -> None:
    """Add the commands, and those of the processes that they start."""
    _add_up(commands)
    _add_serve(commands)
    _add_children(commands)


def _add_up(commands: Commands) -> None:
    up = commands.add_parser("up", help="start workers and the gateway on this machine")
    up.add_argument("--prefill", type=count, default=None, metavar="N", help="prefill workers (default 2)")
    up.add_argument("--decode", type=count, default=None, metavar="M", help="decode workers (default 1)")
    up.add_argument(
        "--model", type=Path, default=None, metavar="PATH", help="model folder or GGUF file (default: the demo)"
    )
    up.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of activations and cache (default float32)"
    )
    up.add_argument("--quantization", choices=("int8", "w8a8"), default=None, help="of the weights (w8a8: and of rows)")
    add_drafts(up)
    up.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    up.add_argument("--port", type=port, default=8000, metavar="P", help="port to listen on (default 8000)")
    up.add_argument("--access-log", default=None, metavar="FILE", help="write an access log; - is standard output")
    modes = [mode.value for mode in ScheduleMode]
    up.add_argument(
        "--schedule-mode",
        choices=modes,
        default=ScheduleMode.AUTO.value,
        help="sequential: D pulls when P is done; parallel: P pushes while it computes (default auto: sequential)",
    )
    up.add_argument("--resume", action="store_true", help="streams whose decode worker dies go on with another")
    up.add_argument("--ray", default=None, metavar="ADDRESS", help="workers on a Ray cluster: auto, local or HOST:PORT")
    up.add_argument(
        "--ray-pools", type=Path, default=None, metavar="FILE", help="engine, devices, flags of the workers"
    )
    add_expert_parallel(up)
    up.set_defaults(run=_up)


def _add_serve(commands: Commands) -> None:
    serve = commands.add_parser("serve", help="run the gateway in front of workers that already run")
    serve.add_argument("-c", "--config", type=Path, required=True, metavar="FILE")
    serve.add_argument("--print-config", action="store_true", help="print the effective config and end")
    serve.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    serve.set_defaults(run=_serve)


def _add_children(commands: Commands) -> None:
    """The processes of `processes: N`; started by `serve`, not by people."""
    for name in ("_scheduler", "_front"):
        child = commands.add_parser(name)
        child.add_argument("--dir", type=Path, required=True)
        child.add_argument("--log-level", default="info")
        child.add_argument("--ready-fd", type=int, required=True)
        child.add_argument("--parent-fd", type=int, required=True)
        child.add_argument("--slot", type=int, default=0)
        child.set_defaults(run=_child)


def _up(options: argparse.Namespace) -> int:
    if options.ray is not None:
        return _up_on_ray(options)
    if options.ray_pools is not None:
        raise ConfigError("--ray-pools: needs --ray ADDRESS")
    from omni_proxy.gguf.file import GgufError
    from omni_proxy.gguf.folder import model_name
    from omni_proxy.up import UpOptions, run_up

    model = options.model or demo_model()
    try:
        name = DEMO_NAME if options.model is None else model_name(model)
    except GgufError as exc:
        raise ConfigError(f"--model: {exc}") from exc
    return run_up(
        UpOptions(
            model,
            name,
            options.prefill or 2,
            options.decode or 1,
            options.host,
            options.port,
            options.access_log,
            options.expert_parallel,
            options.expert_redundancy,
            options.expert_window,
            ScheduleMode(options.schedule_mode),
            options.quantization,
            options.resume,
            options.speculation,
            options.draft_model,
            options.dtype,
        )
    )


def _up_on_ray(options: argparse.Namespace) -> int:
    from omni_proxy.ray.command import RayOptions, run_ray_up

    flags = {"quantization": None, "expert_parallel": 1, "expert_redundancy": None}
    for name, default in {**flags, "speculation": "ngram", "draft_model": None, "dtype": "float32"}.items():
        if getattr(options, name) != default:
            raise ConfigError(f"--{name.replace('_', '-')}: belongs into the flags of the pools file with --ray")
    return run_ray_up(
        RayOptions(
            options.ray,
            options.ray_pools,
            None if options.model is None else str(options.model),
            DEMO_NAME,
            demo_model(),
            options.prefill or (None if options.ray_pools else 2),
            options.decode or (None if options.ray_pools else 1),
            options.host,
            options.port,
            options.access_log,
            ScheduleMode(options.schedule_mode),
            options.resume,
        )
    )


def _serve(options: argparse.Namespace) -> int:
    for number in (signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # until they are obeyed; both would end a process that is starting
    config = load(options.config)
    if options.print_config:
        print(effective(config), end="")
        return 0
    log_to_stderr(options.log_level)
    if config.processes > 1:
        return _serve_in_processes(config, options.config, options.log_level)
    logging.getLogger("omni_proxy").info("effective config:\n%s", effective(config))
    return run_serve(config, options.config)


def _serve_in_processes(config: Config, path: Path, log_level: str) -> int:
    import uvloop

    from omni_proxy.processes.supervisor import supervise

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(supervise(config, path, log_level))
    return 0


def _child(options: argparse.Namespace) -> int:
    from omni_proxy.processes.child import run_front, run_scheduler

    log_to_stderr(options.log_level)
    if options.command == "_scheduler":
        return run_scheduler(options.dir, options.ready_fd, options.parent_fd)
    return run_front(options.dir, options.ready_fd, options.parent_fd, options.slot)


def run_serve(config: Config, path: Path) -> int:
    """Run the gateway until it is told to stop; SIGHUP loads the file again, SIGUSR1 opens the access log again."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_until_stopped(config, path))
    return 0


async def _serve_until_stopped(config: Config, path: Path) -> None:
    from omni_proxy.api.serving import calm_collector, listening_socket, on_signals, stop_signals
    from omni_proxy.build import Gateway
    from omni_proxy.parts import check_usable
    from omni_proxy.reload import Reloads

    listen, asked = config.listen, asyncio.Event()
    with listening_socket(listen.host, listen.port, listen.backlog) as sock, stop_signals() as (stop, force):
        gateway = Gateway(config)
        calm_collector()
        with on_signals({signal.SIGHUP: asked.set, signal.SIGUSR1: gateway.front.reopen_log}):
            following = asyncio.create_task(gateway.follow(Reloads(path, config, check_usable), asked))
            try:
                await gateway.serve(sock, stop, force)
            finally:
                following.cancel()
