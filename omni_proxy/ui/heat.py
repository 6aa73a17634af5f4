"""Expert loads as the page draws them: one byte a cell. Pure."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from omni_proxy.observe.expert_loads import ExpertLoad

PER_MEAN: Final = 64
"""A cell of this value has the mean load of its layer; 255 is four times as much, or more."""


class Heat(Struct, frozen=True):
    """One worker's heat map, row by row."""

    worker: str
    layers: list[int]
    """Their numbers."""
    experts: int
    cells: str
    """Base64 of a byte for each layer and expert, layer by layer."""
    imbalance: list[float]
    """By layer: most loaded expert over mean."""
    ranks: float | None
    """Most loaded rank over mean; None: it has one rank, or does not say."""
    idle: int
    """Experts that got nothing."""
    tokens: int
    """Counted in all cells."""
    window_s: float | None
    """In so many seconds; None: since the worker started."""


def heat_maps(loads: Iterable[ExpertLoad]) -> list[Heat]:
    """One for each worker, in the order given; layers and workers that had nothing are left out."""
    return [_heat(load) for load in loads if any(map(any, load.tokens))]


def _heat(load: ExpertLoad) -> Heat:
    loaded = [(number, rows) for number, rows in enumerate(load.tokens) if any(rows)]
    experts = max(len(rows) for _, rows in loaded)
    cells = bytearray()
    for _, rows in loaded:
        mean = sum(rows) / len(rows)
        cells += bytes(min(255, round(count * PER_MEAN / mean)) for count in rows).ljust(experts, b"\0")
    return Heat(
        worker=load.worker,
        layers=[number for number, _ in loaded],
        experts=experts,
        cells=b64encode(cells).decode(),
        imbalance=[round(max(rows) * len(rows) / sum(rows), 3) for _, rows in loaded],
        ranks=None if load.rank_imbalance is None else round(load.rank_imbalance, 3),
        idle=load.idle,
        tokens=sum(sum(rows) for _, rows in loaded),
        window_s=load.window_s,
    )
