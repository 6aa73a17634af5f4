"""What the metrics are made of: counts and histograms, filled from the core's events and effects.

The hot path adds to plain lists; `metrics` shows them when somebody scrapes. (prometheus_client's own histogram takes a
lock for each observation, and a request makes a dozen.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from omni_proxy.lifecycle.timeline import stage_spans
from omni_proxy.messages import (
    Close,
    DecodeBroke,
    Effect,
    Event,
    LegFailed,
    Mode,
    Outcome,
    PrefillDone,
    RequestRecord,
    Stage,
)

SECONDS: Final[tuple[float, ...]] = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)
RATIOS: Final[tuple[float, ...]] = (0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
TOKEN_SECONDS: Final[tuple[float, ...]] = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1.0,
)


class Histogram:
    """Counts in buckets; the last bucket has no upper bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = list(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        # A loop: compiled, it costs less than the call of a function for it.
        at = 0
        for bound in self.bounds:
            if value <= bound:
                break
            at += 1
        self.counts[at] += 1
        self.total += value


class Tallies:
    """All counts of one scheduler; an observer of its events."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str, str], int] = {}
        self.stages = {stage: Histogram(SECONDS) for stage in Stage}
        self.ttft = Histogram(SECONDS)
        self.tpot = Histogram(TOKEN_SECONDS)
        self.e2e = Histogram(SECONDS)
        self.encode = Histogram(SECONDS)
        self.ttft_predicted = Histogram(RATIOS)
        self.tokens = {"prompt": 0, "cached": 0, "generated": 0}
        self.leg_failures: dict[tuple[str, str, str], int] = {}
        self.handoffs = {"done": 0, "missed": 0}
        self.retries = 0
        self.resumes = {"continued": 0, "given_up": 0}
        self.config = (1, 0)
        """Generation of the config in force, and how many were refused."""

    @property
    def watches(self) -> Iterable[type]:
        return (PrefillDone, LegFailed, DecodeBroke)

    def heard(self, event: Event, effects: Sequence[Effect]) -> None:
        if isinstance(event, PrefillDone):
            self.handoffs["done" if event.handoff else "missed"] += 1
        elif isinstance(event, LegFailed):
            key = (event.lease.worker, event.lease.leg.value, event.failure.kind.value)
            self.leg_failures[key] = self.leg_failures.get(key, 0) + 1
        elif isinstance(event, DecodeBroke):
            self._broke(event, effects)

    def _broke(self, event: DecodeBroke, effects: Sequence[Effect]) -> None:
        lease = event.lease
        key = (lease.worker, lease.leg.value, event.failure.kind.value)
        self.leg_failures[key] = self.leg_failures.get(key, 0) + 1
        closed = any(type(effect) is Close and effect.rid == lease.rid for effect in effects)
        self.resumes["given_up" if closed else "continued"] += 1

    def rejected_at_edge(self, endpoint: str, error: str) -> None:
        """Count a request that never reached the core."""
        key = (endpoint, "rejected", error)
        self.requests[key] = self.requests.get(key, 0) + 1

    def config_reloaded(self, generation: int, failed: int) -> None:
        """Note which config is in force, the how-manieth, and how many could not be used."""
        self.config = (generation, failed)

    def closed(self, record: RequestRecord, now: float) -> None:
        outcome = record.outcome
        # A request that ended well pays for no property of an enum.
        key = (record.endpoint, "completed", "") if outcome is Outcome.COMPLETED else _key(record)
        self.requests[key] = self.requests.get(key, 0) + 1
        for stage, begin, end in stage_spans(record, now):
            self.stages[stage].observe(end - begin)
        if record.encode_s is not None:
            self.encode.observe(record.encode_s)
        extra = record.attempts - (1 if record.mode is Mode.AGGREGATED else 2)
        if extra > 0:
            self.retries += extra
        if outcome is Outcome.COMPLETED:
            self._completed(record, now)

    def _completed(self, record: RequestRecord, now: float) -> None:
        begin, first, generated = record.arrived_at, record.first_token_at, record.completion_tokens
        self.e2e.observe(now - begin)
        if first is not None:
            self.ttft.observe(first - begin)
            if record.predicted_first_at is not None and first > begin and not record.resumes:
                self.ttft_predicted.observe((record.predicted_first_at - begin) / (first - begin))
            if generated is not None and generated > 1:
                self.tpot.observe((now - first) / (generated - 1))
        self.tokens["prompt"] += record.prompt_tokens
        self.tokens["cached"] += record.cached_tokens or 0
        self.tokens["generated"] += generated or 0


def _key(record: RequestRecord) -> tuple[str, str, str]:
    outcome, error = record.outcome, record.error
    return record.endpoint, "" if outcome is None else outcome.value, "" if error is None else error.value
