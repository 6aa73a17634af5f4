"""A small engine model, and a loop that drives one engine alone."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import msgspec

from omni_proxy.core import Core, CoreSettings
from omni_proxy.messages import Effect, Event
from omni_proxy.sim.cluster import make_cluster
from omni_proxy.sim.engine import Engine
from omni_proxy.sim.engine_model import EngineModel
from omni_proxy.sim.exact_index import ExactIndex
from omni_proxy.sim.job import Job
from omni_proxy.sim.notices import Notice
from omni_proxy.sim.run import Run
from omni_proxy.sim.workload import SimRequest, Workload
from omni_proxy.sim.world import World

BLOCK = 16

SMALL = EngineModel(
    step_s=0.01,
    token_s=0.001,
    pair_s=0.0,
    decode_s=0.01,
    seq_s=0.001,
    kv_s=1e-6,
    max_batch_tokens=64,
    max_prefill_seqs=4,
    max_decode_seqs=4,
    kv_capacity_tokens=1024,
    max_model_len=1024,
    kv_bytes_per_token=1000,
    link_bytes_per_s=1e6,
    link_s=0.001,
)
"""Two costs are easy to add up in one's head: 10 ms a pass and 1 ms a prompt token."""


def small(**changes: object) -> EngineModel:
    return msgspec.structs.replace(SMALL, **changes)


def engine(model: EngineModel = SMALL, max_seqs: int = 4, every_token: bool = False) -> Engine:
    return Engine(model, max_seqs, BLOCK, lambda job, keys: None, lambda keys: None, every_token)


def job(serial: int, prompt: int, output: int, first_key: int = 0, **more: bool) -> Job:
    """A job whose block keys count up from `first_key`."""
    keys = tuple(range(first_key, first_key + prompt // BLOCK))
    return Job(f"j{serial}", serial, prompt, output, keys, **more)


Told = tuple[float, Notice, str]


def drive(
    engine: Engine,
    arrivals: Iterable[tuple[float, Job]],
    aborts: Iterable[tuple[float, Job]] = (),
    pull_s: float = 0.05,
) -> list[Told]:
    """Run one engine until it is idle; pulls take `pull_s`, P legs are released when they are done."""
    told: list[Told] = []
    heap: list[tuple[float, int, str, Job]] = []
    for number, (at, one) in enumerate(arrivals):
        heapq.heappush(heap, (at, number, "submit", one))
    for number, (at, one) in enumerate(aborts, 10_000):
        heapq.heappush(heap, (at, number, "abort", one))
    order = 20_000
    while heap or engine.wake_at is not None:
        wake = engine.wake_at
        if wake is not None and (not heap or wake <= heap[0][0]):
            now, notices = wake, engine.advance(wake)
        else:
            now, _, what, one = heapq.heappop(heap)
            notices = getattr(engine, what)(one, now)
        for notice, one in notices:
            told.append((now, notice, one.rid))
            order += 1
            if notice is Notice.PULL:
                heapq.heappush(heap, (now + pull_s, order, "pulled", one))
            elif notice is Notice.PREFILLED:
                heapq.heappush(heap, (now, order, "release", one))
    return told


def requests(*rows: tuple[float, int, int]) -> Workload:
    """(arrival, prompt, output) with blocks that nobody shares."""
    made = [
        SimRequest(at, prompt, output, tuple(range(1000 * n, 1000 * n + -(-prompt // BLOCK))))
        for n, (at, prompt, output) in enumerate(rows)
    ]
    return Workload("rows", BLOCK, tuple(made))


def simulate(workload: Workload, prefill: int = 1, decode: int = 1, mixed: int = 0, **settings: object) -> Run:
    """The live core over small workers."""
    chosen = CoreSettings(**{"prefix_aware": True, **settings})  # type: ignore[arg-type]

    def make_core(index: ExactIndex) -> Core:
        return Core(chosen)

    return World(workload, make_cluster(prefill, decode, mixed, SMALL), make_core).run()


class Checked:
    """The live core, asked after each event whether its books are right."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects = self._core.handle(event, now)
        self._core.check()
        return effects

    def next_wakeup(self) -> float | None:
        return self._core.next_wakeup()

    def waiting(self) -> tuple[int, int]:
        return self._core.waiting()
