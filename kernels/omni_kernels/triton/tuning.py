"""Tile sizes by shape and chip, from `tuning.json`: measured where a chip was at hand, else chosen by hand.

Knows numbers only; the kernels and tensors are elsewhere.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

FP8_GROUP: Final = 128
FILE: Final = Path(__file__).with_name("tuning.json")


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows, outputs and k of a tile, and how NVIDIA pipelines it (nothing on Ascend)."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int


@cache
def _read() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))["tiles"]
    return entries


def largest_power(size: int, most: int) -> int:
    """The largest power of two that divides `size`, at most `most`."""
    return min(size & -size, most)


def fp8_tiles(rows_an_expert: float) -> Tiles:
    """Tiles over float8 weights: a step of k is a block of scales, and a tile's outputs lie inside one. By hand."""
    if rows_an_expert <= 16:
        return Tiles(16, 64, FP8_GROUP, 4, 4)
    return Tiles(64, 64, FP8_GROUP, 4, 3)


def tiles(chip: str, kernel: str, rows_an_expert: float, n: int, k: int) -> Tiles:
    """Tiles of the first entry that fits; shrunk to divide n and k, so that weights need no masks.

    Raises ValueError for n or k that no power of two from 16 on divides.
    """
    for entry in _read():
        if entry["chip"] == chip and entry["kernel"] == kernel and rows_an_expert <= entry["rows_an_expert"]:
            bn, bk = largest_power(n, entry["bn"]), largest_power(k, entry["bk"])
            if min(bn, bk) < 16:
                raise ValueError(f"triton: {kernel} needs sizes that 16 divides, got n={n} k={k}")
            return Tiles(entry["bm"], bn, bk, entry["warps"], entry["stages"])
    raise ValueError(f"triton: no tiles for {kernel} on {chip}")
