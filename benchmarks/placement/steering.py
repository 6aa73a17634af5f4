"""Would it pay to choose decode workers by the experts that a request wants? Simulated, with profiles known exactly.

Some workers, each with ranks of its own, decode sequences of several classes; a class has its own favourite experts. A
step of a worker takes a fixed part, and for each layer the rows of its fullest rank; the fixed part is what all layers
would take were they balanced. Every sequence that ends is followed by another one of a class drawn by popularity, which
changes, and a policy names its worker. All policies see the same classes and lengths.

Real profiles are learned and blurred: what a policy gains here is the most that it can gain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_proxy.workers.engine.placement.controller import Controller, ControllerOptions
from omni_proxy.workers.engine.placement.place import Options, place
from omni_proxy.workers.engine.placement.plan import Placement
from omni_proxy.workers.engine.placement.shares import Split
from omni_proxy.workers.engine.placement.topology import Topology

WORKERS, RANKS, REDUNDANCY = 4, 8, 8
LAYERS, EXPERTS, CHOSEN = 8, 64, 4
CLASSES, SEQUENCES = 4, 48
"""Classes of requests, and sequences for each worker."""
MEAN_TOKENS: Final = 120
EXPONENT: Final = 0.8
WINDOW_STEPS: Final = 128
POPULAR: Final = 0.6
"""Part of the requests that are of the class in favour; every so many requests it is another one."""
FAVOUR_REQUESTS: Final = 300
SLACK: Final = 2
"""Workers with at most so many sequences more than the emptiest are as good as that one."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Result:
    """Means over the second half of the steps of all seeds; `rates`: tokens by time over plain's, for each seed."""

    own: float
    live: bool
    policy: str
    imbalance: float
    step: float
    rates: tuple[float, ...]


class _Worker:
    def __init__(self, live: bool) -> None:
        self.counts = np.zeros(CLASSES, np.int64)
        self.left: list[tuple[int, int]] = []
        """Tokens to come and class of each sequence."""
        placement = place(np.ones((LAYERS, EXPERTS)), Topology(RANKS), Options(REDUNDANCY, Split.PROPORTIONAL))
        self._controller = Controller(placement, ControllerOptions()) if live else None
        self._window = np.zeros((LAYERS, EXPERTS))
        self._steps = 0
        self.matrix = _matrix(placement)

    def take(self, kind: int, tokens: int) -> None:
        self.counts[kind] += 1
        self.left.append((tokens, kind))

    def step(self, profiles: Floats, chance: np.random.Generator) -> tuple[float, float, int]:
        """Seconds, max/mean, and how many sequences have ended."""
        mix = np.einsum("k,kle->le", self.counts / self.counts.sum(), profiles)
        rows = chance.multinomial(CHOSEN * len(self.left), mix).astype(np.float64)
        peaks = np.einsum("le,ler->lr", rows, self.matrix).max(axis=1)
        mean = CHOSEN * len(self.left) / RANKS
        self._observe(rows)
        staying = [(tokens - 1, kind) for tokens, kind in self.left if tokens > 1]
        ended = len(self.left) - len(staying)
        self.left = staying
        self.counts = np.bincount([kind for _, kind in staying], minlength=CLASSES)
        return float(LAYERS * SEQUENCES * CHOSEN / RANKS + peaks.sum()), float(peaks.mean() / mean), ended

    def _observe(self, rows: Floats) -> None:
        self._window += rows
        self._steps += 1
        if self._controller is not None and self._steps % WINDOW_STEPS == 0:
            self.matrix = _matrix(self._controller.observe(self._window).placement)
            self._window = np.zeros_like(self._window)


Policy = Callable[[list[_Worker], int, Floats], int]


def results(steps: int, seeds: int = 3) -> Iterator[Result]:
    """Every policy, for classes that share half of their experts or none, without and with live re-placement."""
    for own in (0.5, 1.0):
        for live in (False, True):
            plain: list[float] = []
            for name, policy in POLICIES.items():
                runs = [run(policy, own, live, steps, 10 * seed) for seed in range(seeds)]
                imbalance, step = (float(np.mean([one[column] for one in runs])) for column in (0, 1))
                plain = plain or [rate for *_, rate in runs]
                rates = tuple(rate / base for (*_, rate), base in zip(runs, plain, strict=True))
                yield Result(own, live, name, imbalance, step, rates)


def run(policy: Policy, own: float, live: bool, steps: int, seed: int) -> tuple[float, float, float]:
    """Max/mean, time of a step, tokens per time; over all workers."""
    profiles = _profiles(own, seed)
    requests, chance = _requests(seed + 1), np.random.default_rng(seed + 2)
    workers = [_Worker(live) for _ in range(WORKERS)]
    for _ in range(WORKERS * SEQUENCES):
        kind, tokens = next(requests)
        workers[policy(workers, kind, profiles)].take(kind, tokens)
    clock = [(0.0, number) for number in range(WORKERS)]
    heapify(clock)
    seen: list[tuple[float, float, int]] = []
    begun = 0.0
    for at in range(steps):
        now, number = clock[0]
        if at == steps // 2:
            begun, seen = now, []
        worker = workers[number]
        running = len(worker.left)
        seconds, imbalance, ended = worker.step(profiles, chance) if running else (1.0, 1.0, 0)
        seen.append((imbalance, seconds, running))
        heapreplace(clock, (now + seconds, number))
        for _ in range(ended):
            kind, tokens = next(requests)
            workers[policy(workers, kind, profiles)].take(kind, tokens)
    imbalances, times, rows = (np.asarray(values) for values in zip(*seen, strict=True))
    return float(imbalances.mean()), float(times.mean()), float(rows.sum() / (clock[0][0] - begun))


def _plain(workers: list[_Worker], kind: int, profiles: Floats) -> int:
    return min(range(WORKERS), key=lambda number: len(workers[number].left))


def _spread(workers: list[_Worker], kind: int, profiles: Floats) -> int:
    """Among the emptiest, the one with the fewest of its class."""
    return min(_emptiest(workers), key=lambda number: (workers[number].counts[kind], len(workers[number].left)))


def _gathered(workers: list[_Worker], kind: int, profiles: Floats) -> int:
    """Among the emptiest, the one with the most of its class: what a cache of experts would like."""
    return min(_emptiest(workers), key=lambda number: (-workers[number].counts[kind], len(workers[number].left)))


def _by_profile(workers: list[_Worker], kind: int, profiles: Floats) -> int:
    """Among the emptiest, the one whose fullest ranks grow least."""

    def growth(number: int) -> float:
        worker = workers[number]
        before = np.einsum("k,kle->le", worker.counts, profiles)
        both = np.stack([before, before + profiles[kind]])
        peaks = np.einsum("nle,ler->nlr", both, worker.matrix).max(axis=2).sum(axis=1)
        return float(peaks[1] - peaks[0])

    return min(_emptiest(workers), key=growth)


POLICIES: Final[dict[str, Policy]] = {
    "plain (fewest sequences)": _plain,
    "spread by class": _spread,
    "by profile": _by_profile,
    "gathered by class": _gathered,
}


def _emptiest(workers: list[_Worker]) -> list[int]:
    least = min(len(worker.left) for worker in workers)
    return [number for number, worker in enumerate(workers) if len(worker.left) <= least + SLACK]


def _profiles(own: float, seed: int) -> Floats:
    """Shares [class, layer, expert]: `own` of a class's rows go to favourites of its own, the rest to common ones."""
    chance = np.random.default_rng(seed)
    law = np.arange(1, EXPERTS + 1, dtype=np.float64) ** -EXPONENT
    law /= law.sum()
    drawn = np.stack([[chance.permutation(law) for _ in range(LAYERS)] for _ in range(CLASSES + 1)])
    return np.asarray(own * drawn[1:] + (1 - own) * drawn[0], dtype=np.float64)


def _requests(seed: int) -> Iterator[tuple[int, int]]:
    """Class and length of one request after the other."""
    chance = np.random.default_rng(seed)
    number = 0
    while True:
        favoured = number // FAVOUR_REQUESTS % CLASSES
        kind = favoured if chance.random() < POPULAR else int(chance.integers(CLASSES))
        yield kind, 1 + int(chance.geometric(1 / MEAN_TOKENS))
        number += 1


def _matrix(placement: Placement) -> Floats:
    """Which part of an expert's rows goes to which rank [layer, expert, rank]."""
    matrix = np.zeros((placement.layers, placement.experts, placement.slots.shape[1]))
    layer, rank, slot = np.nonzero(placement.slots >= 0)
    np.add.at(matrix, (layer, placement.slots[layer, rank, slot], rank), placement.shares[layer, rank, slot])
    return matrix
