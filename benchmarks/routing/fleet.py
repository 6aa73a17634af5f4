"""The pretending workers of a run: started once, idle and with cold caches before each measurement."""

import http.client
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.relay import procs
from benchmarks.relay.bench import Failed, free_ports, wait_for_port
from benchmarks.routing.gateways import WorkerAddress
from omni_proxy.sim.engine_model import EngineModel
from omni_proxy.sim.pretend.routes import SCALE_OUT_PATH

BLOCK_TOKENS: Final = 16
"""vLLM's default on GPUs, and what vllm-router's kv_aware expects."""
_IDLE_TIMEOUT_S: Final = 120.0
_VALUE: Final = re.compile(r"^vllm:(\w+)_total\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Counts:
    """Totals over all workers that computed prompts."""

    queries: float
    hits: float
    preemptions: float


class Fleet:
    """All workers."""

    def __init__(self, workers: Sequence[WorkerAddress], processes: Sequence[procs.Proc]) -> None:
        self.workers = tuple(workers)
        self._processes = tuple(processes)

    def cpu_ns(self) -> int:
        """CPU time of all workers so far."""
        return procs.cpu_ns([pid for process in self._processes for pid in process.pids()])

    def let_render(self, enabled: bool) -> None:
        """Do workers tell the token ids of prompts? Off where no gateway needs it, as vLLM has it."""
        for worker in self.workers:
            ask(worker.port, "POST", SCALE_OUT_PATH, json.dumps({"enabled": enabled}))

    def make_cold(self) -> None:
        """Wait until all are idle and nothing is held for a pull, then empty their caches. Raises Failed."""
        deadline = time.monotonic() + _IDLE_TIMEOUT_S
        for worker in self.workers:
            while not _is_idle(worker.port):
                if time.monotonic() > deadline:
                    raise Failed(f"the worker on port {worker.port} does not become idle")
                time.sleep(0.1)
            ask(worker.port, "POST", "/reset_prefix_cache")

    def counts(self, pd: bool) -> Counts:
        """Looked up and found prompt tokens: of P where there is PD, of all workers where each does both."""
        queries = hits = preemptions = 0.0
        for worker in self.workers:
            values = dict(_VALUE.findall(ask(worker.port, "GET", "/metrics")))
            preemptions += float(values["num_preemptions"])
            if worker.role == "prefill" or not pd:
                queries += float(values["prefix_cache_queries"])
                hits += float(values["prefix_cache_hits"])
        return Counts(queries, hits, preemptions)


def _is_idle(port: int) -> bool:
    load = json.loads(ask(port, "GET", "/load"))["server_load"]
    leased = re.search(r"^omni_kv_blocks_leased\{[^}]*\} ([0-9.]+)$", ask(port, "GET", "/metrics"), re.MULTILINE)
    return load == 0 and leased is not None and float(leased[1]) == 0


def ask(port: int, method: str, path: str, body: str | None = None) -> str:
    """The body of a worker's answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, body)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


@contextmanager
def fleet(
    prefill: int, decode: int, preset: str, model: EngineModel, speed: float, cpus: Sequence[int], folder: Path
) -> Iterator[Fleet]:
    """Start the workers, each a process of its own on `cpus`."""
    roles = ["prefill"] * prefill + ["decode"] * decode
    ports = iter(free_ports(3 * len(roles)))
    with ExitStack() as stack:
        addresses, processes = [], []
        for role in roles:
            address = _address(next(ports), role, next(ports), next(ports), model)
            addresses.append(address)
            log = folder / f"worker-{address.port}.log"
            processes.append(stack.enter_context(procs.Proc(_command(address, preset, speed), cpus, log)))
        for address, process in zip(addresses, processes, strict=True):
            wait_for_port(address.port, process)
        yield Fleet(addresses, processes)


def _address(port: int, role: str, events: int, bootstrap: int, model: EngineModel) -> WorkerAddress:
    prefill = role == "prefill"
    seqs = model.max_prefill_seqs if prefill else model.max_decode_seqs
    batch = max(32_000, model.max_batch_tokens)
    return WorkerAddress(port, role, bootstrap if prefill else None, events, seqs, batch)


def _command(address: WorkerAddress, preset: str, speed: float) -> list[str]:
    command = [sys.executable, "-m", "omni_proxy", "worker", "--simulate", preset, "--role", address.role]
    command += ["--port", str(address.port), "--kv-events-port", str(address.events_port)]
    command += ["--speed", str(speed), "--block-size", str(BLOCK_TOKENS)]
    # A handoff that a gateway has given up blocks nobody for longer than a run.
    command += ["--kv-lease", "120"]
    return command if address.bootstrap_port is None else [*command, "--bootstrap-port", str(address.bootstrap_port)]
