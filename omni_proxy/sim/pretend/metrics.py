"""A pretending worker's Prometheus metrics, under vLLM's names."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from omni_proxy.sim.engine import Engine
from omni_proxy.workers.engine.server_metrics import EngineCollector
from omni_proxy.workers.engine.types import EngineStats

_LABELS: Final = ("model_name", "engine")
_TTFT: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_E2E: Final = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class PretendMetrics:
    """Gauges and counters are read from the engine at scrape time; latencies are in simulated seconds."""

    def __init__(self, engine: Engine, model_name: str, kv_bytes_per_token: float) -> None:
        self._engine = engine
        self._kv_bytes = kv_bytes_per_token
        self.leases_expired = 0
        self.transfer_failures = 0
        self.transfers = 0
        self.held = 0
        """Jobs whose KV waits for a pull."""
        registry = self._registry = CollectorRegistry()
        registry.register(EngineCollector(self._stats, model_name))
        labels = (model_name, "0")
        ended = Counter("vllm:request_success", "Requests ended", (*_LABELS, "finished_reason"), registry=registry)
        self._ended = {reason: ended.labels(*labels, reason) for reason in ("stop", "length", "abort", "error")}
        ttft, e2e = "vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"
        self.ttft = Histogram(ttft, "Arrival to first token", _LABELS, registry=registry, buckets=_TTFT).labels(*labels)
        self.e2e = Histogram(e2e, "Arrival to end", _LABELS, registry=registry, buckets=_E2E).labels(*labels)

    def ended(self, reason: str) -> None:
        """Count the end of a request."""
        self._ended[reason].inc()

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)

    def _stats(self) -> EngineStats:
        engine, done = self._engine, self._engine.counters
        block = engine.cache.block_tokens
        return EngineStats(
            running=engine.running,
            waiting=engine.waiting,
            blocks_total=engine.model.kv_capacity_tokens // block,
            blocks_used=-(-engine.cache.used_tokens // block),
            blocks_leased=self.held,
            block_size=block,
            block_bytes=round(block * self._kv_bytes),
            prompt_tokens_computed=done.prefill_tokens,
            prompt_tokens_cached=done.cached_tokens,
            prompt_tokens_pulled=done.pulled_tokens,
            generation_tokens=done.generated_tokens,
            prefix_queries=done.prompt_tokens,
            prefix_hits=done.cached_tokens,
            preemptions=done.preemptions,
            kv_bytes_sent=0,
            kv_bytes_received=round(done.pulled_tokens * self._kv_bytes),
            kv_transfers=self.transfers,
            kv_transfer_failures=self.transfer_failures,
            kv_leases_expired=self.leases_expired,
        )
