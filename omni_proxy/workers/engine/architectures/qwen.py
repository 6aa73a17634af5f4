"""Qwen2 (biases of queries, keys and values) and Qwen3 (a norm of each head), dense."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from omni_proxy.workers.engine.architectures.architecture import Architecture
from omni_proxy.workers.engine.config_fields import Fields, dense_config
from omni_proxy.workers.engine.model_config import ModelConfig


def _read_qwen2(fields: Fields) -> ModelConfig:
    fields.refuse("use_sliding_window")
    fields.integer("intermediate_size")
    return replace(dense_config(fields), qkv_bias=True)


def _read_qwen3(fields: Fields) -> ModelConfig:
    fields.refuse("use_sliding_window")
    fields.integer("intermediate_size")
    bias = fields.flag("attention_bias")
    return replace(dense_config(fields), qk_norm="heads", qkv_bias=bias, out_bias=bias)


QWEN2: Final = Architecture(_read_qwen2)
QWEN3: Final = Architecture(_read_qwen3)
