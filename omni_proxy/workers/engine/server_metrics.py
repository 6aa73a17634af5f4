"""The worker's Prometheus metrics, under the names that real vLLM uses where it has them.

Gauges and counters come from one `EngineStats` reading at scrape time; latencies are observed by the server as
outputs pass. Times are seconds of the event loop's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from omni_proxy.workers.engine.choice import TOOL_CALLS, Choice, Delta
from omni_proxy.workers.engine.types import EngineStats

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_TTFT: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
)  # fmt: skip
_TPOT: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10,
)  # fmt: skip
_E2E: Final = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960,
)  # fmt: skip
_SIZES: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000)
_LABELS: Final = ("model_name", "engine")

_GAUGES: Final[tuple[tuple[str, str, Callable[[EngineStats], float]], ...]] = (
    ("vllm:num_requests_running", "Requests in the running batch", lambda s: s.running),
    ("vllm:num_requests_waiting", "Requests waiting for the batch", lambda s: s.waiting),
    ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 1 is all", lambda s: _usage(s)),
    ("omni_kv_blocks_leased", "KV blocks pinned for a pull to come", lambda s: s.blocks_leased),
)
_COUNTERS: Final[tuple[tuple[str, str, Callable[[EngineStats], float]], ...]] = (
    ("vllm:prefix_cache_queries", "Prompt tokens looked up", lambda s: s.prefix_queries),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the cache", lambda s: s.prefix_hits),
    ("vllm:prompt_tokens", "Prompt tokens taken in", lambda s: _prompt_tokens(s)),
    ("vllm:generation_tokens", "Tokens drawn", lambda s: s.generation_tokens),
    ("vllm:external_prefix_cache_queries", "Prompt tokens asked of others", lambda s: s.pull_queries),
    ("vllm:external_prefix_cache_hits", "Prompt tokens that others gave", lambda s: s.prompt_tokens_pulled),
    ("vllm:num_preemptions", "Requests put back to wait", lambda s: s.preemptions),
    ("vllm:spec_decode_num_drafts", "Drafts checked", lambda s: s.spec_drafts),
    ("vllm:spec_decode_num_draft_tokens", "Tokens of drafts", lambda s: s.spec_draft_tokens),
    ("vllm:spec_decode_num_accepted_tokens", "Tokens of drafts that were drawn", lambda s: s.spec_accepted_tokens),
    ("vllm:nixl_num_failed_transfers", "KV pulls that failed", lambda s: s.kv_transfer_failures),
    ("vllm:nixl_num_kv_expired_reqs", "Leases that ran out", lambda s: s.kv_leases_expired),
    ("omni_kv_bytes_sent", "KV bytes that others pulled", lambda s: s.kv_bytes_sent),
    ("omni_kv_bytes_received", "KV bytes pulled from others", lambda s: s.kv_bytes_received),
    ("omni_kv_transfers", "KV handoffs that arrived", lambda s: s.kv_transfers),
    ("omni_kv_pushes", "Prompts pushed while they were computed", lambda s: s.kv_pushes),
)
_SOURCES: Final[tuple[tuple[str, Callable[[EngineStats], float]], ...]] = (
    ("local_compute", lambda s: s.prompt_tokens_computed),
    ("local_cache_hit", lambda s: s.prompt_tokens_cached),
    ("external_kv_transfer", lambda s: s.prompt_tokens_pulled),
)


def _usage(stats: EngineStats) -> float:
    return stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0


def _prompt_tokens(stats: EngineStats) -> float:
    return sum(read(stats) for _, read in _SOURCES)


class EngineCollector(Collector):
    """Reads the engine once per scrape."""

    def __init__(self, read: Callable[[], EngineStats], model_name: str) -> None:
        self._read = read
        self._labels = (model_name, "0")

    def describe(self) -> list[Metric]:
        """Nothing: the registry must not read the engine at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families that follow from one reading."""
        stats = self._read()
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            gauge.add_metric(self._labels, value(stats))
            yield gauge
        for name, text, value in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            counter.add_metric(self._labels, value(stats))
            yield counter
        yield self._waiting_by_reason(stats)
        yield self._by_source(stats)
        yield from self._drafts(stats)
        yield self._cache_config(stats)
        yield self._transfer_bytes(stats)
        yield self._push_seconds(stats)
        yield self._experts(stats)
        if stats.expert_imbalance:
            yield from self._expert_ranks(stats)

    def _waiting_by_reason(self, stats: EngineStats) -> Metric:
        """Who waits for KV from elsewhere holds its blocks and counts as running: all others wait for capacity."""
        name, text = "vllm:num_requests_waiting_by_reason", "Requests waiting, by what they wait for"
        family = GaugeMetricFamily(name, text, labels=(*_LABELS, "reason"))
        family.add_metric((*self._labels, "capacity"), stats.waiting)
        family.add_metric((*self._labels, "deferred"), 0)
        return family

    def _by_source(self, stats: EngineStats) -> Metric:
        name, text = "vllm:prompt_tokens_by_source", "Prompt tokens by where their KV came from"
        family = CounterMetricFamily(name, text, labels=(*_LABELS, "source"))
        for source, read in _SOURCES:
            family.add_metric((*self._labels, source), read(stats))
        return family

    def _drafts(self, stats: EngineStats) -> Iterator[Metric]:
        """Tokens of drafts by their place, as vLLM counts them, and by who has made them."""
        name, text = "vllm:spec_decode_num_accepted_tokens_per_pos", "Tokens of drafts that were drawn, by their place"
        places = CounterMetricFamily(name, text, labels=(*_LABELS, "position"))
        for place, tokens in enumerate(stats.spec_accepted_places):
            places.add_metric((*self._labels, str(place)), tokens)
        yield places
        guessed, right = stats.spec_guessed_tokens, stats.spec_guessed_accepted
        for name, text, head, both in (
            ("omni_draft_tokens", "Tokens of drafts, by who has made them", guessed, stats.spec_draft_tokens),
            ("omni_accepted_tokens", "Tokens of drafts that were drawn", right, stats.spec_accepted_tokens),
        ):
            family = CounterMetricFamily(name, text, labels=(*_LABELS, "kind"))
            family.add_metric((*self._labels, "head"), head)
            family.add_metric((*self._labels, "ngram"), both - head)
            yield family

    def _cache_config(self, stats: EngineStats) -> Metric:
        labels = ("engine", "block_size", "num_gpu_blocks")
        family = GaugeMetricFamily("vllm:cache_config_info", "Sizes of the KV cache", labels=labels)
        family.add_metric(("0", str(stats.block_size), str(stats.blocks_total)), 1)
        return family

    def _transfer_bytes(self, stats: EngineStats) -> Metric:
        name, text = "vllm:nixl_bytes_transferred", "Bytes per KV pull (sum and count only)"
        family = HistogramMetricFamily(name, text, labels=_LABELS)
        buckets = [("+Inf", float(stats.kv_transfers))]
        family.add_metric(self._labels, buckets, sum_value=stats.kv_bytes_received)
        return family

    def _push_seconds(self, stats: EngineStats) -> Metric:
        name, text = "omni_kv_push_seconds", "Time with pushed KV on the way, hidden behind the prefill or after it"
        family = CounterMetricFamily(name, text, labels=(*_LABELS, "part"))
        family.add_metric((*self._labels, "hidden"), stats.kv_push_hidden_s)
        family.add_metric((*self._labels, "exposed"), stats.kv_push_exposed_s)
        return family

    def _experts(self, stats: EngineStats) -> Metric:
        name, text = "omni_expert_tokens", "Tokens routed to each expert"
        family = CounterMetricFamily(name, text, labels=("layer", "expert"))
        for layer, experts in enumerate(stats.expert_tokens):
            for expert, tokens in enumerate(experts):
                family.add_metric((str(layer), str(expert)), tokens)
        return family

    def _expert_ranks(self, stats: EngineStats) -> Iterator[Metric]:
        name, text = "omni_expert_imbalance", "Largest over mean rows per rank in the last window, by MoE layer"
        imbalance = GaugeMetricFamily(name, text, labels=("layer",))
        for layer, ratio in enumerate(stats.expert_imbalance):
            imbalance.add_metric((str(layer),), ratio)
        yield imbalance
        yield CounterMetricFamily("omni_experts_copied", "Experts copied to another rank", value=stats.experts_copied)


class ServerMetrics:
    """All metrics of one worker, in a registry of their own."""

    def __init__(self, read: Callable[[], EngineStats], model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(read, model_name))
        self._labels = (model_name, "0")
        self._ended = Counter(
            "vllm:request_success",
            "Requests that ended, by reason",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        for reason in ("stop", "length", "abort", "error", "abandoned"):
            self._ended.labels(*self._labels, reason)
        self._ttft = self._histogram("time_to_first_token", "Arrival to first token", _TTFT)
        self._tpot = self._histogram("time_per_output_token", "Time between tokens", _TPOT)
        self._itl = self._histogram("inter_token_latency", "Time between tokens", _TPOT)
        self._mean = self._histogram("request_time_per_output_token", "Mean time per token after the first", _TPOT)
        self._e2e = self._histogram("e2e_request_latency", "Arrival to end", _E2E)
        self._queue = self._histogram("request_queue_time", "Waiting in the engine", _E2E)
        self._prefill = self._histogram("request_prefill_time", "Admission to first token", _E2E)
        self._decode = self._histogram("request_decode_time", "First token to end", _E2E)
        self._inference = self._histogram("request_inference_time", "Admission to end", _E2E)
        self._prompts = self._sizes("request_prompt_tokens", "Tokens of prompts")
        self._answers = self._sizes("request_generation_tokens", "Tokens of answers")

    def observe(self, choice: Choice, delta: Delta, arrived: float, now: float) -> None:
        """Take one delta into account; `arrived` is when the call's body had been read."""
        if delta.token_ids:
            if choice.last_at is None:
                choice.first_at = now
                self._ttft.observe(now - arrived)
                self._queue.observe(choice.queued_s)
            else:
                each = (now - choice.last_at) / len(delta.token_ids)
                self._tpot.observe(each)
                for _ in delta.token_ids:
                    self._itl.observe(each)
            choice.last_at = now
        if delta.finish_reason is not None:
            self.ended("stop" if delta.finish_reason == TOOL_CALLS else delta.finish_reason)
            self._e2e.observe(now - arrived)
            self._observe_whole(choice, arrived, now)

    def _observe_whole(self, choice: Choice, arrived: float, now: float) -> None:
        """What is known of a choice at its end; nothing of one that gave no token."""
        if choice.first_at is None:
            return
        prefill, decode = max(0.0, choice.first_at - arrived - choice.queued_s), now - choice.first_at
        self._prefill.observe(prefill)
        self._decode.observe(decode)
        self._inference.observe(prefill + decode)
        self._prompts.observe(len(choice.request.prompt_token_ids))
        self._answers.observe(len(choice.token_ids))
        if len(choice.token_ids) > 1:
            self._mean.observe(decode / (len(choice.token_ids) - 1))

    def ended(self, reason: str) -> None:
        """Count the end of one choice."""
        self._ended.labels(*self._labels, reason).inc()

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        full = f"vllm:{name}_seconds"
        family = Histogram(full, text, _LABELS, registry=self._registry, buckets=buckets)
        return family.labels(*self._labels)

    def _sizes(self, name: str, text: str) -> Histogram:
        family = Histogram(f"vllm:{name}", text, _LABELS, registry=self._registry, buckets=_SIZES)
        return family.labels(*self._labels)
