"""What latency a request is to have: targets of its own, of its priority class, or of everybody. Pure.

Two kinds: how soon its first token should come (TTFT), and how long each further one may take (TPOT).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from omni_proxy.messages import RequestSpec
from omni_proxy.scheduler.settings import SchedulingSettings


class Targets:
    """Targets by class; seconds."""

    def __init__(self, settings: SchedulingSettings) -> None:
        self._ttft_s: Mapping[int, float] = settings.ttft_targets_s
        self._tpot_s: Mapping[int, float] = settings.tpot_limits_s
        self._any_ttft_s = settings.ttft_target_s
        self._any_tpot_s = inf if settings.tpot_limit_s is None else settings.tpot_limit_s
        limits = [limit for limit in (*self._tpot_s.values(), self._any_tpot_s) if limit < inf]
        self.loosest_tpot_s = max(limits, default=inf)
        """Of all limits that somebody set; infinite where nobody did."""

    def ttft_s(self, spec: RequestSpec) -> float | None:
        """In so many seconds after its arrival the first token should come; None: nobody says."""
        if spec.ttft_target_s is not None:
            return spec.ttft_target_s
        return self._ttft_s.get(spec.priority, self._any_ttft_s) if self._ttft_s else self._any_ttft_s

    def tpot_s(self, spec: RequestSpec) -> float:
        """So long a step of its answer may take; infinite where nobody says."""
        return self._tpot_s.get(spec.priority, self._any_tpot_s) if self._tpot_s else self._any_tpot_s


class StepLimits:
    """The limits of all answers that one worker makes, of which the tightest holds for its steps."""

    __slots__ = ("_counts", "_total", "tightest")

    def __init__(self) -> None:
        self._counts: dict[float, int] = {}
        self._total = 0
        self.tightest = inf

    def __len__(self) -> int:
        """How many of them have a limit."""
        return self._total

    def add(self, limit_s: float) -> None:
        """One more answer; an infinite limit is none."""
        if limit_s < inf:
            self._total += 1
            self._counts[limit_s] = self._counts.get(limit_s, 0) + 1
            self.tightest = min(self.tightest, limit_s)

    def remove(self, limit_s: float) -> None:
        """One less, of those that were added."""
        if limit_s == inf:
            return
        self._total -= 1
        left = self._counts.get(limit_s, 0) - 1
        if left > 0:
            self._counts[limit_s] = left
        else:
            del self._counts[limit_s]
            self.tightest = min(self._counts, default=inf)
