"""What goes into a simulated world and what comes out of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from omni_proxy.messages import Effect, Event, RequestRecord
from omni_proxy.sim.cluster import SimWorker
from omni_proxy.sim.engine import Engine
from omni_proxy.sim.outages import Outage
from omni_proxy.sim.workload import Workload


class CoreLike(Protocol):
    """What the world asks of a core: the live one, or a router to compare it with."""

    def handle(self, event: Event, now: float) -> list[Effect]: ...

    def next_wakeup(self) -> float | None: ...

    def waiting(self) -> tuple[int, int]: ...


@dataclass(frozen=True, slots=True)
class Delays:
    """Time that passes outside of engines, in seconds."""

    network_s: float = 0.0003
    """One way between gateway and worker."""
    tokenize_s: float = 0.001
    """Of any prompt."""
    tokenize_token_s: float = 3e-6
    """Of each token of a prompt."""
    kv_event_s: float = 0.005
    """From a change of a worker's cache until the gateway hears of it."""


@dataclass(slots=True)
class Sample:
    """The world at one instant."""

    at: float
    waiting: int
    """Requests that wait in the gateway."""
    waiting_tokens: int
    engine_waiting: int
    """Legs that wait inside workers."""
    running: tuple[int, ...]
    """Legs in work, by worker."""
    kv_tokens: tuple[int, ...]


@dataclass(slots=True)
class Run:
    """What a simulation leaves behind."""

    workload: Workload
    workers: tuple[SimWorker, ...]
    engines: tuple[Engine, ...]
    records: list[RequestRecord] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    ended_at: float = 0.0
    events: int = 0
    outages: tuple[Outage, ...] = ()

    def sample(self, now: float, waiting: int, tokens: int) -> None:
        """Note how things stand; so many requests with so many prompt tokens wait in the gateway."""
        engines = self.engines
        running = tuple(e.running for e in engines)
        kv_tokens = tuple(e.cache.used_tokens for e in engines)
        self.samples.append(Sample(now, waiting, tokens, sum(e.waiting for e in engines), running, kv_tokens))
