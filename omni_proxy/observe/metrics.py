"""Counters and histograms of the gateway, filled from the core's events and effects, shown as Prometheus text.

The hot path adds to plain lists; prometheus_client sees them only when somebody scrapes. (Its own histogram takes a
lock for each observation, and a request makes a dozen.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from omni_proxy.lifecycle.timeline import stage_spans
from omni_proxy.messages import Close, Effect, Event, LegFailed, Mode, PrefillDone, RequestRecord, Stage
from omni_proxy.scheduler.ledger import WorkerLoad

SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)


class Histogram:
    """Counts in buckets; the last bucket has no upper bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Write cumulative buckets as Prometheus wants them."""
        cumulative, buckets = 0, []
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            cumulative += count
            buckets.append((bound, cumulative))
        family.add_metric(labels, buckets, self.total)


class Live:
    """What is asked of the core at the moment of a scrape."""

    def __init__(
        self,
        workers: Callable[[], Iterable[WorkerLoad]],
        waiting: Callable[[], tuple[int, int]],
        running: Callable[[], int],
    ) -> None:
        self.workers = workers
        self.waiting = waiting
        self.running = running


class Metrics(Collector):
    """All metrics of one scheduler; an observer of its events and a collector for its scrapes."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._requests: dict[tuple[str, str, str], int] = {}
        self._stages = {stage: Histogram(SECONDS) for stage in Stage}
        self._ttft = Histogram(SECONDS)
        self._tpot = Histogram(TOKEN_SECONDS)
        self._e2e = Histogram(SECONDS)
        self._tokens = {"prompt": 0, "cached": 0, "generated": 0}
        self._leg_failures: dict[tuple[str, str, str], int] = {}
        self._handoffs = {"done": 0, "missed": 0}
        self._retries = 0
        self._config = (1, 0)
        """Generation of the config in force, and how many were refused."""

    # ------------------------------------------------------------------ filling

    def __call__(self, now: float, event: Event, effects: Sequence[Effect]) -> None:
        kind = type(event)
        if kind is PrefillDone:
            assert isinstance(event, PrefillDone)
            self._handoffs["done" if event.handoff else "missed"] += 1
        elif kind is LegFailed:
            assert isinstance(event, LegFailed)
            key = (event.lease.worker, event.lease.leg.value, event.failure.kind.value)
            self._leg_failures[key] = self._leg_failures.get(key, 0) + 1
        for effect in effects:
            if type(effect) is Close:
                self._closed(effect.record, now)

    def rejected_at_edge(self, endpoint: str, error: str) -> None:
        """Count a request that never reached the core."""
        key = (endpoint, "rejected", error)
        self._requests[key] = self._requests.get(key, 0) + 1

    def config_reloaded(self, generation: int, failed: int) -> None:
        """Note which config is in force, the how-manieth, and how many could not be used."""
        self._config = (generation, failed)

    def _closed(self, record: RequestRecord, now: float) -> None:
        outcome = record.outcome.value if record.outcome is not None else ""
        key = (record.endpoint, outcome, record.error.value if record.error is not None else "")
        self._requests[key] = self._requests.get(key, 0) + 1
        for stage, begin, end in stage_spans(record, now):
            self._stages[stage].observe(end - begin)
        self._retries += max(0, record.attempts - (1 if record.mode is Mode.AGGREGATED else 2))
        if outcome == "completed":
            self._completed(record, now)

    def _completed(self, record: RequestRecord, now: float) -> None:
        begin, first, generated = record.arrived_at, record.first_token_at, record.completion_tokens
        self._e2e.observe(now - begin)
        if first is not None:
            self._ttft.observe(first - begin)
            if generated is not None and generated > 1:
                self._tpot.observe((now - first) / (generated - 1))
        self._tokens["prompt"] += record.prompt_tokens
        self._tokens["cached"] += record.cached_tokens or 0
        self._tokens["generated"] += generated or 0

    # ------------------------------------------------------------------- showing

    def collect(self) -> Iterator[Metric]:
        """All families, in the order of the documentation."""
        yield from self._request_families()
        yield from self._latency_families()
        yield from self._leg_families()
        yield from self._worker_families()
        yield from self._config_families()

    def _request_families(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("omni_requests", "Ended requests.", labels=("endpoint", "outcome", "error"))
        for key, count in sorted(self._requests.items()):
            requests.add_metric(key, count)
        yield requests
        waiting, waiting_tokens = self._live.waiting()
        yield GaugeMetricFamily("omni_requests_live", "Requests that have not ended.", value=self._live.running())
        yield GaugeMetricFamily("omni_queue_requests", "Requests that wait for a worker.", value=waiting)
        yield GaugeMetricFamily("omni_queue_tokens", "Prompt tokens that wait for a worker.", value=waiting_tokens)
        tokens = CounterMetricFamily("omni_tokens", "Tokens of completed requests.", labels=("kind",))
        for kind, count in self._tokens.items():
            tokens.add_metric((kind,), count)
        yield tokens

    def _latency_families(self) -> Iterator[Metric]:
        stages = HistogramMetricFamily(
            "omni_stage_seconds",
            "Time spent in each stage; a stage that was skipped is not counted.",
            labels=("stage",),
        )
        for stage, histogram in self._stages.items():
            if any(histogram.counts):
                histogram.add_to(stages, (stage.name.lower(),))
        yield stages
        for name, text, histogram in (
            ("omni_ttft_seconds", "Arrival to first content token (streams).", self._ttft),
            ("omni_tpot_seconds", "Mean time per output token after the first (streams).", self._tpot),
            ("omni_e2e_seconds", "Arrival to end of completed requests.", self._e2e),
        ):
            family = HistogramMetricFamily(name, text, labels=())
            histogram.add_to(family, ())
            yield family

    def _leg_families(self) -> Iterator[Metric]:
        failures = CounterMetricFamily("omni_leg_failures", "Failed legs.", labels=("worker", "leg", "kind"))
        members = {w.spec.name for w in self._live.workers()}
        for key, count in sorted(self._leg_failures.items()):
            if key[0] in members:
                failures.add_metric(key, count)
        yield failures
        handoffs = CounterMetricFamily(
            "omni_handoffs", "Prefills that gave KV parameters (done) or none (missed).", labels=("result",)
        )
        for result, count in self._handoffs.items():
            handoffs.add_metric((result,), count)
        yield handoffs
        yield CounterMetricFamily("omni_retries", "Legs that were sent again.", value=self._retries)

    def _worker_families(self) -> Iterator[Metric]:
        labels = ("worker", "role")
        up = GaugeMetricFamily("omni_worker_up", "1: the worker can be used.", labels=labels)
        seqs = GaugeMetricFamily("omni_worker_sequences", "Requests that the worker holds for us.", labels=labels)
        prefill = GaugeMetricFamily(
            "omni_worker_prefill_tokens", "Prompt tokens that the worker has to compute for us.", labels=labels
        )
        kv = GaugeMetricFamily("omni_worker_kv_tokens", "KV tokens that the worker holds for us.", labels=labels)
        for worker in self._live.workers():
            key = (worker.spec.name, worker.spec.role.value)
            up.add_metric(key, int(worker.up and not worker.draining))
            seqs.add_metric(key, worker.seqs)
            prefill.add_metric(key, worker.prefill_tokens)
            kv.add_metric(key, worker.kv_tokens)
        yield from (up, seqs, prefill, kv)

    def _config_families(self) -> Iterator[Metric]:
        generation, failed = self._config
        yield GaugeMetricFamily("omni_config_generation", "Counts the configs that were in force.", value=generation)
        reloads = CounterMetricFamily("omni_config_reloads", "Config files that were read again.", labels=("result",))
        reloads.add_metric(("ok",), generation - 1)
        reloads.add_metric(("failed",), failed)
        yield reloads
