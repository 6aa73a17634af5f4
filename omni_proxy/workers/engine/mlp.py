"""The MLP of a layer, op by op: dense, or experts chosen row by row with one that takes all. `x` [T, H] -> [T, H]."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

import omni_kernels as ops
from omni_proxy.workers.engine.layer_weights import MlpWeights
from omni_proxy.workers.engine.model_config import ModelConfig


class Experts(Protocol):
    """Computes the experts of all MoE layers in place of the model, which then holds none."""

    def __call__(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor: ...


class DenseMlp:
    """One gated MLP."""

    def __init__(self, w13: Tensor, w2: Tensor, dtype: torch.dtype | None) -> None:
        self._w13 = ops.pack(w13, dtype)
        self._w2 = ops.pack(w2, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return ops.linear(ops.silu_and_mul(ops.linear(x, self._w13)), self._w2)


class SparseMlp:
    """Experts of layer `index`; `counts` [E] is added to, the rows that each has got."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        weights: MlpWeights,
        counts: Tensor,
        experts: Experts | None,
        dtype: torch.dtype | None,
    ) -> None:
        assert weights.gate is not None
        self._config = config
        self._index = index
        self._gate = weights.gate
        self._correction = weights.correction
        self._counts = counts
        self._elsewhere = experts
        self._packed: ops.PackedExperts | None = None
        self._shared: DenseMlp | None = None
        if experts is None:
            self._packed = ops.pack_experts(weights.w13, weights.w2, dtype, weights.shared13, weights.shared2)
        elif weights.shared13 is not None and weights.shared2 is not None:
            self._shared = DenseMlp(weights.shared13, weights.shared2, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        ids, weights, counts = self._route(x)
        self._counts.add_(counts)
        if self._packed is not None:
            return ops.packed_moe(x, self._packed, ids, weights)
        assert self._elsewhere is not None
        out = self._elsewhere(self._index, x, ids, weights)
        return out if self._shared is None else out + self._shared(x)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        how = self._config.routing
        return ops.moe_route(
            F.linear(x, self._gate),
            self._config.top_k,
            how.renormalise,
            how.scoring,
            self._correction,
            how.groups,
            how.top_groups,
            how.per_group,
            how.scale,
            how.group_best,
        )
