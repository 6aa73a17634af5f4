"""The ops as operators of torch, `torch.ops.omni_kernels.*`: `torch.compile` and `torch.export` keep each as one node.

Registered by importing this module. A call costs microseconds more than the plain function, so the engine takes those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, library

from omni_kernels import api
from omni_kernels.packing import PackedExperts, PackedMatrix

SPACE: Final = "omni_kernels"


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The normalised rows of `reference.rms_norm`."""
    return api.rms_norm(x, weight, eps)[0]


def _add_rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.rms_norm` with a residual."""
    return api.rms_norm(x, weight, eps, residual)


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `reference.rope`."""
    return api.rope(x, cos, sin)


def _silu_and_mul(x: Tensor) -> Tensor:
    """See `reference.silu_and_mul`."""
    return api.silu_and_mul(x)


def _moe_route(
    logits: Tensor,
    top_k: int,
    renormalise: bool,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int | None = None,
    per_group: bool = False,
    scale: float = 1.0,
    group_best: int = 2,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.moe_route`."""
    return api.moe_route(logits, top_k, renormalise, scoring, bias, groups, top_groups, per_group, scale, group_best)


def _packed_moe(
    x: Tensor, weights_of: Sequence[Tensor], sizes: Sequence[int], packer: str, ids: Tensor, weights: Tensor
) -> Tensor:
    """See `reference.packed_moe`; what stands for the experts is made by `experts_arguments`."""
    return api.packed_moe(x, _experts(weights_of, sizes, packer), ids, weights)


def _kv_write(kv: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """See `reference.kv_write`."""
    api.kv_write(kv, slots, k, v)


_DTYPES: Final = (torch.float32, torch.bfloat16, torch.int8)
_NUMBERS: Final = 7
"""Of each matrix: whether it has scales, count, n, k, dtype, gated, row bits."""


def experts_arguments(experts: PackedExperts) -> tuple[list[Tensor], list[int], str]:
    """`weights_of`, `sizes` and `packer` of the operator `packed_moe`."""
    tensors: list[Tensor] = []
    sizes: list[int] = []
    for w in (experts.w13, experts.w2, experts.shared13, experts.shared2):
        if w is None:
            continue
        tensors += [w.data] if w.scale is None else [w.data, w.scale]
        sizes += [w.scale is not None, w.count, w.n, w.k, _DTYPES.index(w.dtype), w.gated, w.row_bits]
    return tensors, sizes, experts.backend


def _experts(tensors: Sequence[Tensor], sizes: Sequence[int], packer: str) -> PackedExperts:
    left, matrices = list(tensors), []
    for i in range(0, len(sizes), _NUMBERS):
        scaled, count, n, k, dtype, gated, row_bits = sizes[i : i + _NUMBERS]
        data, scale = left.pop(0), left.pop(0) if scaled else None
        matrices.append(PackedMatrix(packer, data, scale, count, n, k, _DTYPES[dtype], bool(gated), row_bits))
    return PackedExperts(*matrices)


# What torch asks of an operator that it traces: the shapes and dtypes of its results.


def _like(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


def _like_twice(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _half(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _chosen(logits: Tensor, top_k: int, *_: object, **__: object) -> tuple[Tensor, Tensor, Tensor]:
    rows, experts = logits.shape
    ids = logits.new_empty((rows, top_k), dtype=torch.int64)
    return ids, ids.new_empty(ids.shape, dtype=torch.float32), ids.new_empty(experts)


def _define(
    name: str, function: Callable[..., Any], fake: Callable[..., Any] | None, mutates: Sequence[str] = ()
) -> None:
    operator: Any = library.custom_op(f"{SPACE}::{name}", function, mutates_args=mutates)
    if fake is not None:
        operator.register_fake(fake)


_define("rms_norm", _rms_norm, _like)
_define("add_rms_norm", _add_rms_norm, _like_twice)
_define("rope", _rope, _like)
_define("silu_and_mul", _silu_and_mul, _half)
_define("moe_route", _moe_route, _chosen)
_define("packed_moe", _packed_moe, _like)
_define("kv_write", _kv_write, None, ("kv",))
