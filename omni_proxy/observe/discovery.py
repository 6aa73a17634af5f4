"""Metrics of the sources of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class State(Protocol):
    """How a source stands."""

    @property
    def name(self) -> str: ...
    @property
    def workers(self) -> int: ...
    @property
    def changes(self) -> int: ...
    @property
    def failures(self) -> int: ...
    @property
    def fault(self) -> str | None: ...


class Refusal(Protocol):
    """A candidate that is not used."""

    @property
    def source(self) -> str: ...


class DiscoveryMetrics(Collector):
    """Reads at each scrape."""

    def __init__(self, view: Callable[[], tuple[Sequence[State], Sequence[Refusal]]]) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        states, refused = self._view()
        good = GaugeMetricFamily("omni_discovery_up", "1 while a source of workers can be used.", labels=["source"])
        workers = GaugeMetricFamily("omni_discovery_workers", "Workers that a source names.", labels=["source"])
        bad = GaugeMetricFamily("omni_discovery_refused", "Candidates that are refused now.", labels=["source"])
        changes = CounterMetricFamily(
            "omni_discovery_changes", "Times that a source's list changed.", labels=["source"]
        )
        failures = CounterMetricFamily("omni_discovery_failures", "Times it could not be used.", labels=["source"])
        for state in states:
            labels = [state.name]
            good.add_metric(labels, int(state.fault is None))
            workers.add_metric(labels, state.workers)
            bad.add_metric(labels, sum(one.source == state.name for one in refused))
            changes.add_metric(labels, state.changes)
            failures.add_metric(labels, state.failures)
        yield from (good, workers, bad, changes, failures)
