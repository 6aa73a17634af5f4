"""Checkpoints in float8 with scales for blocks, as DeepSeek-V3's are: read as what they stand for, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from omni_proxy.workers.engine.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from tests.workers.engine.architectures import CONFIGS, write

BLOCK: Final = (16, 12)
"""Neither divides all widths of the model: the last blocks are cut off."""
SCALED: Final = ("_proj.weight", "_a_proj_with_mqa.weight")
NAME: Final = "model.layers.1.mlp.experts.3.down_proj.weight"


def quantised(w: Tensor) -> tuple[Tensor, Tensor]:
    """float8 values and scales, block after block."""
    n, k = w.shape
    scale = torch.empty(-(-n // BLOCK[0]), -(-k // BLOCK[1]))
    stored = torch.empty(n, k, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1])
            scale[i, j] = w[at].abs().max() / 448
            stored[at] = (w[at] / scale[i, j]).to(torch.float8_e4m3fn)
    return stored, scale


def multiplied_out(stored: Tensor, scale: Tensor) -> Tensor:
    """By hand: element after element's own block."""
    rows, columns = torch.arange(stored.shape[0]) // BLOCK[0], torch.arange(stored.shape[1]) // BLOCK[1]
    return stored.float() * scale[rows][:, columns]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder in float8, and one of the same values in float32."""
    plain = tmp_path_factory.mktemp("float8") / "plain"
    write(plain, CONFIGS["deepseek_v3"])
    scaled = Path(copytree(plain, plain.with_name("scaled")))
    tensors = load_file(plain / "model.safetensors")
    stored, values = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(SCALED)]:
        stored[name], stored[name + "_scale_inv"] = quantised(tensors[name])
        values[name] = multiplied_out(stored[name], stored[name + "_scale_inv"])
    assert sum(t.dtype == torch.float8_e4m3fn for t in stored.values()) > 60
    save_file(stored, scaled / "model.safetensors")
    save_file(values, plain / "model.safetensors")
    said = json.loads((scaled / "config.json").read_text())
    said["quantization_config"] = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": list(BLOCK),
    }  # fmt: skip
    (scaled / "config.json").write_text(json.dumps(said))
    return scaled, plain


@pytest.fixture
def folder(written: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(copytree(written[0], tmp_path / "model"))


def same(a: Checkpoint, b: Checkpoint) -> bool:
    return a.tensors.keys() == b.tensors.keys() and all(t.equal(b.tensors[name]) for name, t in a.tensors.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_read_as_what_it_stands_for(written: tuple[Path, Path], dtype: torch.dtype) -> None:
    scaled, plain = written
    got = load_checkpoint(scaled, dtype)
    assert same(got, load_checkpoint(plain, dtype))
    assert got.tensors[NAME].dtype == dtype
    assert not any(name.endswith("_scale_inv") for name in got.tensors)


def test_scales_in_another_file_are_found(folder: Path, written: tuple[Path, Path]) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {name: f"{'b' if name.endswith('_scale_inv') else 'a'}.safetensors" for name in tensors}
    for file in ("a.safetensors", "b.safetensors"):
        save_file({name: tensors[name] for name in tensors if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert same(load_checkpoint(folder), load_checkpoint(written[1]))


SCALE: Final = NAME + "_scale_inv"
FAULTS: Final[dict[str, tuple[Callable[[dict[str, Any]], object], str]]] = {
    "missing": (lambda t: t.pop(SCALE), f"tensor {NAME} is float8, and {SCALE} is missing"),
    "shape": (
        lambda t: t.update({SCALE: torch.ones(3, 3)}),
        f"tensor {SCALE} is torch.float32 [3, 3], floats [3, 2] are expected",
    ),
    "rank": (
        lambda t: t.update({SCALE: torch.ones(3)}),
        f"tensor {SCALE} is torch.float32 [3], floats [3, 2] are expected",
    ),
    "dtype": (
        lambda t: t.update({SCALE: torch.ones(3, 2, dtype=torch.int32)}),
        f"tensor {SCALE} is torch.int32 [3, 2], floats [3, 2] are expected",
    ),
    "not float8": (
        lambda t: t.update({NAME: t[NAME].float()}),
        f"tensor {NAME} has scales, but its type is torch.float32, not float8",
    ),
    "of nothing": (
        lambda t: t.update({"model.nothing.weight_scale_inv": torch.ones(1, 1)}),
        "tensor model.nothing.weight_scale_inv is not expected",
    ),
}


def error_of(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_scales_are_named(folder: Path, fault: str) -> None:
    edit, text = FAULTS[fault]
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)
    assert error_of(folder) == f"{file}: {text}"


def test_float8_that_the_config_does_not_speak_of_is_refused(folder: Path) -> None:
    path = folder / "config.json"
    said = json.loads(path.read_text())
    del said["quantization_config"]
    path.write_text(json.dumps(said))
    assert error_of(folder).endswith("is float8, and config.json has no quantization_config")
