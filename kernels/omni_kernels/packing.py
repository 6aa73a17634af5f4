"""Weights in the form that a backend's kernels read, and quantisation. The plain form of a matrix is rows [n, k].

A packed weight belongs to the backend that made it and can be handed to that one only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8_GROUP = 128
"""Values of k, and outputs of a weight, that share a scale."""
FP8_MOST = 448.0
ROW_MOST = {8: 127.0, 16: 32512.0}
"""The largest whole number of a row, by its bits."""
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.int8)


@dataclass(frozen=True)
class PackedMatrix:
    """`count` matrices [n, k] one behind the other, as `backend` wants them."""

    backend: str
    data: Tensor
    scale: Tensor | None
    """float32, one factor for each output (int8); padded as the data is."""
    count: int
    n: int
    k: int
    dtype: torch.dtype
    gated: bool
    """The n outputs are n/2 gates and then n/2 ups."""
    row_bits: int = 0
    """Rows are made whole numbers of 8 or 16 bits before they are multiplied (`quantise_rows`); 0: they are not."""

    @property
    def nbytes(self) -> int:
        """Memory of the weights, scales included."""
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)


@dataclass(frozen=True)
class PackedExperts:
    """The MLPs of one layer: `w13` [E, 2I, H] and `w2` [E, H, I], with a shared expert that takes every row."""

    w13: PackedMatrix
    w2: PackedMatrix
    shared13: PackedMatrix | None = None
    shared2: PackedMatrix | None = None

    def __post_init__(self) -> None:
        parts = [w for w in (self.w13, self.w2, self.shared13, self.shared2) if w is not None]
        if len({(w.backend, w.row_bits) for w in parts}) > 1:
            raise ValueError("PackedExperts: w13, w2 and the shared expert must be packed alike")

    @property
    def backend(self) -> str:
        """Who packed it."""
        return self.w13.backend


def quantise(w: Tensor) -> tuple[Tensor, Tensor]:
    """int8 weights and float32 scales [..., n] of `w` [..., n, k]: symmetric, one scale an output channel."""
    wide = w.float()
    scale = wide.abs().amax(-1).div_(127.0).clamp_(min=torch.finfo(torch.float32).tiny)
    return wide.div(scale.unsqueeze(-1)).round_().clamp_(-127, 127).to(torch.int8), scale


def quantise_rows(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Whole numbers (in float32) and float32 scales [..., 1] of rows `x` [..., k]: symmetric, one scale a row.

    8 bits: -127..127. 16 bits: -32512..32512, so that two numbers of 8 bits, 256 * high + low, make one.
    """
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).div_(ROW_MOST[bits]).clamp_(min=torch.finfo(torch.float32).tiny)
    return wide.mul(scale.reciprocal()).round_(), scale


def stored_dtype(w: Tensor, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype to keep `w` in: as wanted; else its own, but bfloat16 if float32 values are all exact in that."""
    if wanted is not None:
        return wanted
    if w.dtype == torch.float32 and not (w.contiguous().view(torch.int32) & 0xFFFF).any():
        return torch.bfloat16
    return w.dtype


def plain(w: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """`w` in its stored dtype, contiguous, with scales if that is int8."""
    kept = stored_dtype(w, dtype)
    if kept == torch.int8:
        return quantise(w)
    return w.to(kept).contiguous(), None


def quantise_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """float8 values of `x` [..., k] and float32 scales [..., k / 128]: the largest of each 128 becomes 448."""
    groups = x.float().reshape(*x.shape[:-1], x.shape[-1] // FP8_GROUP, FP8_GROUP)
    scale = groups.abs().amax(-1).clamp_(min=1e-10) / FP8_MOST
    return (groups / scale.unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(-2), scale


def quantise_fp8(w: Tensor) -> tuple[Tensor, Tensor]:
    """float8 weights of `w` [..., n, k] and float32 scales [..., n / 128, k / 128], as checkpoints hold them."""
    n, k = w.shape[-2:]
    blocks = w.float().reshape(*w.shape[:-2], n // FP8_GROUP, FP8_GROUP, k // FP8_GROUP, FP8_GROUP)
    scale = blocks.abs().amax((-3, -1)).clamp_(min=1e-10) / FP8_MOST
    return (blocks / scale[..., None, :, None]).to(torch.float8_e4m3fn).flatten(-2).flatten(-3, -2), scale
