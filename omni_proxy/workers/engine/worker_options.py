"""What one worker is told at its start. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from omni_proxy.workers.engine.types import DEFAULT_LEASE_S, EngineConfig

_CHOICES: Final[Mapping[str, tuple[str | None, ...]]] = {
    "role": ("prefill", "decode", "mixed"),
    "speculation": ("ngram", "head", "off"),
    "kv_load_failure_policy": ("fail", "recompute"),
    "dtype": ("float32", "bfloat16"),
    "quantization": (None, "int8", "w8a8"),
    "log_level": ("debug", "info", "warning", "error", "critical"),
}


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What one worker is told at its start. Sizes as in `EngineConfig`, times in seconds."""

    model: str
    role: str = "mixed"
    host: str = "127.0.0.1"
    port: int = 0
    """0 lets the system choose."""
    served_model_name: tuple[str, ...] = ()
    """Names that requests may use; the folder's name if there are none."""
    block_size: int = 16
    kv_cache_bytes: int = 256 << 20
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    kv_lease_s: float = DEFAULT_LEASE_S
    kv_load_failure_policy: str = "fail"
    dtype: str = "float32"
    quantization: str | None = None
    threads: int = 1
    speculation: str = "ngram"
    speculative_tokens: int = 8
    draft_model: str | None = None
    expert_parallel: int = 1
    expert_redundancy: int | None = None
    expert_window_steps: int = 256
    side_channel_port: int = 0
    kv_events_port: int | None = None
    """Port on which changes of the prefix cache are published; 0 lets the system choose; None publishes none."""
    ready_fd: int | None = None
    """Gets one JSON line (host, port, side_channel_port, pid) when the worker serves, and is closed."""
    parent_fd: int | None = None
    """Read end of a pipe that the launcher holds open for as long as it lives."""
    log_level: str = "warning"
    drain_s: float = 5.0
    register: tuple[str, ...] = ()
    """URLs of gateways at which the worker registers itself."""
    token_file: str | None = None
    """Holds the token for that."""
    advertise: str | None = None
    """The host by which gateways reach it; None: the one that it listens on."""
    name: str | None = None
    """By which gateways know it; None: made of its role, host and port."""

    def engine_config(self, engine_id: str) -> EngineConfig:
        """The engine's share of the options."""
        return EngineConfig(
            model=self.model,
            role=self.role,
            engine_id=engine_id,
            block_size=self.block_size,
            kv_cache_bytes=self.kv_cache_bytes,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            host=self.host,
            side_channel_port=self.side_channel_port,
            kv_events_port=self.kv_events_port,
            kv_lease_s=self.kv_lease_s,
            kv_load_failure_policy=self.kv_load_failure_policy,
            dtype=self.dtype,
            quantization=self.quantization,
            threads=self.threads,
            speculation=self.speculation,
            speculative_tokens=self.speculative_tokens,
            draft_model=self.draft_model,
            expert_parallel=self.expert_parallel,
            expert_redundancy=self.expert_redundancy,
            expert_window_steps=self.expert_window_steps,
        )

    def problem(self) -> str | None:
        """The first option that makes no worker, in words; None if all are fine. Sizes are the engine's to check."""
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                return f"{name} must be one of {', '.join(map(str, known))}; got {getattr(self, name)!r}"
        for name in ("port", "side_channel_port", "kv_events_port"):
            if not 0 <= (getattr(self, name) or 0) <= 65535:
                return f"{name} must be in 0..65535; got {getattr(self, name)}"
        if self.threads < 1:
            return f"threads must be at least 1; got {self.threads}"
        if not self.drain_s >= 0:
            return f"drain_s must be 0 or more; got {self.drain_s}"
        return None
