"""`omni-proxy up --ray ADDRESS`: a gateway here, its workers on a Ray cluster."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvloop

from omni_proxy.api.serving import calm_collector, listening_socket, stop_signals
from omni_proxy.build import Gateway
from omni_proxy.config import (
    AccessLog,
    Config,
    ConfigError,
    KvCachePolicy,
    Limits,
    Listen,
    Model,
    ScheduleMode,
    Timeouts,
    Worker,
    read_yaml,
    validated,
)
from omni_proxy.deploy.engines import Engine
from omni_proxy.ray.client import PlacementFailed, PlacerClient
from omni_proxy.ray.pools import Plan, RayPools, check_address, planned
from omni_proxy.ray.wire import Fault, Lost, Message, Serving, Starting, Waiting
from omni_proxy.up import say, serve_beside

SOURCE: Final = "ray"
LEASE_S: Final = 60.0
"""Workers of which nobody has asked for so long end themselves."""


@dataclass(frozen=True, slots=True)
class RayOptions:
    """What the command line said. `model`: over that of the pools file; None with the demo model."""

    address: str
    pools: Path | None
    model: str | None
    served_name: str
    demo: Path
    prefill: int | None
    decode: int | None
    host: str
    port: int
    access_log: str | None
    schedule_mode: ScheduleMode
    resume: bool


def run_ray_up(options: RayOptions) -> int:
    """Serve until told to stop; returns the exit code. Raises ConfigError for what the user can mend."""
    pools = _pools(options)
    plan = Plan(
        check_address(options.address),
        f"omni-proxy-{secrets.token_hex(4)}",
        pools.strategy.value,
        pools.wait_s,
        LEASE_S,
        planned(pools),
    )
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("--ray: needs the extra [ray]: pip install 'omni-proxy[ray]'")
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_RayUp(options, pools, plan).run())
    return 0


def _pools(options: RayOptions) -> RayPools:
    data = (None if options.pools is None else read_yaml(options.pools)) or {}
    pools = validated(RayPools, data, str(options.pools or "--ray"))
    if options.model is not None:
        pools = pools.model_copy(update={"model": options.model})
    if pools.served_model_name is None and pools.model is None:
        pools = pools.model_copy(update={"served_model_name": options.served_name})
    return pools.with_counts(options.prefill, options.decode)


def _config(options: RayOptions, pools: RayPools) -> Config:
    folder = options.demo if pools.model is None else Path(pools.model)
    here = folder.is_dir()  # else its tokenizer is not known
    return Config(
        listen=Listen(host=options.host, port=options.port),
        model=Model(path=folder if here else None, send_token_ids=here and pools.engine is Engine.EMBEDDED),
        kv_cache_policy=KvCachePolicy.APC if here else KvCachePolicy.INDEPENDENT,
        schedule_mode=options.schedule_mode,
        access_log=AccessLog(path=options.access_log),
        # A node that dies takes its workers along for longer than a process does.
        limits=Limits(no_worker_timeout_s=60.0),
        timeouts=Timeouts(drain_s=10.0),
        resume=options.resume,
    )


class _RayUp:
    """One run: what is told to the user, and what the gateway knows of its workers."""

    def __init__(self, options: RayOptions, pools: RayPools, plan: Plan) -> None:
        self._options = options
        self._pools = pools
        self._plan = plan
        self._gateway: Gateway | None = None
        self._workers: dict[str, Worker] = {}
        self._missing = {worker.launch.name for worker in plan.workers}
        self._port = 0

    async def run(self) -> None:
        options = self._options
        config = _config(options, self._pools)
        with listening_socket(options.host, options.port, config.listen.backlog) as sock:
            self._port = sock.getsockname()[1]
            with stop_signals() as (stop, force):
                self._gateway = Gateway(config)
                calm_collector()
                placing = PlacerClient(self._plan, self._hear, say).run()
                try:
                    await serve_beside(placing, self._gateway, sock, stop, force)
                except PlacementFailed as exc:
                    raise ConfigError(f"--ray: {exc}") from exc
        say("Stopped.")

    def _hear(self, message: Message) -> None:
        match message:
            case Starting(name):
                say(f"{name}: starting ...")
            case Serving():
                self._serving(message)
            case Lost(name, reason):
                self._lost(name, reason)
            case Waiting(reason):
                say(f"Waiting for room: {reason}")
            case Fault(reason):
                say(reason)

    def _serving(self, told: Serving) -> None:
        worker = Worker.model_validate(told.entry)
        address = worker.url.removeprefix("http://")
        say(f"{told.name}: ready on {address} after {told.seconds:.1f} s (node {told.node[:8]}, pid {told.pid})")
        self._workers[told.name] = worker
        assert self._gateway is not None
        self._gateway.scheduling.roster.set(SOURCE, list(self._workers.values()))
        if told.name in self._missing:
            self._missing.discard(told.name)
            if not self._missing:
                self._greet()

    def _lost(self, name: str, reason: str) -> None:
        say(f"{name}: {reason}; starting it again")
        assert self._gateway is not None
        self._gateway.scheduling.membership.lost(name, reason)

    def _greet(self) -> None:
        prefill = sum(worker.launch.role.value == "prefill" for worker in self._plan.workers)
        shape = f"{prefill}P + {len(self._plan.workers) - prefill}D"
        model = self._pools.served_model_name or self._pools.model
        host = f"[{self._options.host}]" if ":" in self._options.host else self._options.host
        say(f"\nOmni Proxy is ready: http://{host}:{self._port}  ({shape} on Ray, model {model})\n")
