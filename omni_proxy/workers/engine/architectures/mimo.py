"""MiMo: Qwen2's decoder with a layer that predicts the token after the next (MTP), under names of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from omni_proxy.workers.engine.architectures.architecture import Architecture
from omni_proxy.workers.engine.architectures.qwen import QWEN2
from omni_proxy.workers.engine.config_fields import Fields
from omni_proxy.workers.engine.model_config import ModelConfig

_HEAD: Final = "model.mtp_layers.0."
_NAMES: Final = {
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "eh_proj",
    "final_layernorm": "shared_head.norm",
}


def _read(fields: Fields) -> ModelConfig:
    layers = fields.count("num_nextn_predict_layers")
    return replace(QWEN2.read(fields), draft_layers=layers, draft_hidden_first=True)


def _canonical(name: str) -> str:
    if not name.startswith(_HEAD):
        return name
    part, dot, kind = name.removeprefix(_HEAD).rpartition(".")
    return f"draft.{_NAMES.get(part, part)}{dot}{kind}"


MIMO: Final = Architecture(_read, _canonical)
