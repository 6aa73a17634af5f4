"""What one worker is told at its start. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from omni_proxy.workers.engine.types import DEFAULT_LEASE_S, EngineConfig


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
    threads: int = 1
    side_channel_port: int = 0
    ready_fd: int | None = None
    """Gets one JSON line (host, port, side_channel_port, pid) when the worker serves, and is closed."""
    parent_fd: int | None = None
    """Read end of a pipe that the launcher holds open for as long as it lives."""
    log_level: str = "warning"
    drain_s: float = 5.0

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
            kv_lease_s=self.kv_lease_s,
            kv_load_failure_policy=self.kv_load_failure_policy,
            dtype=self.dtype,
            threads=self.threads,
        )
