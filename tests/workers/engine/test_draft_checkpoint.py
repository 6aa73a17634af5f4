"""A draft head is loaded whole or refused in one line that names the file and the tensor."""

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
from omni_proxy.workers.engine.draft_checkpoint import load_with_head
from omni_proxy.workers.engine.engine import Engine
from omni_proxy.workers.engine.types import EngineConfig
from tests.workers.engine.heads import KINDS, Headed, write_headed

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Headed]:
    return {kind: write_headed(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def edited(written: dict[str, Headed], kind: str, tmp_path: Path, tensors: Edit = len, config: Edit = len) -> Path:
    """A copy of a checkpoint whose head's folder is changed."""
    folder = Path(copytree(written[kind].folder, tmp_path / "model"))
    at = folder / "head" if kind == "eagle" else folder
    raw, held = json.loads((at / "config.json").read_text()), load_file(at / "model.safetensors")
    config(raw)
    tensors(held)
    (at / "config.json").write_text(json.dumps(raw))
    save_file(held, at / "model.safetensors")
    return folder


def load(folder: Path, kind: str) -> Any:
    return load_with_head(folder, torch.float32, True, str(folder / "head") if kind == "eagle" else None)


def error_of(folder: Path, kind: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder, kind)
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder) in text
    return text


TENSORS = {
    "mtp": ("model.layers.3.eh_proj.weight", "model.layers.3.mlp.experts.2.up_proj.weight"),
    "mimo": ("model.mtp_layers.0.input_proj.weight", "model.mtp_layers.0.mlp.up_proj.weight"),
    "eagle": ("fc.weight", "layers.0.mlp.up_proj.weight"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_loaded(written: dict[str, Headed], kind: str) -> None:
    folder = written[kind].folder
    checkpoint, head = load(folder, kind)
    assert head is not None
    assert checkpoint.config.draft_layers == 1
    assert "eh_proj.weight" in head.tensors
    assert ("input_layernorm.weight" in head.tensors) == (kind != "eagle")
    plain = load_checkpoint(folder)
    assert plain.config.draft_layers == 0
    assert not any(name.startswith("draft.") for name in plain.tensors)
    assert plain.digest != checkpoint.digest


@pytest.mark.parametrize("nth", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_tensor_is_named(written: dict[str, Headed], tmp_path: Path, kind: str, nth: int) -> None:
    name = TENSORS[kind][nth]
    text = error_of(edited(written, kind, tmp_path, lambda tensors: tensors.pop(name)), kind)
    tail = {"input_proj.weight": "eh_proj.weight"}.get(name.split(".0.")[-1], name.split(".0.")[-1])
    assert text.endswith(f"{tail} is missing")


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_shape_is_named(written: dict[str, Headed], tmp_path: Path, kind: str) -> None:
    name = TENSORS[kind][0]
    text = error_of(edited(written, kind, tmp_path, lambda t: t.update({name: t[name][:, 1:].contiguous()})), kind)
    assert f"tensor {name} has shape [48, 95], [48, 96] is expected" in text


@pytest.mark.parametrize("kind", KINDS)
def test_an_unexpected_tensor_is_named(written: dict[str, Headed], tmp_path: Path, kind: str) -> None:
    name = TENSORS[kind][1].replace("up_proj", "more_proj")
    text = error_of(edited(written, kind, tmp_path, lambda t: t.update({name: torch.ones(2)})), kind)
    assert text.endswith(f"tensor {name} is not expected")


def test_copies_of_the_model_s_own_are_shared(written: dict[str, Headed], tmp_path: Path) -> None:
    """DeepSeek's layer has the embedding and the output matrix a second time."""
    more = {f"model.layers.3.{name}.weight": torch.ones(128, 48) for name in ("embed_tokens", "shared_head.head")}
    _, head = load(edited(written, "mtp", tmp_path, lambda t: t.update(more)), "mtp")
    assert "embed_tokens.weight" not in head.tensors


def test_a_second_head_is_left_out(written: dict[str, Headed], tmp_path: Path) -> None:
    more = {"model.layers.4.eh_proj.weight": torch.ones(48, 96)}
    folder = edited(written, "mtp", tmp_path, lambda t: t.update(more), lambda c: c.update(num_nextn_predict_layers=2))
    assert load(folder, "mtp")[1] is not None


@pytest.mark.parametrize("kind", ["mtp", "mimo"])
def test_a_model_without_a_head(written: dict[str, Headed], tmp_path: Path, kind: str) -> None:
    folder = edited(written, kind, tmp_path, config=lambda config: config.update(num_nextn_predict_layers=0))
    assert "config.json: num_nextn_predict_layers is 0" in error_of(folder, kind)
    assert load_checkpoint(folder).config.draft_layers == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden_size": 24}, "hidden_size 24 of the draft head differs from 48 of the model"),
        ({"num_key_value_heads": 4}, "num_kv_heads 4 of the draft head differs from 2 of the model"),
        ({"num_hidden_layers": 2}, "a draft head of one dense layer is expected"),
    ],
)
def test_a_head_of_another_model(written: dict[str, Headed], tmp_path: Path, change: Any, text: str) -> None:
    assert text in error_of(edited(written, "eagle", tmp_path, config=lambda config: config.update(change)), "eagle")


def test_a_bias_of_the_projection_is_taken(written: dict[str, Headed], tmp_path: Path) -> None:
    folder = edited(written, "eagle", tmp_path, lambda t: t.update({"fc.bias": torch.ones(48)}))
    assert load(folder, "eagle")[1].tensors["eh_proj.bias"].shape == (48,)


def test_no_folder_and_no_use_for_one(written: dict[str, Headed]) -> None:
    folder = str(written["eagle"].folder)
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        Engine(EngineConfig(folder, speculation="head", draft_model="/nowhere"))
    with pytest.raises(ValueError, match="draft_model needs speculation head, got ngram"):
        Engine(EngineConfig(folder, draft_model=folder))
