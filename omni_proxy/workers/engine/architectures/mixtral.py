"""Mixtral: Mistral's attention, every layer with experts, which have names of their own."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from omni_proxy.workers.engine.architectures.architecture import Architecture
from omni_proxy.workers.engine.config_fields import Fields, dense_config, window_limited
from omni_proxy.workers.engine.model_config import ModelConfig, Routing

_PROJECTIONS: Final = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_EXPERT: Final = re.compile(r"\.block_sparse_moe\.experts\.(\d+)\.(w[123])\.")


def _read(fields: Fields) -> ModelConfig:
    dense = dense_config(fields)
    return replace(
        dense,
        max_model_len=window_limited(fields, dense),
        num_experts=fields.integer("num_local_experts", "num_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        moe_intermediate_size=dense.intermediate_size,
        sparse_layers=frozenset(range(dense.num_layers)),
        routing=Routing(renormalise=True),
    )


def _canonical(name: str) -> str:
    expert = _EXPERT.sub(lambda found: f".mlp.experts.{found[1]}.{_PROJECTIONS[found[2]]}.", name)
    return expert.replace(".block_sparse_moe.", ".mlp.")


MIXTRAL: Final = Architecture(_read, _canonical)
