"""Parts of an engine that its config asks for or leaves out. Starts nothing that the parts do not start themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from omni_proxy.workers.engine.checkpoint import Checkpoint
from omni_proxy.workers.engine.draft_checkpoint import HeadCheckpoint
from omni_proxy.workers.engine.expert_parallel.leader import ExpertOptions, ExpertParallel
from omni_proxy.workers.engine.kv_events import KvEventPublisher
from omni_proxy.workers.engine.model import Experts
from omni_proxy.workers.engine.runner import Runner
from omni_proxy.workers.engine.types import EngineConfig, EngineInfo

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def runner_of(
    config: EngineConfig, loaded: tuple[Checkpoint, HeadCheckpoint | None], sizes: EngineInfo, experts: Experts | None
) -> Runner:
    """Model and cache, with the matrices turned into what the config asks for."""
    checkpoint, head = loaded
    dtype = None if config.quantization is None else torch.int8
    row_bits = 8 if config.quantization == "w8a8" else 0
    limits = sizes.num_blocks, sizes.block_size, sizes.max_model_len
    return Runner(checkpoint, *limits, experts, dtype, head, row_bits)


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
