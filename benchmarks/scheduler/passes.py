"""What planning costs: one pass over many waiting requests, and a request that can start at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from statistics import median

from omni_proxy.core import Core, CoreSettings
from omni_proxy.messages import (
    Arrived,
    Effect,
    Event,
    Lease,
    Mode,
    PrefillDone,
    RequestSpec,
    Role,
    StartPrefill,
    Tick,
    Tokenized,
    Usage,
    WorkerSpec,
    WorkerUp,
)
from omni_proxy.scheduler.settings import SchedulingSettings

PREFIX_UNITS = 128
PROMPT_UNITS = 500


def full_core(prefill: int, decode: int, waiting: int, order: str, fair: bool = False) -> tuple[Core, list[Lease]]:
    """A core whose workers are all busy, with so many requests waiting; returns the P leases that are out."""
    settings = SchedulingSettings(order=order, fair_tenants=fair)
    core = Core(CoreSettings(prefix_aware=True, queue_timeout_s=1e6, scheduling=settings))
    for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        for number in range(count):
            core.handle(WorkerUp(WorkerSpec(f"{role.value}{number:02}", role, modes=tuple(Mode))), 0.0)
    rng, leases = Random(1), []
    for number in range(waiting + 3 * prefill):
        rid, now = f"r{number}", 0.001 * number
        group = rng.randrange(50)
        own = [rng.getrandbits(60) for _ in range(rng.randrange(1, PROMPT_UNITS))]
        keys = (*(group * 1000 + unit for unit in range(PREFIX_UNITS)), *own)
        tokens = 16 * len(keys) + 5
        spec = RequestSpec("m", "chat", tokens, tokenize=True, tenant=f"t{number % 7}")
        core.handle(Arrived(rid, spec), now)
        for effect in _step(core, Tokenized(rid, tokens, keys), now):
            if isinstance(effect, StartPrefill):
                leases.append(effect.lease)
    return core, leases


def _step(core: Core, event: Event, now: float) -> list[Effect]:
    """An event, and the walk for which the core asks at once where many wait."""
    effects = core.handle(event, now)
    at = core.next_wakeup()
    return effects if at is None or at > now else effects + core.handle(Tick(), now)


RUNS = 3


def pass_ms(prefill: int, decode: int, waiting: int, order: str, fair: bool = False) -> tuple[float, float]:
    """Median and worst time of the planning that an answer of P causes, in milliseconds of CPU.

    The same passes come several times, and of each the quickest counts: what else the machine does is left out.
    """
    runs = [_passes_ms(prefill, decode, waiting, order, fair) for _ in range(RUNS)]
    quickest = [min(same) for same in zip(*runs, strict=True)]
    return median(quickest), max(quickest)


def _passes_ms(prefill: int, decode: int, waiting: int, order: str, fair: bool) -> list[float]:
    core, leases = full_core(prefill, decode, waiting, order, fair)
    now, spent = 10.0, []
    for lease in leases[:40]:
        now += 0.05
        begun = time.process_time()
        _step(core, PrefillDone(lease, True, usage=Usage(None, 1, 0)), now)
        spent.append(1000 * (time.process_time() - begun))
    return spent


def at_once_us(prefill: int, decode: int, rounds: int = 300) -> float:
    """From a prompt's tokens to its grant where nobody waits: the median, in microseconds, matching included."""
    core, _ = full_core(prefill, decode, -3 * prefill, "weighted")
    spent = []
    for number in range(rounds):
        rid, now = f"q{number}", 100.0 + number
        keys = tuple(range(number * 1000, number * 1000 + 60))
        core.handle(Arrived(rid, RequestSpec("m", "chat", 965, tokenize=True)), now)
        begun = time.perf_counter()
        (effect,) = core.handle(Tokenized(rid, 965, keys), now)
        spent.append(1e6 * (time.perf_counter() - begun))
        assert isinstance(effect, StartPrefill)
        core.handle(PrefillDone(effect.lease, True, ended=True, usage=Usage(None, 1, 0)), now + 0.1)
    return median(spent)


def print_passes(say: Callable[[str], None]) -> None:
    """The table."""
    say("planning after an answer of P, 32P + 32D      median      worst   (ms of CPU)")
    for waiting in (10, 100, 1000):
        for order, fair in (("weighted", False), ("fcfs", False), ("weighted", True)):
            middle, worst = pass_ms(32, 32, waiting, order, fair)
            name = f"{waiting} waiting, {order}{', fair tenants' if fair else ''}"
            say(f"  {name:42} {middle:8.2f}   {worst:8.2f}")
    for workers in (4, 12, 32, 250):
        say(f"  to its grant at once, {workers}P + {workers}D: {at_once_us(workers, workers):.0f} us")
