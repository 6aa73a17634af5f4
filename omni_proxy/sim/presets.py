"""Engine models by name: orders of magnitude from public figures; fit your own for more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import yaml

from omni_proxy.config import ConfigError
from omni_proxy.sim.engine_model import EngineModel

PRESETS: Final[Mapping[str, EngineModel]] = {
    "h200-deepseek-r1": EngineModel(
        about=(
            "One node of 8 x H200 with DeepSeek-R1 in FP8 and data-parallel attention. Prefill: 74 GFLOP a token and "
            "5 MFLOP a (query, key) pair, at 2.2 and 3.2 PFLOP/s of the node's 15.8. Decode: 15 ms for one sequence, "
            "about 30 ms for 64. KV: 61 layers of 576 two-byte values (MLA); what 1,128 GB leave beside 671 GB of "
            "weights. Network: 8 x 400 Gbit/s at a quarter of the line rate."
        ),
        step_s=0.008,
        token_s=33e-6,
        pair_s=1.6e-9,
        decode_s=0.007,
        seq_s=0.23e-3,
        kv_s=5e-9,
        max_batch_tokens=16_384,
        max_prefill_seqs=32,
        max_decode_seqs=256,
        kv_capacity_tokens=4_000_000,
        max_model_len=163_840,
        kv_bytes_per_token=70_272,
        link_bytes_per_s=100e9,
        link_s=0.004,
        request_s=0.002,
        first_token_s=0.001,
    ),
    "910c": EngineModel(
        about=(
            "8 x Ascend 910C (16 dies) with DeepSeek-R1 in INT8 and expert parallelism. From the published serving "
            "figures of CloudMatrix384: 6,688 prompt tokens/s a chip; decode 49.4 ms a token at 96 sequences a chip "
            "and 14.9 ms at 8, about 4,000 tokens of context each. KV as for h200-deepseek-r1."
        ),
        step_s=0.006,
        token_s=17e-6,
        pair_s=1.1e-9,
        decode_s=0.006,
        seq_s=30e-6,
        kv_s=4.6e-9,
        max_batch_tokens=32_768,
        max_prefill_seqs=64,
        max_decode_seqs=768,
        kv_capacity_tokens=3_000_000,
        max_model_len=131_072,
        kv_bytes_per_token=70_272,
        link_bytes_per_s=80e9,
        link_s=0.004,
        request_s=0.003,
        first_token_s=0.001,
    ),
    "demo": EngineModel(
        about=(
            "The embedded worker with the demo model on one core of a small machine: an order of magnitude. "
            "`omni-proxy fit --url` measures the one at hand."
        ),
        step_s=0.0015,
        token_s=90e-6,
        pair_s=12e-9,
        decode_s=0.0035,
        seq_s=0.4e-3,
        kv_s=0.3e-6,
        max_batch_tokens=2_048,
        max_prefill_seqs=32,
        max_decode_seqs=32,
        kv_capacity_tokens=65_536,
        max_model_len=4_096,
        kv_bytes_per_token=4_096,
        link_bytes_per_s=200e6,
        link_s=0.004,
        request_s=0.003,
        first_token_s=0.0005,
    ),
}


def preset(name: str) -> EngineModel:
    """The engine model of that name. Raises ConfigError."""
    model = PRESETS.get(name)
    if model is None:
        raise ConfigError(f"there is no preset {name!r}; known are {', '.join(PRESETS)}")
    return model


def chosen_model(name: str, path: Path | None) -> EngineModel:
    """The model in a YAML file where one is given, else the preset. Raises ConfigError."""
    if path is None:
        return preset(name)
    try:
        return msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), EngineModel)
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror or exc}") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: is not YAML") from exc
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{path}: {exc}") from exc
