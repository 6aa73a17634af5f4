"""What a load client saw of each request, and what it comes to. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from omni_proxy.sim.figures import Figures, Latency, Slo, Spread, Totals, spread, summarise


class Seen(Struct, frozen=True):
    """One request from the client's side; instants in seconds since the run's beginning."""

    number: int
    due: float
    """When the workload has it arrive; latencies count from here, so that a late client hides nothing."""
    sent: float
    ended: float
    status: int
    """The HTTP status; 0 where there was no answer."""
    outcome: str
    """completed, rejected (429 or 503), error, cut (the stream broke off), or timeout."""
    detail: str = ""
    prompt_tokens: int = 0
    first: float | None = None
    last: float | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    chunks: int = 0

    def latency(self) -> Latency | None:
        """The latencies of a completed request; None for any other."""
        if self.outcome != "completed" or self.first is None or self.last is None:
            return None
        later = (self.completion_tokens or self.chunks) - 1
        tpot = (self.last - self.first) / later if later > 0 else None
        return Latency(self.due, self.first - self.due, tpot, self.last - self.due)


class BenchResult(Struct, frozen=True):
    """A whole run of a load client."""

    url: str
    workload: str
    settings: dict[str, str]
    speed: float
    """Seconds here are this many times the clock's: the run was compressed."""
    figures: Figures
    lag: Spread | None
    """How late requests were sent."""
    cpu_s: float
    """Processor time of the client."""
    requests: tuple[Seen, ...]


def uncompressed(seen: Seen, speed: float) -> Seen:
    """The same with instants as they would be without compression."""
    return Seen(
        seen.number,
        seen.due * speed,
        seen.sent * speed,
        seen.ended * speed,
        seen.status,
        seen.outcome,
        seen.detail,
        seen.prompt_tokens,
        None if seen.first is None else seen.first * speed,
        None if seen.last is None else seen.last * speed,
        seen.completion_tokens,
        seen.cached_tokens,
        seen.chunks,
    )


def bench_figures(requests: Sequence[Seen], slo: Slo) -> Figures:
    """Figures of a run. There must be at least one request."""
    outcomes: dict[str, int] = {}
    for seen in requests:
        outcomes[seen.outcome] = outcomes.get(seen.outcome, 0) + 1
    totals = Totals(
        outcomes=dict(sorted(outcomes.items())),
        seconds=max(s.ended for s in requests) - min(s.due for s in requests),
        prompt_tokens=sum(s.prompt_tokens for s in requests),
        completion_tokens=sum(s.completion_tokens or 0 for s in requests),
        cached_tokens=sum(s.cached_tokens or 0 for s in requests),
    )
    answered = [found for seen in requests if (found := seen.latency()) is not None]
    return summarise(answered, totals, slo, {})


def lag(requests: Sequence[Seen]) -> Spread | None:
    """How late the client was."""
    return spread(seen.sent - seen.due for seen in requests)


def faults(requests: Sequence[Seen], most: int = 5) -> list[str]:
    """The most frequent details of what went wrong, each with its count."""
    counts: dict[str, int] = {}
    for seen in requests:
        if seen.outcome != "completed":
            text = f"{seen.outcome}: {seen.status or ''} {seen.detail}".strip()
            counts[text] = counts.get(text, 0) + 1
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return [f"{count} x {text}" for text, count in ordered[:most]]
