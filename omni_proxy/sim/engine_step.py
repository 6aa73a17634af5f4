"""The pass, or run of passes, that an engine has under way, and the counters of an engine. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

from omni_proxy.sim.job import Job


@dataclass(slots=True)
class EngineCounters:
    """What an engine has done so far; seconds, tokens and jobs."""

    busy_s: float = 0.0
    prefill_busy_s: float = 0.0
    steps: int = 0
    prefill_tokens: int = 0
    """Prompt tokens computed, recomputed ones included."""
    prompt_tokens: int = 0
    """Prompt tokens of jobs whose prompt was looked up here."""
    cached_tokens: int = 0
    pulled_tokens: int = 0
    generated_tokens: int = 0
    decode_seq_s: float = 0.0
    """Integral of sequences over busy decode time: divided by it, the mean batch."""
    decode_busy_s: float = 0.0
    preemptions: int = 0
    kv_peak_tokens: int = 0
    finished: int = 0


@dataclass(slots=True)
class Step:
    """The forward pass, or the run of decode passes, that is under way."""

    begin: float
    end: float
    count: int
    first_s: float
    """Time of its first pass."""
    growth_s: float
    """By how much each pass takes longer than the one before it."""
    chunks: list[tuple[Job, int]]

    def run_s(self, count: int) -> float:
        return count * self.first_s + self.growth_s * count * (count - 1) / 2

    def passes_by(self, now: float) -> float:
        """How many passes fit between its beginning and `now`, not only whole ones."""
        elapsed = now - self.begin
        a, b = self.growth_s / 2, self.first_s - self.growth_s / 2
        # run_s(m) = a·m² + b·m
        return elapsed / b if a == 0 else (sqrt(b * b + 4 * a * elapsed) - b) / (2 * a)

    def cut(self, now: float) -> None:
        """End a run of passes with the pass that is under way at `now`."""
        count = max(1, ceil(self.passes_by(now) - 1e-9))
        if count < self.count:
            self.count = count
            self.end = max(now, self.begin + self.run_s(count))
