"""From the records of a run to its figures: latencies, goodput, stages. Pure.

Works on `RequestRecord`s, which the simulator and the live gateway make alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Annotated

from msgspec import Meta, Struct

from omni_proxy.lifecycle.timeline import stage_seconds
from omni_proxy.messages import Outcome, RequestRecord


class Slo(Struct, frozen=True, forbid_unknown_fields=True):
    """Latency limits, in seconds. A request that meets both counts for goodput."""

    ttft: Annotated[float, Meta(gt=0)] = 2.0
    tpot: Annotated[float, Meta(gt=0)] = 0.05


class Spread(Struct, frozen=True):
    """A distribution in five numbers; seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Latency(Struct, frozen=True):
    """One answered request as seen from outside; seconds."""

    at: float
    """Its arrival, in seconds of the run."""
    ttft: float
    tpot: float | None
    """None for an answer of one token."""
    e2e: float

    def meets(self, slo: Slo) -> bool:
        return self.ttft <= slo.ttft and (self.tpot is None or self.tpot <= slo.tpot)


class Figures(Struct, frozen=True):
    """What a run of requests came to."""

    requests: int
    outcomes: dict[str, int]
    seconds: float
    """From the first arrival to the last end."""
    ttft: Spread | None
    tpot: Spread | None
    e2e: Spread | None
    slo: Slo
    attained: float
    """Share of all requests that met both limits."""
    ttft_attained: float
    tpot_attained: float
    goodput: float
    """Requests in a second that met both limits."""
    qpm: float
    """Answered requests in a minute."""
    prompt_tokens: int
    completion_tokens: int
    cached_share: float
    """Share of prompt tokens that workers found in their caches."""
    stages: dict[str, Spread]
    """Time in each stage, over the requests that visited it."""


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the sorted, non-empty values do not exceed."""
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def spread(values: Iterable[float]) -> Spread | None:
    """The distribution of values; None where there are none."""
    ordered = sorted(values)
    if not ordered:
        return None
    mean = sum(ordered) / len(ordered)
    p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
    return Spread(len(ordered), mean, p50, p90, p99, ordered[-1])


def latency(record: RequestRecord) -> Latency | None:
    """The latencies of a request that was answered whole; None for any other."""
    first, end = record.first_token_at, record.ended_at
    if record.outcome is not Outcome.COMPLETED or first is None or end is None:
        return None
    later = (record.completion_tokens or 1) - 1
    tpot = (end - first) / later if later > 0 else None
    return Latency(record.arrived_at, first - record.arrived_at, tpot, end - record.arrived_at)


class Totals(Struct, frozen=True):
    """What is counted over all requests of a run, answered or not."""

    outcomes: dict[str, int]
    seconds: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


def figures(records: Sequence[RequestRecord], slo: Slo) -> Figures:
    """The figures of a run. There must be at least one record."""
    answered = [found for record in records if (found := latency(record)) is not None]
    ends = [r.ended_at for r in records if r.ended_at is not None]
    totals = Totals(
        outcomes=_outcomes(records),
        seconds=max(ends, default=0.0) - min(r.arrived_at for r in records),
        prompt_tokens=sum(r.prompt_tokens for r in records),
        completion_tokens=sum(r.completion_tokens or 0 for r in records),
        cached_tokens=sum(r.cached_tokens or 0 for r in records),
    )
    return summarise(answered, totals, slo, _stages(records))


def summarise(answered: Sequence[Latency], totals: Totals, slo: Slo, stages: dict[str, Spread]) -> Figures:
    """The figures of requests of which `answered` were answered whole."""
    requests = max(1, sum(totals.outcomes.values()))
    good = sum(found.meets(slo) for found in answered)
    per_second = 1 / totals.seconds if totals.seconds > 0 else 0.0
    return Figures(
        requests=requests,
        outcomes=totals.outcomes,
        seconds=totals.seconds,
        ttft=spread(found.ttft for found in answered),
        tpot=spread(found.tpot for found in answered if found.tpot is not None),
        e2e=spread(found.e2e for found in answered),
        slo=slo,
        attained=good / requests,
        ttft_attained=sum(found.ttft <= slo.ttft for found in answered) / requests,
        tpot_attained=sum(found.tpot is None or found.tpot <= slo.tpot for found in answered) / requests,
        goodput=good * per_second,
        qpm=60 * len(answered) * per_second,
        prompt_tokens=totals.prompt_tokens,
        completion_tokens=totals.completion_tokens,
        cached_share=totals.cached_tokens / max(1, totals.prompt_tokens),
        stages=stages,
    )


def _outcomes(records: Iterable[RequestRecord]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for record in records:
        name = "unfinished" if record.outcome is None else record.outcome.value
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items()))


def _stages(records: Iterable[RequestRecord]) -> dict[str, Spread]:
    spent: dict[str, list[float]] = {}
    for record in records:
        for stage, seconds in sorted(stage_seconds(record, record.ended_at or record.marks[-1][1]).items()):
            spent.setdefault(stage.name, []).append(seconds)
    found: Mapping[str, Spread | None] = {name: spread(values) for name, values in spent.items()}
    return {name: values for name, values in found.items() if values is not None}
