"""Memory and time of one instance: what a layout costs on a chip, by the roofline of each part of a layer.

A rank's step is, layer by layer, attention (weights and cache read, products), experts (those that are hit read,
products) and exchange (tokens to their experts and back), which hides behind the rest in part. The shares of nominal
speed below are the only fitted numbers: chosen once so that published runs (tests/kernels/test_layout.py) come out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from omni_kernels.layout.chips import Chip
from omni_kernels.layout.sizes import ModelSizes

READ_SHARE: Final = 0.7
"""Of nominal memory bandwidth."""
FLOP_SHARE: Final = 0.5
"""Of nominal products per second, large products."""
LINK_SHARE: Final = 0.8
HIDDEN_SHARE: Final = 0.5
"""Of the shorter of compute and exchange that runs beside the longer (two half batches in turn)."""
LAYER_S: Final = 25e-6
"""A layer's launches and norms on an accelerator; a tenth of it on a CPU."""
IMBALANCE: Final = 1.15
"""Load of the fullest rank over the mean, with redundant experts placed by load."""
USABLE: Final = 0.92
"""Of a rank's memory."""
DISPATCH_BYTES: Final = 1.0
COMBINE_BYTES: Final = 2.0
"""A value on its way to the experts (8 bits) and back (16 bits)."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is to be served."""

    prompt_tokens: int = 4096
    output_tokens: int = 1024
    cached_share: float = 0.0
    """Of prompt tokens, found in the prefix cache."""
    tpot_s: float = 0.05
    ttft_s: float = 2.0
    """Limits; of TTFT the prefill step itself, without waiting."""

    @property
    def computed_tokens(self) -> float:
        """Prompt tokens a request that prefill must compute."""
        return max(1.0, self.prompt_tokens * (1.0 - self.cached_share))

    @property
    def mean_context(self) -> float:
        """Tokens a sequence holds while it decodes, on average."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class Layout:
    """One instance: `ranks` processes, attention split over `tp` of them, `ranks / tp` attention groups beside."""

    ranks: int
    tp: int
    slots: int
    """Routed experts of a layer on a rank; 0 for a dense model."""

    @property
    def dp(self) -> int:
        """Attention groups, each with sequences of its own."""
        return self.ranks // self.tp

    def redundant(self, model: ModelSizes) -> int:
        """Copies of experts beyond one of each."""
        return self.slots * self.ranks - model.experts if model.experts else 0


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a layout does in one role at its best batch."""

    layout: Layout
    batch: int
    """Sequences (decode) or tokens (prefill) of an attention group in a step."""
    step_s: float
    tokens_s: float
    """Of the whole instance: computed prompt tokens, or output tokens."""
    weight_bytes: float
    kv_bytes: float
    """On a rank; the cache of the batch."""

    @property
    def per_rank(self) -> float:
        """Tokens per second of one rank."""
        return self.tokens_s / self.layout.ranks


def slots_for(model: ModelSizes, ranks: int, spare: float = 0.125) -> int:
    """Experts a rank: all experts and, over several ranks, at least `spare` of them again as copies.

    With an eighth DeepSeek's own numbers follow: 9 at EP32, 2 at EP144, 1 at EP288.
    """
    if not model.experts:
        return 0
    return model.experts if ranks == 1 else -(-round(model.experts * (1.0 + spare)) // ranks)


def weight_bytes(model: ModelSizes, layout: Layout) -> float:
    """Weights on one rank."""
    dense = model.layers * model.attention + model.dense_layers * model.dense + model.vocabulary
    sparse = model.moe_layers * (model.expert * layout.slots + model.shared / layout.tp)
    return (dense / layout.tp + sparse) * model.weight_bytes


def decode_step(model: ModelSizes, chip: Chip, layout: Layout, batch: int, context: float) -> float:
    """Seconds of one token for `batch` sequences of `context` tokens in each attention group."""
    keys = batch * context
    attention = _attention_s(model, chip, layout, batch, keys * model.kv_bytes(layout.tp), _latent_flop(model) * keys)
    return _step(model, chip, layout, attention, batch)


def prefill_step(model: ModelSizes, chip: Chip, layout: Layout, tokens: int, prompt: float) -> float:
    """Seconds for `tokens` new tokens in each attention group, of prompts of `prompt` tokens."""
    pairs = 2.0 * model.heads * (model.query_dim + model.value_dim) * tokens * prompt / 2
    attention = _attention_s(model, chip, layout, tokens, 0.0, pairs)
    return _step(model, chip, layout, attention, tokens)


def _latent_flop(model: ModelSizes) -> float:
    """Of one query row against one key, all heads: in MLA's latent space, or by head."""
    if model.latent:
        return 2.0 * model.heads * (2 * model.latent - (model.query_dim - model.value_dim))
    return 2.0 * model.heads * (model.query_dim + model.value_dim)


def _roofline(chip: Chip, read: float, flop16: float, flop8: float = 0.0) -> float:
    compute = flop16 / (chip.flop_s * FLOP_SHARE) + flop8 / (chip.flop8_s * FLOP_SHARE)
    return max(read / (chip.read_bytes_s * READ_SHARE), compute)


def _products(model: ModelSizes, chip: Chip, parameters: float, rows: float) -> float:
    """Weights read once and multiplied with `rows` rows, in the chip's 8-bit unit where the weights allow."""
    flop = 2.0 * parameters * rows
    wide = model.weight_type not in ("fp8", "int8")
    return _roofline(chip, parameters * model.weight_bytes, flop if wide else 0.0, 0.0 if wide else flop)


def _attention_s(model: ModelSizes, chip: Chip, layout: Layout, rows: float, read: float, flop: float) -> float:
    """A layer's attention on one rank: projections, then the rows against their keys."""
    seconds = _products(model, chip, model.attention / layout.tp, rows)
    seconds += _roofline(chip, read, flop / layout.tp)
    return seconds + _reduce_s(model, chip, layout, rows)


def _reduce_s(model: ModelSizes, chip: Chip, layout: Layout, rows: float) -> float:
    """Summing the hidden rows over the ranks of an attention group."""
    if layout.tp == 1:
        return 0.0
    near = chip.node_bytes_s if layout.tp <= chip.node_ranks else chip.far_bytes_s
    moved = 2.0 * rows * model.hidden * 2.0 * (layout.tp - 1) / layout.tp
    return moved / (near * LINK_SHARE) + chip.exchange_s / 4


def _step(model: ModelSizes, chip: Chip, layout: Layout, attention: float, rows: float) -> float:
    overhead = LAYER_S if chip.kind != "cpu" else LAYER_S / 10
    dense = _products(model, chip, model.dense / layout.tp, rows) + _reduce_s(model, chip, layout, rows)
    experts, exchange = _experts_s(model, chip, layout, rows), _exchange_s(model, chip, layout, rows)
    compute = attention + experts
    sparse = compute + exchange - HIDDEN_SHARE * min(compute, exchange)
    head = _products(model, chip, model.vocabulary / 2 / layout.tp, min(rows, 512))
    every = model.layers * overhead + model.dense_layers * (attention + dense)
    return every + model.moe_layers * sparse + head


def _experts_s(model: ModelSizes, chip: Chip, layout: Layout, rows: float) -> float:
    """A layer's routed experts on the fullest rank, and what every token passes beside them."""
    if not model.experts:
        return 0.0
    shared = _products(model, chip, model.shared / layout.tp, rows)
    choices = rows * layout.dp * model.top_k / layout.ranks * IMBALANCE
    hit = layout.slots * (1.0 - (1.0 - 1.0 / layout.slots) ** choices) if layout.slots > 1 else min(choices, 1.0)
    return shared + max(_products(model, chip, model.expert * hit, 0), _products(model, chip, model.expert, choices))


def _exchange_s(model: ModelSizes, chip: Chip, layout: Layout, rows: float) -> float:
    """Sending rows to their experts and the results back; inside a node and between nodes go at the same time."""
    if layout.ranks == 1 or not model.experts:
        return 0.0
    mine, row = rows / layout.tp, model.hidden * (DISPATCH_BYTES + COMBINE_BYTES)
    nodes = -(-layout.ranks // chip.node_ranks)
    copies = model.top_k * (layout.ranks - 1) / layout.ranks
    # A large batch sends a row once to each node, where it is passed on; a small one directly to its experts.
    far = min(model.sends, nodes) if rows > 1024 else model.top_k
    far_s = mine * far * (nodes - 1) / nodes * row / (chip.far_bytes_s * LINK_SHARE)
    near_s = mine * copies / (1 if rows > 1024 else nodes) * row / (chip.node_bytes_s * LINK_SHARE)
    return max(far_s, near_s) + 2 * chip.exchange_s
