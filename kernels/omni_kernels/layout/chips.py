"""Chips by name: what a rank has of memory, bandwidth, compute and links. Vendors' nominal figures, decimal units.

A rank is what one process drives: a GPU, or a die of an Ascend 910C, which has two. Links are one direction, per rank.
Sources: NVIDIA's data sheets of A100, H100, H200, H800, H20, B200; for Ascend 910C and its links "Serving Large
Language Models on Huawei CloudMatrix384" (arXiv 2506.12708).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from omni_kernels.layout.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Chip:
    """One kind of device; memory, bandwidth and compute of one rank."""

    name: str
    kind: str
    """cuda, npu or cpu."""
    memory_bytes: float
    read_bytes_s: float
    flop_s: float
    """Of 16-bit products, dense."""
    flop8_s: float
    """Of 8-bit products; the 16-bit figure where there is no 8-bit unit."""
    node_ranks: int
    """Ranks that are linked by `node_bytes_s`."""
    node_bytes_s: float
    far_bytes_s: float
    """To ranks of other nodes."""
    exchange_s: float
    """Least time of one exchange among all ranks."""
    ranks: int = 1
    """Ranks a device as people count them: 2 dies a 910C."""


def _chip(
    name: str, kind: str, gb: float, tb_s: float, tflop: float, tflop8: float, ranks: int, near: float, far: float,
    exchange_us: float, each: int = 1,
) -> Chip:  # fmt: skip
    return Chip(
        name, kind, gb * 1e9, tb_s * 1e12, tflop * 1e12, tflop8 * 1e12, ranks, near * 1e9, far * 1e9,
        exchange_us * 1e-6, each,
    )  # fmt: skip


_ALL: Final = (
    _chip("A100", "cuda", 80, 2.04, 312, 624, 8, 300, 25, 60),
    _chip("H100", "cuda", 80, 3.35, 989, 1979, 8, 450, 50, 60),
    _chip("H800", "cuda", 80, 3.35, 989, 1979, 8, 200, 50, 60),
    _chip("H200", "cuda", 141, 4.8, 989, 1979, 8, 450, 50, 60),
    _chip("H20", "cuda", 96, 4.0, 148, 296, 8, 450, 50, 60),
    _chip("B200", "cuda", 180, 7.7, 2250, 4500, 8, 900, 50, 60),
    _chip("910B", "npu", 64, 1.6, 376, 752, 8, 196, 25, 80),
    _chip("910C", "npu", 64, 1.6, 376, 752, 16, 196, 98, 25, 2),
)
CHIPS: Final[Mapping[str, Chip]] = MappingProxyType({chip.name: chip for chip in _ALL})
"""By the name that `--devices` takes."""

MOST: Final = 100_000


@dataclass(frozen=True, slots=True)
class Devices:
    """`count` devices of one kind."""

    chip: Chip
    count: int

    @property
    def ranks(self) -> int:
        """How many processes they take."""
        return self.count * self.chip.ranks


def parse_devices(text: str) -> Devices:
    """`910C:384` -> 384 devices, 768 dies. Raises LayoutError."""
    name, colon, number = text.partition(":")
    chip = {key.lower(): value for key, value in CHIPS.items()}.get(name.strip().lower())
    if chip is None:
        raise LayoutError(f"devices: unknown chip {name!r} (known: {', '.join(CHIPS)})")
    if not colon:
        return Devices(chip, 1)
    if not number.isascii() or not number.isdigit() or not 1 <= int(number[:9]) <= MOST:
        raise LayoutError(f"devices: the number of {chip.name} must be from 1 to {MOST}, got {number!r}")
    return Devices(chip, int(number))


def known_chip(name: str) -> Chip | None:
    """The chip that a driver's name means: `NVIDIA H200` -> H200, `Ascend910_9382` -> 910C; None if unknown."""
    plain = name.upper().replace(" ", "").replace("-", "")
    if plain.startswith("ASCEND910_93"):
        return CHIPS["910C"]
    if plain.startswith("ASCEND910B"):
        return CHIPS["910B"]
    found = [chip for key, chip in CHIPS.items() if key in plain]
    return max(found, key=lambda chip: len(chip.name)) if found else None


def cpu_chip(cores: int, free_bytes: float, read_bytes_s: float, flop_s: float) -> Chip:
    """The cores of this machine as ranks that share its memory; rates are those of one core.

    A worker of several cores is one process with as many threads: its link is the memory itself.
    """
    return Chip("cpu", "cpu", free_bytes / cores, read_bytes_s, flop_s, flop_s, cores, read_bytes_s, read_bytes_s, 5e-6)
