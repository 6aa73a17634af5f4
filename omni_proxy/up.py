"""`omni-proxy up`: workers and gateway on this machine, started together and ended together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import sys
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

from omni_proxy.api.serving import calm_collector, listening_socket, stop_signals
from omni_proxy.build import Gateway
from omni_proxy.config import (
    AccessLog,
    Config,
    ConfigError,
    ConnectorName,
    Limits,
    Listen,
    Model,
    ScheduleMode,
    Timeouts,
    Worker,
)
from omni_proxy.gguf.file import GgufError
from omni_proxy.gguf.folder import model_folder
from omni_proxy.launcher import Launcher, ProcessPlan, Ready, Report, StartFailed
from omni_proxy.messages import Role

CONNECTOR = ConnectorName.OMNI


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What the command line said."""

    model: Path
    model_name: str
    prefill: int
    decode: int
    host: str
    port: int
    access_log: str | None
    expert_parallel: int = 1
    expert_redundancy: int | None = None
    expert_window: int = 256
    schedule_mode: ScheduleMode = ScheduleMode.AUTO
    quantization: str | None = None
    resume: bool = False
    speculation: str = "ngram"
    draft_model: str | None = None
    dtype: str = "float32"


def run_up(options: UpOptions) -> int:
    """Serve until told to stop; returns the exit code. Raises ConfigError for what the user can mend."""
    try:
        options = replace(options, model=model_folder(options.model))
    except GgufError as exc:
        raise ConfigError(f"--model: {exc}") from exc
    if not options.model.is_dir():
        raise ConfigError(f"--model: there is no folder {options.model}")
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_Up(options).run())
    return 0


class _Up:
    """One run: what is told to the user, and when."""

    def __init__(self, options: UpOptions) -> None:
        self._options = options
        self._gateway: Gateway | None = None
        self._missing = {plan.name for plan in self._plans()}
        self._greeted = False

    async def run(self) -> None:
        options = self._options
        config = Config(
            listen=Listen(host=options.host, port=options.port),
            model=Model(path=options.model, send_token_ids=True),
            schedule_mode=options.schedule_mode,
            access_log=AccessLog(path=options.access_log),
            # Workers that die come back within seconds: a request may wait for them.
            limits=Limits(no_worker_timeout_s=30.0),
            timeouts=Timeouts(drain_s=10.0),
            resume=options.resume,
        )
        with listening_socket(options.host, options.port, config.listen.backlog) as sock:
            self._port = sock.getsockname()[1]
            with stop_signals() as (stop, force):
                self._gateway = Gateway(config)
                calm_collector()
                launcher = Launcher(self._plans(), Report(self._starting, self._serving, self._lost))
                try:
                    await serve_beside(launcher.run(), self._gateway, sock, stop, force)
                except StartFailed as exc:
                    raise ConfigError(str(exc)) from exc
        say("Stopped.")

    def _plans(self) -> list[ProcessPlan]:
        names = [(f"prefill-{i}", Role.PREFILL) for i in range(self._options.prefill)]
        names += [(f"decode-{i}", Role.DECODE) for i in range(self._options.decode)]
        return [ProcessPlan(name, role.value, self._arguments(role)) for name, role in names]

    def _arguments(self, role: Role) -> tuple[str, ...]:
        options = self._options
        return (
            "worker",
            f"--role={role.value}",
            f"--model={options.model}",
            f"--served-model-name={options.model_name}",
            "--kv-events-port=0",
            f"--dtype={options.dtype}",
            f"--speculation={options.speculation}",
            *(() if options.draft_model is None else (f"--draft-model={options.draft_model}",)),
            *(() if options.quantization is None else (f"--quantization={options.quantization}",)),
            *self._expert_arguments(),
        )

    def _expert_arguments(self) -> tuple[str, ...]:
        options = self._options
        if options.expert_parallel == 1:
            return ()
        redundancy = options.expert_redundancy
        extra = () if redundancy is None else (f"--expert-redundancy={redundancy}",)
        return (f"--expert-parallel={options.expert_parallel}", f"--expert-window={options.expert_window}", *extra)

    # ------------------------------------------------------------------- what happens

    def _starting(self, plan: ProcessPlan) -> None:
        say(f"{plan.name}: loading {self._options.model_name} ...")

    def _serving(self, plan: ProcessPlan, ready: Ready, seconds: float) -> None:
        say(f"{plan.name}: ready on {ready.host}:{ready.port} after {seconds:.1f} s (pid {ready.pid})")
        assert self._gateway is not None
        host = f"[{ready.host}]" if ":" in ready.host else ready.host
        worker = Worker(
            name=plan.name,
            url=f"http://{host}:{ready.port}",
            role=Role(plan.role),
            connector=CONNECTOR,
            bootstrap_port=ready.side_channel_port if plan.role == Role.PREFILL.value else None,
        )
        self._gateway.scheduling.membership.add(worker)
        self._missing.discard(plan.name)
        if not self._missing and not self._greeted:
            self._greeted = True
            self._greet()

    def _lost(self, plan: ProcessPlan, reason: str) -> None:
        say(f"{plan.name}: {reason}; starting it again")
        assert self._gateway is not None
        self._gateway.scheduling.membership.lost(plan.name, reason)

    def _greet(self) -> None:
        options = self._options
        url = f"http://{options.host}:{self._port}"
        question = {
            "model": options.model_name,
            "stream": True,
            "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
        }
        say(f"\nOmni Proxy is ready: {url}  ({options.prefill}P + {options.decode}D, model {options.model_name})\n")
        say("Try it:\n")
        say(
            f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
            f"    -d '{json.dumps(question)}'\n"
        )
        say(f"Watch it: {url}/omni/ui, or omni-proxy top {url}\n")


async def serve_beside(
    keeping: Coroutine[object, object, None],
    gateway: Gateway,
    sock: socket.socket,
    stop: asyncio.Event,
    force: asyncio.Event,
) -> None:
    """Serve until `stop`, while `keeping` keeps workers running; what it raises ends both."""
    launching = asyncio.create_task(keeping, name="launcher")
    serving = asyncio.create_task(gateway.serve(sock, stop, force), name="gateway")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait((launching, serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            say("Stopping: finishing what runs (once more to stop at once) ...")
        stop.set()
        await serving
    finally:
        stopping.cancel()
        launching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await launching


def say(text: str) -> None:
    """Tell the user something, now."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
