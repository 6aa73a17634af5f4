"""What the metrics are made of: counts and histograms, filled from the core's events and effects.

The hot path adds to plain lists; `metrics` shows them when somebody scrapes. (prometheus_client's own histogram takes a
lock for each observation, and a request makes a dozen.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from omni_proxy.lifecycle.enums import AGGREGATED, COMPLETED, PREFILL_LEG, PREFILL_SCHEDULED
from omni_proxy.lifecycle.timeline import visit_ends
from omni_proxy.messages import (
    Close,
    DecodeBroke,
    Effect,
    Event,
    Failure,
    Lease,
    LegFailed,
    PrefillDone,
    RequestRecord,
    Stage,
)
from omni_proxy.observe.edge_news import EdgeNews

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

    def add(self, value: float, count: int) -> None:
        """The same value so many times."""
        at = sum(value > bound for bound in self.bounds)
        self.counts[at] += count
        self.total += value * count

    def observe(self, value: float) -> None:
        # A loop: compiled, it costs less than the call of a function for it.
        at = 0
        for bound in self.bounds:
            if value <= bound:
                break
            at += 1
        self.counts[at] += 1
        self.total += value


ITL_SECONDS: Final[tuple[float, ...]] = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0,
)  # fmt: skip


class PrefillTimes:
    """Prompts that one worker computed: how long that should have taken, and how long it did."""

    __slots__ = ("actual_s", "count", "predicted_s")

    def __init__(self) -> None:
        self.count = 0
        self.predicted_s = 0.0
        self.actual_s = 0.0


class Tallies:
    """All counts of one scheduler; an observer of its events."""

    def __init__(self) -> None:
        self.completed: dict[str, int] = {}
        """Requests that ended well, by endpoint."""
        self.others: dict[tuple[str, str, str], int] = {}
        """The others, by endpoint, outcome and error."""
        self.stages = [Histogram(SECONDS) for _ in Stage]
        """By stage, in their order."""
        self.ttft = Histogram(SECONDS)
        self.tpot = Histogram(TOKEN_SECONDS)
        self.e2e = Histogram(SECONDS)
        self.encode = Histogram(SECONDS)
        self.ttft_predicted = Histogram(RATIOS)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.leg_failures: dict[tuple[str, str, str], int] = {}
        self.handoffs_done = 0
        self.handoffs_missed = 0
        self.handoff_tokens = 0
        self.retries = 0
        self.worker_retries: dict[str, int] = {}
        """By worker: requests that went on elsewhere after it had failed them."""
        self.prefills: dict[str, PrefillTimes] = {}
        self.itl = Histogram(ITL_SECONDS)
        self.tokenizer = Histogram(SECONDS)
        self.resumes = {"continued": 0, "given_up": 0}
        self.config = (1, 0)
        """Generation of the config in force, and how many were refused."""

    @property
    def watches(self) -> Iterable[type]:
        return (PrefillDone, LegFailed, DecodeBroke)

    def heard(self, event: Event, effects: Sequence[Effect]) -> None:
        if isinstance(event, PrefillDone):
            if event.handoff:
                self.handoffs_done += 1
            else:
                self.handoffs_missed += 1
        elif isinstance(event, LegFailed):
            self._failed(event.lease, event.failure, effects)
        elif isinstance(event, DecodeBroke):
            ended = self._failed(event.lease, event.failure, effects)
            self.resumes["given_up" if ended else "continued"] += 1

    def _failed(self, lease: Lease, failure: Failure, effects: Sequence[Effect]) -> bool:
        """Count a leg that failed; True when its request has ended with it."""
        worker = lease.worker
        key = (worker, lease.leg.value, failure.kind.value)
        self.leg_failures[key] = self.leg_failures.get(key, 0) + 1
        if any(type(effect) is Close and effect.rid == lease.rid for effect in effects):
            return True
        self.worker_retries[worker] = self.worker_retries.get(worker, 0) + 1
        return False

    def edge_counted(self, news: EdgeNews) -> None:
        """Take in what a front has counted."""
        for ms, count in news.gaps:
            self.itl.add(ms / 1000.0, count)
        if news.long_gaps:
            self.itl.counts[-1] += news.long_gaps
            self.itl.total += news.long_gaps_s
        for seconds in news.tokenized_s:
            self.tokenizer.observe(seconds)

    def requests(self) -> dict[tuple[str, str, str], int]:
        """Ended requests by endpoint, outcome and error."""
        well = {(endpoint, "completed", ""): count for endpoint, count in self.completed.items()}
        return {**self.others, **well}

    def rejected_at_edge(self, endpoint: str, error: str) -> None:
        """Count a request that never reached the core."""
        self._count_other((endpoint, "rejected", error))

    def _count_other(self, key: tuple[str, str, str]) -> None:
        self.others[key] = self.others.get(key, 0) + 1

    def config_reloaded(self, generation: int, failed: int) -> None:
        """Note which config is in force, the how-manieth, and how many could not be used."""
        self.config = (generation, failed)

    def closed(self, record: RequestRecord, now: float) -> None:
        outcome = record.outcome
        marks = record.marks
        for index, end in enumerate(visit_ends(record, now)):
            stage, begin, _ = marks[index]
            place: int = stage
            self.stages[place].observe(end - begin)
        encode_s, alone = record.encode_s, record.mode is AGGREGATED
        if encode_s is not None:
            self.encode.observe(encode_s)
        extra = record.attempts - (1 if alone else 2)
        if extra > 0:
            self.retries += extra
        if outcome is not COMPLETED:
            self._count_other(_key(record))
        else:
            self._completed(record, now)
            if extra == 0 and not alone and (done_at := record.prefill_done_at) is not None:
                self._prefilled(record, done_at)

    def _prefilled(self, record: RequestRecord, done_at: float) -> None:
        """Compare a handed-over prompt's time on P, from the grant on, with the prediction made then."""
        self.handoff_tokens += record.prompt_tokens
        placement = record.placements[0]
        finish_s = placement.finish_s
        if finish_s is None or placement.leg is not PREFILL_LEG:
            return
        worker = placement.worker
        times = self.prefills.get(worker)
        if times is None:
            times = self.prefills[worker] = PrefillTimes()
        for stage, at, _ in record.marks:
            if stage is PREFILL_SCHEDULED:
                times.count += 1
                times.predicted_s += finish_s
                times.actual_s += done_at - at
                return

    def _completed(self, record: RequestRecord, now: float) -> None:
        endpoint = record.endpoint
        self.completed[endpoint] = self.completed.get(endpoint, 0) + 1
        begin, first, generated = record.marks[0][1], record.first_token_at, record.completion_tokens
        self.e2e.observe(now - begin)
        if first is not None:
            self.ttft.observe(first - begin)
            predicted = record.predicted_first_at
            if predicted is not None and first > begin and not record.resumes:
                self.ttft_predicted.observe((predicted - begin) / (first - begin))
            if generated is not None and generated > 1:
                self.tpot.observe((now - first) / (generated - 1))
        self.prompt_tokens += record.prompt_tokens
        self.cached_tokens += record.cached_tokens or 0
        self.generated_tokens += generated or 0


def _key(record: RequestRecord) -> tuple[str, str, str]:
    outcome, error = record.outcome, record.error
    return record.endpoint, "" if outcome is None else outcome.value, "" if error is None else error.value
