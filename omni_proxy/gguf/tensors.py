"""A GGUF file's tensors under Hugging Face's names and in its layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from omni_proxy.gguf.config import architecture
from omni_proxy.gguf.file import GgufFile

_WHOLE: Final[Mapping[str, str]] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "model.rotary_emb.inv_freq",
}
_LAYER: Final[Mapping[str, str]] = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hugging_face_name(name: str) -> str:
    """The name there; an unknown one stays."""
    match = _NAME.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        return _WHOLE.get(name, name)
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"


def hugging_face_array(file: GgufFile, name: str) -> Any:
    """A tensor, float32. Llama files keep rotated pairs side by side, Hugging Face half a head apart."""
    array = file.array(name)
    kind = name.split(".")[-2]
    family = architecture(file)
    if family != "llama" or kind not in ("attn_q", "attn_k"):
        return array
    heads = file.need("llama.attention.head_count")
    if kind == "attn_k":
        heads = file.get("llama.attention.head_count_kv", heads)
    pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)
