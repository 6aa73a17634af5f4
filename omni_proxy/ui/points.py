"""From ended requests to the points of the charts. Pure: knows no clock, no page and no terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil
from typing import Final

from msgspec import Struct

from omni_proxy.messages import Outcome, RequestRecord

MOST_RECORDS: Final = 1000
"""Of more that ended in one stretch every n-th is looked at and stands for n, or the scheduler would be held up."""


class Limits(Struct, frozen=True):
    """What an answer must keep to be good: seconds to its first token, and for each further one."""

    ttft_s: float = 2.0
    tpot_s: float = 0.1


class Point(Struct, frozen=True):
    """What ended in one stretch of time. Seconds; None where nothing can be said."""

    at: float
    """Wall clock at the end of the stretch."""
    seconds: float
    ended: int
    failed: int
    """Ended otherwise than well, clients that left apart."""
    good: int
    """Answers within the limits."""
    completed: int
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    tpot_p50_s: float | None
    tpot_p95_s: float | None
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    waiting: int | None = None
    """Requests that waited at the end of the stretch; None: nobody looked."""


def ttft_s(record: RequestRecord) -> float | None:
    """Arrival to first content token."""
    first = record.first_token_at
    return None if first is None else first - record.arrived_at


def tpot_s(record: RequestRecord) -> float | None:
    """Mean time per token after the first; None for answers of one token and those that did not stream."""
    first, end, tokens = record.first_token_at, record.ended_at, record.completion_tokens
    if first is None or end is None or tokens is None or tokens < 2:
        return None
    return (end - first) / (tokens - 1)


def is_good(record: RequestRecord, limits: Limits) -> bool:
    """Did it keep the limits? One without a first token must be whole by the time that both allow."""
    end = record.ended_at
    if record.outcome is not Outcome.COMPLETED or end is None:
        return False
    first = ttft_s(record)
    if first is None:
        steps = max((record.completion_tokens or 1) - 1, 0)
        return end - record.arrived_at <= limits.ttft_s + steps * limits.tpot_s
    step = tpot_s(record)
    return first <= limits.ttft_s and (step is None or step <= limits.tpot_s)


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of all does not exceed; `ordered` is ascending."""
    return ordered[max(ceil(share * len(ordered)) - 1, 0)] if ordered else None


def point(
    records: Iterable[RequestRecord], at: float, seconds: float, limits: Limits, waiting: int | None = None
) -> Point:
    """One stretch of `seconds` that ends `at` (wall clock), from the requests that ended within it."""
    ended = list(records)
    sample = ended[:: max(1, ceil(len(ended) / MOST_RECORDS))]
    each = len(ended) / max(len(sample), 1)
    good_end = [r for r in sample if r.outcome is Outcome.COMPLETED]
    first = sorted(s for s in map(ttft_s, good_end) if s is not None)
    step = sorted(s for s in map(tpot_s, good_end) if s is not None)
    return Point(
        at=round(at, 3),
        seconds=seconds,
        ended=len(ended),
        failed=round(each * sum(r.outcome not in (Outcome.COMPLETED, Outcome.CANCELLED) for r in sample)),
        good=round(each * sum(is_good(r, limits) for r in good_end)),
        completed=round(each * len(good_end)),
        ttft_p50_s=percentile(first, 0.5),
        ttft_p95_s=percentile(first, 0.95),
        tpot_p50_s=percentile(step, 0.5),
        tpot_p95_s=percentile(step, 0.95),
        prompt_tokens=round(each * sum(r.prompt_tokens for r in good_end)),
        cached_tokens=round(each * sum(min(r.cached_tokens or 0, r.prompt_tokens) for r in good_end)),
        generated_tokens=round(each * sum(r.completion_tokens or 0 for r in good_end)),
        waiting=waiting,
    )


def history(
    newest_first: Iterable[RequestRecord], now: float, offset: float, step_s: float, count: int, limits: Limits
) -> list[Point]:
    """Points of the last `count` steps that are over, oldest first. `offset`: wall clock minus the records' clock.

    Steps begin at whole multiples of `step_s`, so that whoever asks twice gets the same ones.
    """
    last = int(now // step_s)
    buckets: list[list[RequestRecord]] = [[] for _ in range(count)]
    for record in newest_first:
        assert record.ended_at is not None, f"{record.rid} has not ended"
        place = count - (last - int(record.ended_at // step_s))
        if place < 0:
            break
        if place < count:
            buckets[place].append(record)
    ends = [(last - count + 1 + place) * step_s + offset for place in range(count)]
    return [point(bucket, end, step_s, limits) for bucket, end in zip(buckets, ends, strict=True)]
