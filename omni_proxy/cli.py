"""The command line: up | serve | worker | simulate | check | place ... A known fault is one line and exit code 2."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from omni_proxy import __version__
from omni_proxy.config import Config, ConfigError, ConnectorName, ScheduleMode, effective, load
from omni_proxy.explain_command import add_explain
from omni_proxy.operate import add_operating
from omni_proxy.sim import options as sim_options

EXIT_USAGE: Final = 2
DEMO_NAME: Final = "omni-demo"


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage is a `--help` away."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message} (try --help)\n")


def demo_model() -> Path:
    """The folder of the model that ships with the package."""
    return Path(__file__).parent / "workers" / "demo_model"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except ConfigError as exc:
        print(f"omni-proxy {options.command}: {exc}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


# ------------------------------------------------------------------------------------------- arguments


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="omni-proxy", description="A PD-disaggregated serving gateway for large language models.")
    parser.add_argument("--version", action="version", version=f"omni-proxy {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    _add_up(commands)
    _add_serve(commands)
    _add_worker(commands)
    _add_top(commands)
    _add_check(commands)
    _add_key(commands)
    commands.add_parser("schema", help="print the JSON schema of the config, for editors").set_defaults(run=_schema)
    _add_import_nginx(commands)
    _add_children(commands)
    _add_place(commands)
    _add_devices(commands)
    _add_trace(commands)
    add_operating(commands)
    add_explain(commands)
    _add_deploy(commands)
    sim_options.add_simulate(commands, _simulate)
    sim_options.add_plan(commands, _plan)
    sim_options.add_replay(commands, _replay)
    sim_options.add_bench(commands, _bench)
    sim_options.add_fit(commands, _fit)
    sim_options.add_fidelity(commands, _fidelity)
    _add_completion(commands)
    return parser


def _add_up(commands: argparse._SubParsersAction[_Parser]) -> None:
    up = commands.add_parser("up", help="start workers and the gateway on this machine")
    up.add_argument("--prefill", type=_count, default=None, metavar="N", help="prefill workers (default 2)")
    up.add_argument("--decode", type=_count, default=None, metavar="M", help="decode workers (default 1)")
    up.add_argument(
        "--model", type=Path, default=None, metavar="PATH", help="model folder or GGUF file (default: the demo)"
    )
    up.add_argument("--quantization", choices=("int8",), default=None, help="of the weights, at load")
    up.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    up.add_argument("--port", type=_port, default=8000, metavar="P", help="port to listen on (default 8000)")
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
    _add_expert_parallel(up)
    up.set_defaults(run=_up)


def _add_serve(commands: argparse._SubParsersAction[_Parser]) -> None:
    serve = commands.add_parser("serve", help="run the gateway in front of workers that already run")
    serve.add_argument("-c", "--config", type=Path, required=True, metavar="FILE")
    serve.add_argument("--print-config", action="store_true", help="print the effective config and end")
    serve.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    serve.set_defaults(run=_serve)


def _add_top(commands: argparse._SubParsersAction[_Parser]) -> None:
    top = commands.add_parser("top", help="watch a gateway in the terminal")
    top.add_argument("url", nargs="?", default=None, metavar="URL", help="default: http://127.0.0.1:8000")
    top.add_argument("-c", "--config", type=Path, default=None, metavar="FILE", help="address and token from a config")
    top.add_argument("--token-file", type=Path, default=None, metavar="FILE", help="holds the admin port's token")
    top.add_argument("--once", action="store_true", help="print one snapshot and end")
    top.add_argument("--width", type=_positive, default=None, metavar="COLUMNS", help="of --once (default: terminal)")
    top.add_argument("--interval", type=_interval, default=1.0, metavar="SECONDS", help="default 1")
    top.set_defaults(run=_top)


def _add_children(commands: argparse._SubParsersAction[_Parser]) -> None:
    """The processes of `processes: N`; started by `serve`, not by people."""
    for name in ("_scheduler", "_front"):
        child = commands.add_parser(name)
        child.add_argument("--dir", type=Path, required=True)
        child.add_argument("--log-level", default="info")
        child.add_argument("--ready-fd", type=int, required=True)
        child.add_argument("--parent-fd", type=int, required=True)
        child.add_argument("--slot", type=int, default=0)
        child.set_defaults(run=_child)


def _add_check(commands: argparse._SubParsersAction[_Parser]) -> None:
    check = commands.add_parser("check", help="validate a config and print its effective values")
    check.add_argument("-c", "--config", type=Path, required=True, metavar="FILE")
    check.set_defaults(run=_check)


def _add_key(commands: argparse._SubParsersAction[_Parser]) -> None:
    key = commands.add_parser("key", help="make an API key, and the hash of it that stands in a config")
    key.add_argument("--stdin", action="store_true", help="print the hash of the key that is typed or piped in")
    key.set_defaults(run=_key)


def _add_import_nginx(commands: argparse._SubParsersAction[_Parser]) -> None:
    importing = commands.add_parser("import-nginx", help="turn an nginx config into one of ours")
    importing.add_argument("source", type=Path, metavar="NGINX.CONF")
    importing.add_argument("-o", "--output", type=Path, default=None, metavar="FILE", help="default: standard output")
    for leg in ("prefill", "decode"):
        help_text = f"this upstream's workers do {leg}; default: those whose name says so"
        importing.add_argument(f"--{leg}", action="append", default=[], metavar="UPSTREAM", help=help_text)
    names = [name.value for name in ConnectorName]
    importing.add_argument("--connector", choices=names, default="vllm-nixl", help="of prefill and decode workers")
    importing.set_defaults(run=_import_nginx)


def _add_worker(commands: argparse._SubParsersAction[_Parser]) -> None:
    worker = commands.add_parser("worker", help="run one embedded worker")
    worker.add_argument("--role", choices=("prefill", "decode", "mixed"), default="mixed")
    worker.add_argument(
        "--model", type=Path, default=None, metavar="PATH", help="model folder or GGUF file (default: the demo)"
    )
    worker.add_argument("--served-model-name", action="append", default=[], metavar="NAME")
    worker.add_argument("--host", default="127.0.0.1")
    worker.add_argument("--port", type=_port, default=0, metavar="P", help="0 lets the system choose (default)")
    worker.add_argument("--side-channel-port", type=_port, default=0, metavar="P", help="port of the KV handoff")
    worker.add_argument("--kv-events-port", type=_port, default=None, metavar="P", help="publish cache events there")
    worker.add_argument("--block-size", type=_positive, default=16, metavar="TOKENS")
    worker.add_argument("--kv-cache-mib", type=_positive, default=256, metavar="MIB")
    worker.add_argument("--max-num-seqs", type=_positive, default=32, metavar="N")
    worker.add_argument("--max-num-batched-tokens", type=_positive, default=2048, metavar="TOKENS")
    worker.add_argument("--max-model-len", type=_positive, default=None, metavar="TOKENS")
    worker.add_argument("--kv-lease", type=_seconds, default=30.0, metavar="SECONDS")
    worker.add_argument("--kv-load-failure-policy", choices=("fail", "recompute"), default="fail")
    worker.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    worker.add_argument("--quantization", choices=("int8",), default=None, help="of the weights, at load")
    worker.add_argument("--speculation", choices=("ngram", "off"), default="ngram", help="drafts from the text itself")
    worker.add_argument("--speculative-tokens", type=_positive, default=8, metavar="N", help="the longest draft")
    worker.add_argument("--threads", type=_positive, default=1, metavar="N")
    _add_expert_parallel(worker)
    where = "register at this gateway's port for that (several)"
    worker.add_argument("--register", action="append", default=[], metavar="URL", help=where)
    worker.add_argument("--token-file", type=Path, default=None, metavar="FILE", help="holds the token for that")
    worker.add_argument("--advertise", default=None, metavar="HOST", help="by which gateways reach it; default: --host")
    worker.add_argument("--name", default=None, metavar="NAME", help="by which gateways know it")
    worker.add_argument("--drain", type=_seconds, default=5.0, metavar="SECONDS")
    worker.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="warning")
    worker.add_argument("--ready-fd", type=int, default=None, help=argparse.SUPPRESS)
    worker.add_argument("--parent-fd", type=int, default=None, help=argparse.SUPPRESS)
    sim_options.add_pretending(worker)
    worker.set_defaults(run=_worker)


def _add_expert_parallel(command: argparse.ArgumentParser) -> None:
    command.add_argument("--expert-parallel", type=_count, default=1, metavar="N", help="processes that share experts")
    command.add_argument("--expert-redundancy", type=_whole, default=None, metavar="N", help="extra replicas per layer")
    command.add_argument("--expert-window", type=_whole, default=256, metavar="STEPS", help="0 never moves experts")


def _add_place(commands: argparse._SubParsersAction[_Parser]) -> None:
    place = commands.add_parser("place", help="place experts on ranks from their loads, and compare before and after")
    place.add_argument("--loads", type=Path, required=True, metavar="FILE", help="tokens per layer and expert")
    place.add_argument("--ranks", type=_positive, required=True, metavar="N")
    slots = place.add_mutually_exclusive_group()
    slots.add_argument("--redundancy", type=_whole, default=None, metavar="N", help="extra replicas per layer")
    slots.add_argument("--slots", type=_positive, default=None, metavar="N", help="experts per rank and layer instead")
    place.add_argument("--nodes", type=_positive, default=1, metavar="N", help="keep expert groups on one node each")
    place.add_argument("--groups", type=_positive, default=1, metavar="N", help="expert groups of the router")
    place.add_argument("--layers", type=_positive, default=None, metavar="N", help="layers the loads must have")
    place.add_argument("--split", choices=("even", "proportional"), default="even", help="of tokens over replicas")
    place.add_argument("--memory", choices=("fixed", "pooled"), default="fixed", help="slots per layer, or in all")
    place.add_argument("--from", dest="start", type=Path, default=None, metavar="FILE", help="placement that runs now")
    place.add_argument("--max-moves", type=_whole, default=None, metavar="N", help="per layer, starting --from")
    place.add_argument("--expert-bytes", type=_positive, default=None, metavar="BYTES", help="weights of one expert")
    place.add_argument("--out", type=Path, default=None, metavar="FILE", help="write the placement as JSON")
    place.add_argument("--pattern", type=Path, default=None, metavar="FILE", help="write it as 0/1 array (.npy)")
    place.add_argument("--heatmap", type=Path, default=None, metavar="FILE", help="write heat maps (.html)")
    place.set_defaults(run=_place)


def _add_trace(commands: argparse._SubParsersAction[_Parser]) -> None:
    trace = commands.add_parser("trace", help="save requests' timelines for chrome://tracing or Perfetto")
    trace.add_argument("id", nargs="?", default=None, metavar="ID", help="an x-request-id (default: the last requests)")
    trace.add_argument("--url", default="http://127.0.0.1:8000", help="of the gateway (default: %(default)s)")
    trace.add_argument("--limit", type=_positive, default=200, metavar="N", help="ended requests (default 200)")
    trace.add_argument("--out", type=Path, default=None, metavar="FILE", help="default: standard output")
    trace.set_defaults(run=_trace)


def _add_devices(commands: argparse._SubParsersAction[_Parser]) -> None:
    devices = commands.add_parser("devices", help="show devices and the parallel layout for a model on them")
    model = "folder, config.json, or a known name such as deepseek-v3 (default: the demo model)"
    devices.add_argument("model", nargs="?", default=None, metavar="MODEL", help=model)
    devices.add_argument("--devices", default=None, metavar="CHIP:N", help="plan for these, not for what is found")
    devices.add_argument("--dtype", default=None, metavar="TYPE", help="of the weights (default: as the config says)")
    devices.add_argument("--prompt-tokens", type=_positive, default=4096, metavar="N")
    devices.add_argument("--output-tokens", type=_positive, default=1024, metavar="N")
    devices.add_argument(
        "--cached-share", type=float, default=0.0, metavar="SHARE", help="of prompt tokens (default 0)"
    )
    devices.add_argument("--tpot-ms", type=float, default=50.0, metavar="MS", help="limit (default 50)")
    devices.add_argument("--ttft-ms", type=float, default=2000.0, metavar="MS", help="limit of prefill (default 2000)")
    for role in ("prefill", "decode"):
        devices.add_argument(f"--{role}-ranks", type=_positive, default=None, metavar="N", help="ranks of an instance")
    devices.add_argument("--json", action="store_true", help="print JSON")
    devices.set_defaults(run=_devices)


def _add_completion(commands: argparse._SubParsersAction[_Parser]) -> None:
    completion = commands.add_parser("completion", help="print a completion script for a shell")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    completion.set_defaults(run=_completion)


def _add_deploy(commands: argparse._SubParsersAction[_Parser]) -> None:
    deploy = commands.add_parser("deploy", help="make what starts an xPyD deployment from a recipe")
    what = deploy.add_subparsers(dest="what", required=True, metavar="WHAT", parser_class=_Parser)
    render = what.add_parser("render", help="make units, manifests or scripts")
    render.add_argument("recipe", type=Path, metavar="RECIPE")
    render.add_argument("--to", choices=("systemd", "compose", "kubernetes", "shell"), required=True)
    render.add_argument("-o", "--output", type=Path, default=None, metavar="DIR", help="default: standard output")
    render.set_defaults(run=_deploy_render)


def _number(text: str, least: int, most: int | None, what: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least or (most is not None and value > most):
        raise argparse.ArgumentTypeError(f"{what}, got {text!r}")
    return value


def _count(text: str) -> int:
    return _number(text, 1, 64, "must be a whole number from 1 to 64")


def _whole(text: str) -> int:
    return _number(text, 0, None, "must be a whole number, 0 or more")


def _positive(text: str) -> int:
    return _number(text, 1, None, "must be a whole number above 0")


def _port(text: str) -> int:
    return _number(text, 0, 65535, "must be a port from 0 to 65535")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}")
    return value


def _interval(text: str) -> float:
    value = _seconds(text)
    if value < 0.1:
        raise argparse.ArgumentTypeError(f"must be at least 0.1 s, got {text!r}")
    return value


# -------------------------------------------------------------------------------------------- commands


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
        )
    )


def _up_on_ray(options: argparse.Namespace) -> int:
    from omni_proxy.ray.command import RayOptions, run_ray_up

    for name, default in (("quantization", None), ("expert_parallel", 1), ("expert_redundancy", None)):
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
    _log_to_stderr(options.log_level)
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

    _log_to_stderr(options.log_level)
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


def _top(options: argparse.Namespace) -> int:
    from omni_proxy.ui.top.command import run_top

    return run_top(options, print)


def _check(options: argparse.Namespace) -> int:
    from omni_proxy.parts import check_certificates
    from omni_proxy.reload import needs_restart

    config = load(options.config)
    check_certificates(config)
    print(effective(config), end="")
    print(f"# A change of these needs a restart: {', '.join(needs_restart())}. SIGHUP takes over all others.")
    return 0


def _schema(options: argparse.Namespace) -> int:
    from omni_proxy.schema import config_schema

    print(config_schema(), end="")
    return 0


def _key(options: argparse.Namespace) -> int:
    from omni_proxy.access.keys import hash_key, make_key

    if not options.stdin:
        key = make_key()
        print(f"key:  {key}\nhash: {hash_key(key)}")
        return 0
    key = sys.stdin.readline().strip()
    if len(key) < 16 or not key.isascii() or " " in key:
        raise ConfigError("a key must have 16 characters or more, ASCII and no spaces")
    print(hash_key(key))
    return 0


def _worker(options: argparse.Namespace) -> int:
    if options.simulate is not None and options.register:
        raise ConfigError("--register: a simulated worker does not register itself")
    if options.simulate is not None:
        from omni_proxy.sim.pretend.command import pretend

        return pretend(options)
    try:
        from omni_proxy.workers.engine.worker import run_worker
        from omni_proxy.workers.engine.worker_options import WorkerOptions
    except ImportError as exc:
        raise ConfigError(f"the worker needs the extra [worker]: pip install 'omni-proxy[worker]' ({exc})") from exc
    model = options.model or demo_model()
    names = tuple(options.served_model_name) or ((DEMO_NAME,) if options.model is None else ())
    return run_worker(
        WorkerOptions(
            model=str(model),
            role=options.role,
            host=options.host,
            port=options.port,
            served_model_name=names,
            block_size=options.block_size,
            kv_cache_bytes=options.kv_cache_mib << 20,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=options.max_model_len,
            kv_lease_s=options.kv_lease,
            kv_load_failure_policy=options.kv_load_failure_policy,
            dtype=options.dtype,
            quantization=options.quantization,
            threads=options.threads,
            speculation=options.speculation,
            speculative_tokens=options.speculative_tokens,
            expert_parallel=options.expert_parallel,
            expert_redundancy=options.expert_redundancy,
            expert_window_steps=options.expert_window,
            side_channel_port=options.side_channel_port,
            kv_events_port=options.kv_events_port,
            ready_fd=options.ready_fd,
            parent_fd=options.parent_fd,
            log_level=options.log_level,
            drain_s=options.drain,
            register=tuple(options.register),
            token_file=None if options.token_file is None else str(options.token_file),
            advertise=options.advertise,
            name=options.name,
        )
    )


def _import_nginx(options: argparse.Namespace) -> int:
    from omni_proxy.import_nginx.command import ImportOptions, run_import

    roles = tuple(options.prefill), tuple(options.decode)
    return run_import(ImportOptions(options.source, options.output, *roles, options.connector))


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


def _trace(options: argparse.Namespace) -> int:
    from omni_proxy.trace_command import run_trace

    return run_trace(options.url, options.id, options.limit, options.out, print)


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


def _completion(options: argparse.Namespace) -> int:
    from omni_proxy.completion import script

    print(script(_parser(), options.shell))
    return 0


def _deploy_render(options: argparse.Namespace) -> int:
    from omni_proxy.deploy.command import run_render

    return run_render(options.recipe, options.to, options.output, print)


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for talkative in ("httpx", "httpcore"):  # their debug lines hold heads, and those hold keys
        logging.getLogger(talkative).setLevel(logging.WARNING)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
