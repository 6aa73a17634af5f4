"""A finished placement: what sits in which slot of which rank, and how tokens split. Knows no algorithm."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from omni_proxy.workers.engine.placement.draft import Floats, Ints
from omni_proxy.workers.engine.placement.errors import Fault, PlacementError

FORMAT = "omni-placement/1"
EMPTY = -1
SUM_ERROR = 1e-6


@dataclass(frozen=True, slots=True)
class Placement:
    """`slots[layer, rank, slot]` is an expert or -1; `shares` the fraction of its tokens that this replica takes."""

    experts: int
    slots: Ints
    shares: Floats
    nodes: int = 1

    def __post_init__(self) -> None:
        if self.slots.ndim != 3 or self.slots.shape != self.shares.shape:
            raise PlacementError(Fault.BAD_PLACEMENT, "slots and shares must both be layers by ranks by slots")
        if self.slots.min() < EMPTY or self.slots.max() >= self.experts:
            raise PlacementError(Fault.BAD_PLACEMENT, f"slots must hold -1 or an expert below {self.experts}")
        if not np.isfinite(self.shares).all() or (self.shares < 0).any() or self.shares[self.slots < 0].any():
            raise PlacementError(
                Fault.BAD_PLACEMENT, "shares must be finite, not negative, and 0 where a slot is empty"
            )
        if self.nodes < 1 or self.ranks % self.nodes:
            raise PlacementError(Fault.RANKS_NOT_DIVISIBLE, f"{self.ranks} ranks do not divide over {self.nodes} nodes")
        self._check_sums()

    def _check_sums(self) -> None:
        missing = np.argwhere(self.copies() == 0)
        if len(missing):
            layer, expert = missing[0]
            raise PlacementError(Fault.BAD_PLACEMENT, f"layer {layer}: expert {expert} is on no rank")
        off = np.argwhere(np.abs(self._per_expert(self.shares) - 1) > SUM_ERROR)
        if len(off):
            layer, expert = off[0]
            raise PlacementError(Fault.BAD_PLACEMENT, f"layer {layer}: the shares of expert {expert} do not sum to 1")

    @property
    def layers(self) -> int:
        return int(self.slots.shape[0])

    @property
    def ranks(self) -> int:
        return int(self.slots.shape[1])

    def copies(self) -> Ints:
        """Replicas per layer and expert."""
        return np.asarray(self._per_expert(np.where(self.slots >= 0, 1.0, 0.0)), dtype=np.int64)

    def slots_used(self) -> Ints:
        """Experts held per rank, all layers together: its memory in experts."""
        return np.asarray((self.slots >= 0).sum(axis=(0, 2)), dtype=np.int64)

    def rank_loads(self, loads: Floats) -> Floats:
        """Tokens per layer and rank [layers, ranks] when the window `loads` [layers, experts] is served."""
        if loads.shape != (self.layers, self.experts):
            raise PlacementError(
                Fault.BAD_PLACEMENT,
                f"the placement has {self.layers} layers of {self.experts} experts, the loads {loads.shape}",
            )
        padded = np.concatenate([loads, np.zeros((self.layers, 1))], axis=1)  # -1 picks the zero at the end
        tokens = np.take_along_axis(padded, self.slots.reshape(self.layers, -1) % (self.experts + 1), axis=1)
        return np.asarray((tokens.reshape(self.slots.shape) * self.shares).sum(axis=2), dtype=np.float64)

    def pattern(self) -> np.ndarray[tuple[int, ...], np.dtype[np.int8]]:
        """0/1 [ranks, layers, experts], the form that other systems' static placements have."""
        held = np.zeros((self.layers, self.ranks, self.experts + 1), np.int8)
        np.put_along_axis(held, self.slots % (self.experts + 1), 1, axis=2)
        return np.ascontiguousarray(held[:, :, : self.experts].transpose(1, 0, 2))

    def to_json(self) -> str:
        """The placement as one JSON object."""
        shares = np.round(self.shares, 9)
        return json.dumps(
            {
                "format": FORMAT,
                "experts": self.experts,
                "nodes": self.nodes,
                "slots": self.slots.tolist(),
                "shares": shares.tolist(),
            },
            separators=(",", ":"),
        )

    def _per_expert(self, values: Floats) -> Floats:
        sums = np.zeros((self.layers, self.experts + 1))
        layer = np.broadcast_to(np.arange(self.layers)[:, None, None], self.slots.shape)
        np.add.at(sums, (layer, self.slots), values)
        return sums[:, : self.experts]


def from_json(text: str) -> Placement:
    """Read what `Placement.to_json` wrote."""
    try:
        data: Any = json.loads(text)
        if data["format"] != FORMAT:
            raise PlacementError(Fault.BAD_PLACEMENT, f"format {data['format']!r} is not {FORMAT!r}")
        return Placement(
            int(data["experts"]),
            np.array(data["slots"], np.int64),
            np.array(data["shares"], np.float64),
            int(data["nodes"]),
        )
    except PlacementError:
        raise
    except (KeyError, TypeError, ValueError) as exc:
        raise PlacementError(Fault.BAD_PLACEMENT, f"not a saved placement ({type(exc).__name__}: {exc})") from exc


def contiguous(layers: int, experts: int, ranks: int) -> Placement:
    """The placement without redundancy or thought: experts in order, as evenly many per rank as they divide."""
    counts = np.full(ranks, experts // ranks) + (np.arange(ranks) < experts % ranks)
    starts = np.cumsum(counts) - counts
    slots = np.full((ranks, int(counts.max())), EMPTY, np.int64)
    real = np.arange(slots.shape[1])[None] < counts[:, None]
    slots[real] = (starts[:, None] + np.arange(slots.shape[1])[None])[real]
    every = np.broadcast_to(slots, (layers, *slots.shape)).copy()
    return Placement(experts, every, (every >= 0).astype(np.float64))
