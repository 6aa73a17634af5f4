"""Stretched rotary frequencies: against transformers' where it has them, and by what each kind promises."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import omni_kernels as ops
from omni_kernels.rope_scaling import RopeScaling, frequencies

DIM, THETA, ORIGINAL = 32, 1e4, 64
SCALINGS = {
    "linear": RopeScaling("linear", 4.0),
    "dynamic": RopeScaling("dynamic", 2.0, ORIGINAL),
    "yarn": RopeScaling("yarn", 8.0, ORIGINAL, beta_fast=16, beta_slow=2),
    "yarn-mscale": RopeScaling("yarn", 40.0, ORIGINAL, mscale=0.7, mscale_all_dim=1.0, truncate=False),
    "yarn-factor": RopeScaling("yarn", 8.0, ORIGINAL, attention_factor=1.3),
    "llama3": RopeScaling("llama3", 8.0, ORIGINAL, low_freq_factor=1.0, high_freq_factor=4.0),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    how = SCALINGS[name]
    fields = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
    said = {field: getattr(how, field) for field in (*fields, "mscale", "mscale_all_dim", "truncate")}
    rope = {"rope_type": how.kind, "rope_theta": THETA, "original_max_position_embeddings": ORIGINAL, **said}
    config = LlamaConfig(head_dim=DIM, max_position_embeddings=ORIGINAL)
    config.rope_parameters = rope
    for length in (ORIGINAL, 3 * ORIGINAL):
        want, factor = ROPE_INIT_FUNCTIONS[how.kind](config, None, seq_len=length)
        got, scale = frequencies(DIM, THETA, length, how)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
        assert scale == pytest.approx(factor)


def test_dynamic_changes_nothing_within_the_trained_context() -> None:
    plain = ops.rope_table(DIM, ORIGINAL, THETA)
    for length, same in ((ORIGINAL, True), (ORIGINAL + 1, False)):
        table = ops.rope_table(DIM, length, THETA, scaling=SCALINGS["dynamic"])
        assert table[0][:ORIGINAL].equal(plain[0]) is same


def test_the_attention_factor_scales_the_table() -> None:
    cos, sin = ops.rope_table(DIM, 4, THETA, scaling=SCALINGS["yarn-factor"])
    torch.testing.assert_close(cos.square() + sin.square(), torch.full((4, DIM), 1.69))


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(ValueError, match=r"rope_table: scaling must be one of default, .*, got longrope"):
        ops.rope_table(DIM, 4, THETA, scaling=RopeScaling("longrope"))
