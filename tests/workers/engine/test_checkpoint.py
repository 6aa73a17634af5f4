"""A folder is loaded whole or refused in one line that names the file and the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_proxy.workers.engine.checkpoint import CheckpointError, load_checkpoint

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def folder(tied: Path, tmp_path: Path) -> Path:
    return Path(copytree(tied, tmp_path / "model"))


def edit_config(folder: Path, edit: Edit) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))


def edit_tensors(folder: Path, edit: Edit) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def error_of(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_the_config_says_what_transformers_wrote(checkpoints: dict[str, Path]) -> None:
    config = load_checkpoint(checkpoints["untied"]).config
    assert (config.num_experts, config.top_k, config.head_dim) == (5, 3, 24)
    assert config.sparse_layers == {0, 2}
    assert (config.rope_theta, config.routing.renormalise) == (5e5, False)
    assert config.eos_token_ids == {7}


def test_the_older_spellings_are_read_too(folder: Path) -> None:
    def rename(raw: dict[str, Any]) -> None:
        raw["num_experts"] = raw.pop("num_local_experts", None) or raw["num_experts"]
        raw.pop("rope_parameters", None)
        raw["rope_theta"] = 1234.0

    edit_config(folder, rename)
    config = load_checkpoint(folder).config
    assert (config.num_experts, config.rope_theta) == (8, 1234.0)


def test_end_tokens_come_from_both_files(folder: Path) -> None:
    edit_config(folder, lambda raw: raw.update(eos_token_id=[3, 4]))
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert load_checkpoint(folder).config.eos_token_ids == {3, 4, 5}


def test_a_sharded_checkpoint_is_the_same(write_checkpoint: Callable[..., Path], tied: Path) -> None:
    sharded = write_checkpoint("tied", shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    whole, parts = load_checkpoint(tied), load_checkpoint(sharded)
    assert parts.digest == whole.digest
    assert all(parts.tensors[name].equal(tensor) for name, tensor in whole.tensors.items())


def test_fused_experts_are_accepted(folder: Path) -> None:
    def fuse(tensors: dict[str, Any]) -> None:
        for layer in range(2):
            prefix = f"model.layers.{layer}.mlp.experts."
            parts = {
                name: [tensors.pop(f"{prefix}{e}.{name}_proj.weight") for e in range(8)]
                for name in ("gate", "up", "down")
            }
            pairs = zip(parts["gate"], parts["up"], strict=True)
            tensors[prefix + "gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
            tensors[prefix + "down_proj"] = torch.stack(parts["down"])

    edit_tensors(folder, fuse)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_checkpoint(folder).tensors


def test_other_weights_have_another_digest(write_checkpoint: Callable[..., Path], tied: Path) -> None:
    assert load_checkpoint(write_checkpoint("tied", seed=1)).digest != load_checkpoint(tied).digest


def test_bfloat16_is_an_option(tied: Path) -> None:
    tensors = load_checkpoint(tied, torch.bfloat16).tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


NAME = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda t: t.pop(NAME), f"model.safetensors: tensor {NAME} is missing"),
        (
            lambda t: t.update({NAME: torch.zeros(2, 2)}),
            f"model.safetensors: tensor {NAME} has shape [2, 2], [48, 64] is expected",
        ),
        (lambda t: t.update(more=torch.zeros(1)), "model.safetensors: tensor more is not expected"),
        (
            lambda t: t.update({NAME: torch.zeros(48, 64, dtype=torch.int8)}),
            f"model.safetensors: tensor {NAME} has type torch.int8, not a float",
        ),
    ],
)
def test_wrong_tensors_are_named(folder: Path, edit: Edit, text: str) -> None:
    edit_tensors(folder, edit)
    assert error_of(folder).endswith(text)


@pytest.mark.parametrize("keep", [0, 5, 200, 0.5, -1])
def test_a_truncated_file_is_named(folder: Path, keep: float) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    assert error_of(folder).startswith(f"{path}: not a whole safetensors file")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert error_of(folder) == f"{folder / name}: no such file"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert error_of(tmp_path / "nowhere") == f"{tmp_path / 'nowhere'}: no such folder"


def test_a_missing_shard_and_a_false_index_are_named(write_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(copytree(write_checkpoint("tied", shard_size="100KB"), tmp_path / "model"))
    index = folder / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"]["ghost"] = raw["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(raw))
    assert "tensor ghost is missing" in error_of(folder)
    shard = folder / raw["weight_map"]["ghost"]
    shard.unlink()
    assert error_of(folder) == f"{shard}: no such file"
    index.write_text("{}")
    assert error_of(folder) == f"{index}: weight_map is missing"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported (supported: PanguProMoE, deepseek_v2,"),
        ({"model_type": ["llama"]}, "model_type ['llama'] is not supported"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, got '64'"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"attention_bias": 1}, "attention_bias must be true or false, got 1"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({"model_type": "olmoe", "attention_bias": True}, "attention_bias is not supported"),
        ({"model_type": "deepseek_v3"}, "kv_lora_rank is missing"),
        (
            {"model_type": "deepseek_v2", "norm_topk_prob": False, "topk_method": "best"},
            "topk_method 'best' is not supported",
        ),
        ({"model_type": "PanguProMoE", "num_experts_per_tok": 3}, "8 experts do not divide into 3 groups"),
        ({"use_sliding_window": True}, "use_sliding_window is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq' is not supported (fp8 is)"),
        ({"quantization_config": "fp8"}, "quantization_config: quant_method None is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size must be two positive integers, got None"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 0]}},
            "weight_block_size must be two positive integers, got [128, 0]",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope' is not supported"),
        ({"rope_scaling": {"type": "su"}}, "rope_type 'su' is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be a positive number, got 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta must be a positive number"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds 8 experts"),
        ({"head_dim": 15}, "head_dim 15 must be even"),
        ({"eos_token_id": 999}, "eos_token_id [999] is not in the vocabulary"),
        ({"mlp_only_layers": 1}, "mlp_only_layers must be a list"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(folder: Path, changes: dict[str, Any], text: str) -> None:
    edit_config(folder, lambda raw: raw.update(changes))
    (folder / "generation_config.json").unlink(missing_ok=True)
    message = error_of(folder)
    assert message.startswith(f"{folder / 'config.json'}: ")
    assert text in message


@pytest.mark.parametrize(("text", "error"), [("{", "not readable as JSON"), ("[]", "a JSON object is expected")])
def test_a_config_that_is_no_object_is_refused(folder: Path, text: str, error: str) -> None:
    (folder / "config.json").write_text(text)
    assert error in error_of(folder)
