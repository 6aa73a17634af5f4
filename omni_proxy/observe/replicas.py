"""Metrics of the way to the other gateways."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Names(Protocol):
    lost: int

    def names(self) -> list[str]: ...


class LinkView(Protocol):
    """What there is to read of the way to the others."""

    connected: bool
    failures: int
    sent: int
    received: int
    malformed: int

    @property
    def others(self) -> Names: ...
    def seconds_alone(self) -> float: ...


class ReplicaMetrics(Collector):
    """Reads at each scrape."""

    def __init__(self, link: LinkView) -> None:
        self._link = link

    def collect(self) -> Iterator[Metric]:
        link = self._link
        yield GaugeMetricFamily("omni_replicas_others", "Other gateways that live.", value=len(link.others.names()))
        yield GaugeMetricFamily("omni_replicas_connected", "1 while the others can be heard.", value=link.connected)
        counters = {
            "alone_seconds": ("Time without a connection to the others.", link.seconds_alone()),
            "failures": ("Times that the connection was lost or could not be had.", link.failures),
            "lost": ("Other gateways that fell silent.", link.others.lost),
            "reports_sent": ("Reports made.", link.sent),
            "reports_received": ("Reports of others heard.", link.received),
            "reports_malformed": ("Messages that were no reports.", link.malformed),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"omni_replicas_{name}", text, value=value)
