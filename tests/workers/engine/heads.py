"""Tiny checkpoints with draft heads, and the heads written out: transformers has the layers, not the heads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.workers.engine.architectures import CONFIGS, write

KINDS: Final = ("mtp", "mimo", "eagle")
_BASE: Final[dict[str, dict[str, Any]]] = {
    "mtp": {**CONFIGS["deepseek_v3"], "num_nextn_predict_layers": 1},
    "mimo": {"model_type": "qwen2", "num_nextn_predict_layers": 1},
    "eagle": {"model_type": "llama", "head_dim": 12},
}
_NAMES: Final[dict[str, dict[str, str]]] = {
    "mtp": {
        "embedding": "model.layers.3.enorm.weight",
        "hidden": "model.layers.3.hnorm.weight",
        "project": "model.layers.3.eh_proj.weight",
        "last": "model.layers.3.shared_head.norm.weight",
        "layer": "model.layers.3.",
    },
    "mimo": {
        "embedding": "model.mtp_layers.0.token_layernorm.weight",
        "hidden": "model.mtp_layers.0.hidden_layernorm.weight",
        "project": "model.mtp_layers.0.input_proj.weight",
        "last": "model.mtp_layers.0.final_layernorm.weight",
        "layer": "model.mtp_layers.0.",
    },
    "eagle": {"project": "fc.weight", "layer": "layers.0."},
}


@dataclass(frozen=True)
class Headed:
    """A model with a head: its folders, and the definition of both."""

    folder: Path
    draft_folder: Path | None
    model: PreTrainedModel
    layer: nn.Module
    project: Tensor
    norms: tuple[Tensor | None, Tensor | None, Tensor | None]
    """Of the embedding, of the hidden state, and the last."""
    hidden_first: bool

    @property
    def options(self) -> dict[str, Any]:
        """What an engine is told to use the head."""
        return {"speculation": "head", "draft_model": None if self.draft_folder is None else str(self.draft_folder)}

    @torch.no_grad()
    def states(self, hidden: Tensor, tokens: Sequence[int]) -> Tensor:
        """States [n, H] of rows with these hidden states and next tokens, from the first of a sequence on."""
        backbone: Any = self.model.model
        before, behind, last = self.norms
        parts = [_norm(backbone.embed_tokens(torch.tensor(tokens)), before), _norm(hidden, behind)]
        x = (torch.cat(parts[::-1] if self.hidden_first else parts, 1) @ self.project.t()).unsqueeze(0)
        places = torch.arange(len(tokens)).unsqueeze(0)
        mask = torch.full((1, 1, len(tokens), len(tokens)), -torch.inf).triu(1)
        turned = backbone.rotary_emb(x, places)
        y = self.layer(x, attention_mask=mask, position_ids=places, position_embeddings=turned)
        return _norm(y[0] if y.dim() == 3 else y[0][0], last)

    @torch.no_grad()
    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """The model's states [n, H] behind its last norm."""
        backbone: Any = self.model.model
        found: Tensor = backbone(torch.tensor([list(tokens)])).last_hidden_state[0]
        return found

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """[n - 1, vocab]: row i is of token i + 2."""
        output: Any = self.model.lm_head
        found: Tensor = output(self.states(self.hidden(tokens)[:-1], tokens[1:]))
        return found

    @torch.no_grad()
    def guesses(self, tokens: Sequence[int], count: int) -> list[tuple[int, float]]:
        """What follows: each best token, and by how much it leads."""
        hidden, said = self.hidden(tokens)[:-1], list(tokens[1:])
        found = []
        for _ in range(count):
            state = self.states(hidden, said)[-1:]
            output: Any = self.model.lm_head
            best = output(state)[0].topk(2)
            found.append((int(best.indices[0]), float(best.values[0] - best.values[1])))
            hidden, said = torch.cat((hidden, state)), [*said, found[-1][0]]
        return found


def _norm(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def write_headed(folder: Path, kind: str, copy: float | None = None, **changes: Any) -> Headed:
    """A random model and head. `copy`: both look at the last token alone and agree, but for layers so much as large."""
    config = {"num_hidden_layers": 2, **_BASE[kind], "rms_norm_eps": 1e-6, **changes}
    layers = config["num_hidden_layers"]
    model = write(folder, {**config, "num_hidden_layers": layers + 1})  # the last one is the head's
    hidden, generator = model.config.hidden_size, torch.Generator().manual_seed(5)
    norms = {name: torch.rand(hidden, generator=generator) + 0.5 for name in ("embedding", "hidden", "last")}
    project = torch.randn(hidden, 2 * hidden, generator=generator) * 0.2
    if copy is not None:
        project = _agree(model, norms, copy, kind == "mimo")
        model.save_pretrained(folder)
    names = _NAMES[kind]
    norms = {name: norm for name, norm in norms.items() if name in names}
    added = {names["project"]: project, **{names[name]: norm for name, norm in norms.items()}}
    draft_folder = _divide(folder, kind, layers, added)
    layer = _behead(model, layers, kind)
    three = norms.get("embedding"), norms.get("hidden"), norms.get("last")
    return Headed(folder, draft_folder, model, layer, project, three, kind == "mimo")


def _agree(model: PreTrainedModel, norms: dict[str, Tensor], size: float, flip: bool) -> Tensor:
    """Shrink what layers add, and hand the embedding on: the head then says what the model says."""
    backbone: Any = model.model
    with torch.no_grad():
        for name, value in backbone.layers.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                value.mul_(size)
        norms["embedding"].fill_(1.0)
        norms["last"].fill_(1.0)
        backbone.norm.weight.fill_(1.0)  # EAGLE's states have no norm behind them: only their direction agrees
    eye, nothing = torch.eye(model.config.hidden_size), torch.zeros(model.config.hidden_size, model.config.hidden_size)
    return torch.cat((nothing, eye) if flip else (eye, nothing), 1)


def _divide(folder: Path, kind: str, layers: int, added: dict[str, Tensor]) -> Path | None:
    """Write the last layer as the head's; the folder of the head if it has its own."""
    file, last = folder / "model.safetensors", f"model.layers.{layers}."
    tensors = load_file(file)
    said = json.loads((folder / "config.json").read_text())
    head = {
        _NAMES[kind]["layer"] + name.removeprefix(last): tensors.pop(name) for name in list(tensors) if last in name
    }
    head |= added
    said["num_hidden_layers"] = layers
    said.pop("layer_types", None)
    if kind == "mimo":
        said["model_type"] = "mimo"
    if kind == "eagle":
        beside = folder / "head"
        beside.mkdir()
        del head["layers.0.input_layernorm.weight"]
        save_file(head, beside / "model.safetensors")
        (beside / "config.json").write_text(json.dumps({**said, "num_hidden_layers": 1}))
        head = {}
    save_file({**tensors, **head}, file)
    (folder / "config.json").write_text(json.dumps(said))
    return folder / "head" if kind == "eagle" else None


def _behead(model: PreTrainedModel, layers: int, kind: str) -> nn.Module:
    """Take the last layer off a model."""
    backbone: Any = model.model
    layer: nn.Module = backbone.layers[layers]
    backbone.layers = backbone.layers[:layers]
    model.config.num_hidden_layers = backbone.config.num_hidden_layers = layers
    if kind == "eagle":
        layer.input_layernorm = nn.Identity()
    return layer
