"""Llama and Mistral: dense, grouped-query attention. SmolLM2 and many others have this shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from omni_proxy.workers.engine.architectures.architecture import Architecture
from omni_proxy.workers.engine.config_fields import Fields, dense_config, window_limited
from omni_proxy.workers.engine.model_config import ModelConfig


def _read(fields: Fields) -> ModelConfig:
    fields.integer("intermediate_size")
    bias = fields.flag("attention_bias")
    return replace(dense_config(fields), qkv_bias=bias, out_bias=bias)


def _read_mistral(fields: Fields) -> ModelConfig:
    config = _read(fields)
    return replace(config, max_model_len=window_limited(fields, config))


LLAMA: Final = Architecture(_read)
MISTRAL: Final = Architecture(_read_mistral)
