"""What a pretending worker is told at its start. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from omni_proxy.sim.engine_model import EngineModel


@dataclass(frozen=True, slots=True)
class PretendOptions:
    """Seconds are simulated ones, except where they say otherwise."""

    model: EngineModel
    preset: str
    role: str = "mixed"
    host: str = "127.0.0.1"
    port: int = 0
    served_model_name: tuple[str, ...] = ("simulated",)
    block_size: int = 64
    speed: float = 1.0
    """Simulated seconds in a real one."""
    output_tokens: int = 128
    """Tokens of an answer whose request sets no limit."""
    kv_lease_s: float = 30.0
    kv_events_port: int | None = None
    """ZeroMQ port of KV events; None publishes none."""
    bootstrap_port: int | None = None
    """SGLang's bootstrap port of a prefill worker; None listens on none."""
    scale_out: bool = False
    """It tells the token ids of prompts, as vLLM does with `--enable-scale-out`."""
    drain_s: float = 5.0
    """Real seconds."""
    ready_fd: int | None = None
    parent_fd: int | None = None
    log_level: str = "warning"

    @property
    def max_seqs(self) -> int:
        return self.model.max_prefill_seqs if self.role == "prefill" else self.model.max_decode_seqs
