"""Metrics of what is computed ahead: how much of it was of use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from omni_proxy.flow.prewarming import PrewarmCounts

_RESULTS: Final = ("sent", "finished", "cancelled", "failed")
_TOKENS: Final = ("sent", "used", "wasted")


class PrewarmMetrics(Collector):
    """Shows the core's counts; nothing where it computes nothing ahead."""

    def __init__(self, counts: Callable[[], PrewarmCounts | None]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """All families, in the order of docs/prewarm.md."""
        counts = self._counts()
        if counts is None:
            return
        text = "Next turns whose beginning was computed ahead, by what became of it."
        requests = CounterMetricFamily("omni_prewarm_requests", text, labels=("result",))
        for result in _RESULTS:
            requests.add_metric((result,), getattr(counts, result))
        text = "Tokens to compute ahead: all, those that a next turn found, those that none did."
        tokens = CounterMetricFamily("omni_prewarm_tokens", text, labels=("result",))
        for result in _TOKENS:
            tokens.add_metric((result,), getattr(counts, f"{result}_tokens"))
        text = "Conversations that came back with a next turn, and those that did not in time."
        returns = CounterMetricFamily("omni_conversations", text, labels=("result",))
        returns.add_metric(("returned",), counts.returned)
        returns.add_metric(("given_up",), counts.given_up)
        yield from (requests, tokens, returns)
