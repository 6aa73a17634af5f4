"""Synthetic expert loads: a Zipf law in random order with gamma noise, and windows of such loads that drift.

No public traces of expert loads were found. The law is set so that the published algorithm scores what is known of it:
1.07 / 1.19 / 1.61 at 144 ranks and 32 extra replicas for exponents 0.3 / 0.5 / 0.8. Drift is a random walk of the
logarithms (what a placement can follow) plus independent noise per window (what it cannot).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NOISE_SHAPE = 20.0  # gamma shape: relative deviation 0.22
LAYERS, EXPERTS = 58, 256


def zipf_loads(exponent: float, layers: int = LAYERS, experts: int = EXPERTS, seed: int = 0) -> NDArray[np.float64]:
    """Loads [layers, experts] with mean 1 in each layer; one exponent for all layers."""
    return mixed_zipf_loads(np.full(layers, exponent), experts, seed)


def mixed_zipf_loads(exponents: NDArray[np.float64], experts: int = EXPERTS, seed: int = 0) -> NDArray[np.float64]:
    """Loads [layers, experts] with mean 1 in each layer and an exponent of its own for each layer."""
    chance = np.random.default_rng(seed)
    places = np.arange(1, experts + 1, dtype=np.float64)
    rows = np.stack([chance.permutation(places**-exponent) for exponent in exponents])
    loads = rows * chance.gamma(NOISE_SHAPE, 1 / NOISE_SHAPE, rows.shape)
    return np.asarray(loads / loads.mean(axis=1, keepdims=True), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Drift:
    """Deviations of the logarithm of a load: `walk` adds up from window to window, `noise` does not."""

    name: str
    walk: float
    noise: float


SLOW = Drift("slow", 0.03, 0.05)
FAST = Drift("fast", 0.105, 0.03)


def windows(drift: Drift, exponent: float, count: int, layers: int, seed: int = 1) -> Iterator[NDArray[np.float64]]:
    """`count` windows of loads [layers, experts] that drift."""
    chance = np.random.default_rng(seed)
    logs = np.log(zipf_loads(exponent, layers, seed=seed))
    for _ in range(count):
        loads = np.exp(logs + drift.noise * chance.normal(size=logs.shape))
        yield loads / loads.mean(axis=1, keepdims=True)
        logs = logs + drift.walk * chance.normal(size=logs.shape)
