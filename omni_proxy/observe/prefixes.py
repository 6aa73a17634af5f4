"""Metrics of prefix awareness: what was predicted and what workers reported, and how their events arrive."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol

from msgspec import structs
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from omni_proxy.apc.caches import Caches
from omni_proxy.apc.divergence import Divergence
from omni_proxy.apc.feed import FeedReading
from omni_proxy.apc.keys import UNIT_TOKENS
from omni_proxy.messages import (
    Effect,
    Event,
    Leg,
    Mode,
    RequestRecord,
    Tokenized,
    WorkerAdded,
    WorkerRemoved,
    WorkerUp,
)

logger = logging.getLogger(__name__)

_FEED_TEXTS: Final = {
    "batches": "Messages of KV events that were applied.",
    "gaps": "Gaps in the numbers of such messages.",
    "lost": "Gaps that no replay could fill: the worker's cache was learned anew.",
    "restarts": "Publishers or connections that began anew.",
    "malformed": "Messages or events that made no sense.",
    "overflows": "Times that more came than is followed or held.",
}


class Feeds(Protocol):
    """Who listens to the workers' events."""

    @property
    def refused(self) -> int: ...

    def readings(self) -> list[FeedReading]: ...


class PrefixMetrics(Collector):
    """An observer of the core's events and a collector for scrapes."""

    def __init__(self, caches: Callable[[], Caches | None], feeds: Feeds | None) -> None:
        self._caches = caches
        self._feeds = feeds
        self._block_tokens: dict[str, int] = {}
        self._workers: dict[str, Divergence] = {}
        self._unread = 0

    # ------------------------------------------------------------------ filling

    @property
    def watches(self) -> Iterable[type]:
        return (Tokenized, WorkerAdded, WorkerUp, WorkerRemoved)

    def heard(self, event: Event, effects: Sequence[Effect]) -> None:
        match event:
            case Tokenized(prompt_tokens=None):
                self._unread += 1
            case WorkerAdded(spec) | WorkerUp(spec):
                self._block_tokens[spec.name] = max(spec.block_tokens or UNIT_TOKENS, UNIT_TOKENS)
            case WorkerRemoved(name):
                self._block_tokens.pop(name, None)
                self._workers.pop(name, None)

    def closed(self, record: RequestRecord, now: float) -> None:
        """Compare what was predicted with what the worker reported."""
        predicted, reported = record.predicted_tokens, record.cached_tokens
        if predicted is None or reported is None:
            return
        worker = computed_by(record)
        if worker is None or worker not in self._block_tokens:
            return
        divergence = self._workers.setdefault(worker, Divergence())
        divergence.compare(predicted, reported, record.prompt_tokens, self._block_tokens[worker])
        warning = divergence.warning(now)
        if warning is not None:
            logger.warning("prefixes on %s: %s", worker, warning)

    # ------------------------------------------------------------------- showing

    def collect(self) -> Iterator[Metric]:
        """All families, in the order of the documentation."""
        yield CounterMetricFamily("omni_apc_unread_prompts", "Prompts that could not be tokenised.", value=self._unread)
        caches = self._caches()
        if caches is not None:
            yield GaugeMetricFamily("omni_apc_keys", "Prefixes in the index.", value=len(caches.index))
            text = "Events of workers that are no members."
            yield CounterMetricFamily("omni_apc_stray_events", text, value=caches.unknown_worker_events)
        yield from self._prediction_families()
        if self._feeds is not None:
            yield from _feed_families(self._feeds.readings())
            text = "Publishers that two workers claimed."
            yield CounterMetricFamily("omni_kv_events_refused", text, value=self._feeds.refused)

    def _prediction_families(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily(
            "omni_apc_tokens", "Cached prompt tokens, as predicted and as reported.", labels=("worker", "source")
        )
        results = CounterMetricFamily(
            "omni_apc_predictions",
            "Reports that equal the prediction, or are below or above.",
            labels=("worker", "result"),
        )
        share = GaugeMetricFamily(
            "omni_apc_divergence", "Mean difference between both, as a share of the prompt.", labels=("worker",)
        )
        for name, worker in sorted(self._workers.items()):
            tokens.add_metric((name, "predicted"), worker.predicted_tokens)
            tokens.add_metric((name, "reported"), worker.reported_tokens)
            results.add_metric((name, "equal"), worker.equal)
            results.add_metric((name, "below"), worker.over)
            results.add_metric((name, "above"), worker.under)
            share.add_metric((name,), worker.share)
        yield from (tokens, results, share)


def computed_by(record: RequestRecord) -> str | None:
    """The worker that computed the prompt last."""
    leg = Leg.DECODE if record.mode is Mode.AGGREGATED else Leg.PREFILL
    return next((p.worker for p in reversed(record.placements) if p.leg is leg), None)


def _feed_families(readings: Sequence[FeedReading]) -> Iterator[Metric]:
    labels = ("worker", "rank")
    connected = GaugeMetricFamily("omni_kv_events_connected", "1: the publisher is connected.", labels=labels)
    orphans = CounterMetricFamily("omni_kv_events_unknown_parents", "Blocks behind unknown ones.", labels=labels)
    counts = {
        name: CounterMetricFamily(f"omni_kv_events_{name}", text, labels=labels) for name, text in _FEED_TEXTS.items()
    }
    text = "How long the last message was on its way, by both machines' clocks."
    lag = GaugeMetricFamily("omni_kv_events_lag_seconds", text, labels=labels)
    for one in readings:
        key = (one.worker, str(one.rank))
        connected.add_metric(key, int(one.connected))
        orphans.add_metric(key, one.unknown_parents)
        if one.lag_s is not None:
            lag.add_metric(key, one.lag_s)
        for name, count in structs.asdict(one.counts).items():
            counts[name].add_metric(key, count)
    yield from (connected, *counts.values(), orphans, lag)
