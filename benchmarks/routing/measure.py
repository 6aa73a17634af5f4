"""One gateway, one slice of a trace, one load: what its clients saw."""

import asyncio
import http.client
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvloop

from benchmarks.relay import procs
from benchmarks.relay.bench import Failed, free_ports
from benchmarks.relay.build import Missing
from benchmarks.routing.fleet import Fleet
from benchmarks.routing.gateways import Gateway, Place
from benchmarks.routing.machine import Instant, Shares, shares
from omni_proxy.sim.bench.client import BenchPlan, send_all
from omni_proxy.sim.bench.measure import Seen, bench_figures, faults, lag, uncompressed
from omni_proxy.sim.bench.prompts import PromptForm, Prompts
from omni_proxy.sim.figures import Figures, Slo
from omni_proxy.sim.workload import Workload

_START_TIMEOUT_S: Final = 60.0
MODEL: Final = "simulated"
_IDLE: Final = Shares()


@dataclass(frozen=True, slots=True)
class Result:
    """One cell of the table: figures of a run, or the reason why there are none."""

    gateway: str
    load: float
    seed: int
    figures: Figures | None
    pd: bool = True
    cached_share: float = 0.0
    asked_again: float = 0.0
    """Prompt tokens that prefill workers saw, over those of answered prompts, less 1: legs that were sent again."""
    gateway_cpu_s: float = 0.0
    worker_cpu_s: float = 0.0
    lag_p99_s: float = 0.0
    """How late the client was, in the run's seconds."""
    preemptions: float = 0.0
    faults: tuple[str, ...] = ()
    reason: str = ""
    shares: Shares = _IDLE
    wall_s: float = 0.0
    """How long it took on the clock, start of the gateway included."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What is the same for every gateway of a run."""

    workload: Workload
    load: float
    seed: int
    speed: float
    slo: Slo
    cpus: Sequence[int]
    """Of the gateway."""
    other_cpus: Sequence[int]
    """Of workers and client."""
    folder: Path
    model: Path
    prompts: Prompts


def measure(gateway: Gateway, fleet: Fleet, conditions: Conditions) -> Result:
    """Start the gateway afresh over idle workers with cold caches, send the slice, end it."""
    try:
        return _measure(gateway, fleet, conditions)
    except (Failed, Missing) as exc:
        return Result(gateway.row, conditions.load, conditions.seed, None, reason=str(exc))


def _measure(gateway: Gateway, fleet: Fleet, conditions: Conditions) -> Result:
    began = time.monotonic()
    port, metrics_port = free_ports(2)
    folder = Path(tempfile.mkdtemp(dir=conditions.folder))
    folder.chmod(0o711)  # nginx's workers are another user
    place = Place(port, metrics_port, fleet.workers, folder, conditions.model, conditions.slo.tpot / conditions.speed)
    cpus = [*conditions.cpus, *(cpu for cpu in conditions.other_cpus if cpu not in conditions.cpus)]
    fleet.let_render(gateway.renders)
    with procs.Proc(gateway.command(place), conditions.cpus, folder / "log") as process:
        _wait_until_ready(port, process)
        fleet.make_cold()
        counts, begin = fleet.counts(gateway.pd), Instant.now(procs.cpu_ns(process.pids()), fleet.cpu_ns(), cpus)
        seen = _send(port, conditions)
        end = Instant.now(procs.cpu_ns(process.pids()), fleet.cpu_ns(), cpus)
        after = fleet.counts(gateway.pd)
    late = lag(seen)
    queries = after.queries - counts.queries
    asked = 0 if gateway.whole else _check_legs(seen, queries)
    return Result(
        gateway.row,
        conditions.load,
        conditions.seed,
        bench_figures(seen, conditions.slo),
        gateway.pd,
        cached_share=(after.hits - counts.hits) / queries if queries else 0.0,
        asked_again=queries / asked - 1 if asked else 0.0,
        gateway_cpu_s=end.gateway - begin.gateway,
        worker_cpu_s=end.workers - begin.workers,
        lag_p99_s=late.p99 if late is not None else 0.0,
        preemptions=after.preemptions - counts.preemptions,
        faults=tuple(faults(seen)),
        shares=shares(begin, end, conditions.cpus, conditions.other_cpus),
        wall_s=time.monotonic() - began,
    )


def _check_legs(seen: Sequence[Seen], queries: float) -> int:
    """Prompt tokens of answers, every one of which must have been computed where the table says. Raises Failed."""
    asked = sum(one.prompt_tokens for one in seen if one.outcome == "completed")
    if queries < asked:
        raise Failed(
            f"its prefill workers saw {queries:.0f} of {asked} prompt tokens: not every request took both legs"
        )
    return asked


def _send(port: int, conditions: Conditions) -> list[Seen]:
    plan = BenchPlan(
        MODEL, chat=False, stream=True, concurrency=None, timeout_s=600.0 / conditions.speed, speed=conditions.speed
    )
    url = f"http://127.0.0.1:{port}"
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seen = runner.run(send_all(url, conditions.workload, conditions.prompts, plan))
    return [uncompressed(one, conditions.speed) for one in seen]


def _wait_until_ready(port: int, process: procs.Proc) -> None:
    """Returns when answers come, several times in a row. Raises Failed."""
    deadline, good, said = time.monotonic() + _START_TIMEOUT_S, 0, ""
    while good < 3:
        if not process.alive():
            raise Failed(f"ended while starting: {_last_line(process.log)}")
        if time.monotonic() > deadline:
            raise Failed(f"not ready after {_START_TIMEOUT_S:.0f} s: {said}")
        said = _probe(port)
        good = good + 1 if said == "" else 0
        if said:
            time.sleep(0.2)


def _probe(port: int) -> str:
    """What is wrong with an answer; empty if nothing."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    body = {"model": MODEL, "prompt": "w1 w2 w3", "max_tokens": 2, "stream": True}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
    except (OSError, http.client.HTTPException) as exc:
        return repr(exc)
    finally:
        connection.close()
    if response.status != 200 or b"[DONE]" not in answer:
        return f"status {response.status}: {answer[:200].decode(errors='replace')}"
    return ""


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it printed nothing"


def make_prompts(workload: Workload) -> Prompts:
    """Prompts in words, which workers and gateways count alike."""
    return Prompts(PromptForm.WORDS, workload.block_tokens)
