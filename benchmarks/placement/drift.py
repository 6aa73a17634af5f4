"""Under drift, scored on the next window: placing anew by the published algorithm, seldom or often, or small moves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from benchmarks.placement.loads import FAST, SLOW, Drift, windows
from omni_proxy.workers.engine.placement.controller import Controller, ControllerOptions
from omni_proxy.workers.engine.placement.match import copied_experts, renamed_alike
from omni_proxy.workers.engine.placement.moves import MoveOptions
from omni_proxy.workers.engine.placement.place import Options, place
from omni_proxy.workers.engine.placement.plan import Placement
from omni_proxy.workers.engine.placement.public import public_placement
from omni_proxy.workers.engine.placement.score import bound_of, imbalance
from omni_proxy.workers.engine.placement.shares import Split
from omni_proxy.workers.engine.placement.topology import Topology

RANKS, REDUNDANCY = 64, 64
MOST_MOVES, INTERVAL = 4, 2
NEVER = 10**9

Loads = NDArray[np.float64]
Policy = Callable[[int, Placement, Loads], Placement]


@dataclass(frozen=True, slots=True)
class Result:
    """Means over windows and layers; `copied` is experts copied per layer and window."""

    drift: str
    exponent: float
    policy: str
    next_window: float
    bound: float
    copied: float
    cpu_ms: float


def results(layers: int, count: int, exponents: tuple[float, ...] = (0.5, 0.8)) -> Iterator[Result]:
    """Every policy on the same windows."""
    for drift in (SLOW, FAST):
        for exponent in exponents:
            stream = list(windows(drift, exponent, count, layers))
            for name, (start, policy) in _policies(stream[0]).items():
                yield run(drift, exponent, name, stream, start, policy)


def run(drift: Drift, exponent: float, name: str, stream: list[Loads], placement: Placement, policy: Policy) -> Result:
    """Serve window after window, each by what was decided after the one before."""
    quality, copied, bounds, began = [], [], [], time.process_time()
    for at, (seen, coming) in enumerate(pairwise(stream)):
        after = policy(at, placement, seen) if at else placement
        copied.append(copied_experts(placement, after).mean())
        placement = after
        quality.append(imbalance(placement, coming).mean())
        bounds.append(bound_of(placement, coming).mean() if at % 20 == 0 else np.nan)
    spent = (time.process_time() - began) / len(quality)
    return Result(
        drift.name,
        exponent,
        name,
        float(np.mean(quality)),
        float(np.nanmean(bounds)),
        float(np.mean(copied[1:])),
        spent * 1e3,
    )


def _policies(first: Loads) -> dict[str, tuple[Placement, Policy]]:
    topology = Topology(RANKS)
    public = public_placement(first, topology, REDUNDANCY)
    policies: dict[str, tuple[Placement, Policy]] = {
        "published, never again": (public, _anew(NEVER)),
        "published, every 20 windows": (public, _anew(20)),
        "published, every window": (public, _anew(1)),
    }
    for split in Split:
        start = place(first, topology, Options(REDUNDANCY, split))
        policies[f"small moves, {split.value}"] = start, _small_moves(start, split)
    return policies


def _anew(every: int) -> Policy:
    def policy(at: int, placement: Placement, seen: Loads) -> Placement:
        if at % every:
            return placement
        return renamed_alike(placement, public_placement(seen, Topology(RANKS), REDUNDANCY))

    return policy


def _small_moves(start: Placement, split: Split) -> Policy:
    controller = Controller(start, ControllerOptions(MoveOptions(MOST_MOVES, split), INTERVAL))
    return lambda _at, _placement, seen: controller.observe(seen).placement
