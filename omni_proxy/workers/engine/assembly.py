"""Parts of an engine that its config asks for or leaves out. Starts nothing that the parts do not start themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from omni_proxy.workers.engine.checkpoint import Checkpoint
from omni_proxy.workers.engine.expert_parallel.leader import ExpertOptions, ExpertParallel
from omni_proxy.workers.engine.kv_events import KvEventPublisher
from omni_proxy.workers.engine.types import EngineConfig

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def weight_dtype(config: EngineConfig) -> torch.dtype | None:
    """What the matrices are turned into at load; None leaves them as they are."""
    return None if config.quantization is None else torch.int8


def row_bits(config: EngineConfig) -> int:
    """Of the whole numbers that rows are made before products; 0 leaves that to the kernels."""
    return 8 if config.quantization == "w8a8" else 0


def expert_parallel(config: EngineConfig, checkpoint: Checkpoint, on_lost: Callable[[], None]) -> ExpertParallel | None:
    """The processes that share the experts, if there are any."""
    if config.expert_parallel == 1:
        return None
    options = ExpertOptions(
        config.expert_parallel, config.expert_redundancy, config.expert_window_steps, config.threads or 1
    )
    folder, dtype = Path(config.model), DTYPES[config.dtype]
    return ExpertParallel(folder, checkpoint.config, dtype, options, on_lost)


def publisher(config: EngineConfig) -> KvEventPublisher | None:
    """Who tells others of the prefix cache, if somebody does."""
    return None if config.kv_events_port is None else KvEventPublisher(config.host, config.kv_events_port)
