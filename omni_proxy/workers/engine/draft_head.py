"""A draft head as a function: hidden states and the tokens after them -> states that guess one token further.

`x_i = W [norm(e(t_{i+1})); norm(h_i)]`, a decoder layer over all `x` up to `i`, a norm: `h'_i`, of which the model's
own output matrix makes the logits of `t_{i+2}` (DeepSeek-V3 technical report, section 2.2). `h'_i` stands for
`h_{i+1}` when guesses go on; both are states behind a last norm. EAGLE's heads have none of these norms. `x_i` has
place `i` of its sequence in the cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import omni_kernels as ops
from omni_proxy.workers.engine.attention import Places, Rows, attention
from omni_proxy.workers.engine.checkpoint import Checkpoint
from omni_proxy.workers.engine.draft_checkpoint import HeadCheckpoint
from omni_proxy.workers.engine.layer_weights import layer_weights
from omni_proxy.workers.engine.mlp import DenseMlp, SparseMlp

_INPUT_NORM = "input_layernorm.weight"


class DraftHead:
    """The head of one model, op by op; experts, if it has any, are its own process's."""

    def __init__(
        self,
        checkpoint: HeadCheckpoint,
        model: Checkpoint,
        output: ops.PackedMatrix | None,
        max_model_len: int,
        weight_dtype: torch.dtype | None = None,
    ) -> None:
        """`output` is the packed output matrix of `model`, if there is one."""
        config, tensors = checkpoint.config, checkpoint.tensors
        self._config = config
        self._embedding = model.tensors["model.embed_tokens.weight"]
        self._output = output or ops.pack(_output(model), weight_dtype)
        self.dtype = self._embedding.dtype
        self._input_norm = tensors.get(_INPUT_NORM)
        self._norms = tensors.get("enorm.weight"), tensors.get("hnorm.weight")
        self._last_norm = tensors.get("shared_head.norm.weight")
        self._project = ops.pack(_embedding_first(config.draft_hidden_first, tensors["eh_proj.weight"]), weight_dtype)
        self._bias = tensors.get("eh_proj.bias")
        self._cos, self._sin = ops.rope_table(
            config.rotary_dim, max_model_len, config.rope_theta, self.dtype, config.rope_scaling
        )
        weights = layer_weights(config, _as_layer(checkpoint), config.num_layers, with_experts=True)
        self._attention = attention(config, weights.attention, weight_dtype)
        self._mlp_norm = weights.mlp_norm
        counts = torch.zeros(config.num_experts, dtype=torch.int64)  # the load of experts is told of the model's alone
        self._mlp = (
            DenseMlp(weights.mlp.w13, weights.mlp.w2, weight_dtype)
            if weights.mlp.gate is None
            else SparseMlp(config, config.num_layers, weights.mlp, counts, None, weight_dtype)
        )

    def places(self, positions: Tensor, slots: Tensor) -> Places:
        """Where rows at `positions` are that go to `slots`."""
        return Places(self._cos.index_select(0, positions), self._sin.index_select(0, positions), slots)

    def write(self, hidden: Tensor, tokens: Tensor, kv: Tensor, places: Places) -> None:
        """Put rows into the head's part of the cache; of one layer nothing else is read later."""
        x = self._joined(hidden, tokens)
        self._attention.write(x if self._input_norm is None else self._normed(x, self._input_norm), kv, places)

    def __call__(self, hidden: Tensor, tokens: Tensor, kv: Tensor, rows: Rows) -> Tensor:
        """Write rows and compute them: states [T, H] for `logits` and, as `hidden`, for the next guess."""
        eps = self._config.rms_norm_eps
        x = self._joined(hidden, tokens)
        seen = self._attention(x if self._input_norm is None else self._normed(x, self._input_norm), kv, rows)
        normed, residual = ops.rms_norm(seen, self._mlp_norm, eps, x)
        y = self._mlp(normed)
        return y + residual if self._last_norm is None else ops.rms_norm(y, self._last_norm, eps, residual)[0]

    def logits(self, states: Tensor) -> Tensor:
        return ops.linear(states, self._output)

    def _joined(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        parts = F.embedding(tokens, self._embedding), hidden.to(self.dtype)
        both = [x if norm is None else self._normed(x, norm) for x, norm in zip(parts, self._norms, strict=True)]
        x = ops.linear(torch.cat(both, 1), self._project)
        return x if self._bias is None else x + self._bias

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return ops.rms_norm(x, weight, self._config.rms_norm_eps)[0]


def _embedding_first(hidden_first: bool, projection: Tensor) -> Tensor:
    """[H, 2H] with the columns of the embedding before those of the hidden state."""
    return torch.cat(projection.chunk(2, 1)[::-1], 1) if hidden_first else projection


def _output(model: Checkpoint) -> Tensor:
    tied = model.config.tie_word_embeddings
    return model.tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]


def _as_layer(checkpoint: HeadCheckpoint) -> dict[str, Tensor]:
    """Under the names of the layer behind the last; a norm that the format lacks is one that nobody applies."""
    hidden = checkpoint.tensors["eh_proj.weight"].shape[0]
    tensors = {_INPUT_NORM: torch.ones(hidden), **checkpoint.tensors}
    return {f"model.layers.{checkpoint.config.num_layers}.{name}": tensor for name, tensor in tensors.items()}
