"""Frequencies of the rotary embedding, plain or stretched for contexts longer than the one trained on.

Each kind is a published formula, named as in Hugging Face's `rope_type`. Knows numbers only; tables and rotation are
`reference.rope_table` and `reference.rope`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

KINDS: Final = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How frequencies are stretched. `original` is the context in tokens that the model was trained on."""

    kind: str = "default"
    factor: float = 1.0
    original: int = 0
    low_freq_factor: float = 1.0
    """llama3: waves longer than original / this are stretched whole."""
    high_freq_factor: float = 4.0
    """llama3: waves shorter than original / this are left alone."""
    beta_fast: float = 32.0
    """yarn: turns within the original context from which a wave is left alone."""
    beta_slow: float = 1.0
    """yarn: turns below which a wave is stretched whole."""
    attention_factor: float | None = None
    """yarn: scale of cosines and sines; None derives it from `factor` and the two below."""
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    """yarn: round the ramp's ends to whole frequencies."""


def frequencies(dim: int, theta: float, length: int, scaling: RopeScaling | None = None) -> tuple[Tensor, float]:
    """Turns per token in radians [dim / 2] float32, and the factor of cosines and sines.

    `length` is the longest sequence: `dynamic` (NTK-aware) raises theta when that exceeds the original context. It
    must not change while keys are cached, so it is the engine's limit, not the sequence's own length.
    """
    how = scaling or RopeScaling()
    match how.kind:
        case "default":
            return _plain(dim, theta), 1.0
        case "linear":
            return _plain(dim, theta) / how.factor, 1.0
        case "dynamic":
            stretch = how.factor * max(length, how.original) / how.original - (how.factor - 1)
            return _plain(dim, theta * stretch ** (dim / (dim - 2))), 1.0
        case "yarn":
            return _yarn(dim, theta, how), _yarn_factor(how)
        case "llama3":
            return _llama3(_plain(dim, theta), how), 1.0
        case _:
            raise ValueError(f"rope_table: scaling must be one of {', '.join(KINDS)}, got {how.kind}")


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Growth of attention logits with the stretch of the context (Peng et al. 2023, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _plain(dim: int, theta: float) -> Tensor:
    exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return 1.0 / theta**exponent


def _yarn(dim: int, theta: float, how: RopeScaling) -> Tensor:
    """A ramp between stretched (slow waves) and unchanged (fast ones), by turns within the original context."""
    plain = _plain(dim, theta)
    low, high = (_place(turns, dim, theta, how.original) for turns in (how.beta_fast, how.beta_slow))
    if how.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / how.factor * stretched + plain * (1 - stretched)


def _place(turns: float, dim: int, theta: float, original: int) -> float:
    """Index of the frequency that turns so often within the original context."""
    return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))


def _yarn_factor(how: RopeScaling) -> float:
    if how.attention_factor is not None:
        return how.attention_factor
    if how.mscale and how.mscale_all_dim:
        return yarn_mscale(how.factor, how.mscale) / yarn_mscale(how.factor, how.mscale_all_dim)
    return yarn_mscale(how.factor)


def _llama3(plain: Tensor, how: RopeScaling) -> Tensor:
    """Slow waves stretched, fast ones not, those between by how often they turn within the original context."""
    turns = how.original * plain / (2 * math.pi)
    smooth = ((turns - how.low_freq_factor) / (how.high_freq_factor - how.low_freq_factor)).clamp(0, 1)
    return (1 - smooth) * plain / how.factor + smooth * plain
