"""What an operator may set of scheduling. Pure; the config's names and checks are in `config.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class LengthBucket:
    """Workers that are preferred for prompts of up to so many tokens; None: for all longer ones."""

    up_to_tokens: int | None
    workers: tuple[str, ...]


MECHANISMS: Final[Mapping[str, str]] = {
    "places": "who waits for a worker keeps its place there",
    "foreseen": "blocks count that prompts under way will leave in caches",
    "homes": "prompts that nobody is known to hold go to the home of their session",
    "ahead": "more is sent ahead when many wait",
    "depth": "work weighs more when many wait",
    "answers": "of those that wait for a decode worker the shortest answer goes first",
}
"""What can be left out by name, beside what the other settings switch off."""


@dataclass(frozen=True, slots=True)
class SchedulingSettings:
    """Who goes first, and how far a prompt may wait for a worker that holds its prefix. Seconds and tokens as named."""

    order: str = "weighted"
    length_weight: float = 0.8
    wait_weight: float = 0.2
    apc_weight: float = 0.0
    """Weights of the `weighted` order."""
    starvation_timeout_s: float = 30.0
    """Who has waited longer goes before all others, the longest waiting first, as far as their share goes."""
    starved_share: float = 0.5
    """Of the workers' time that those have who have waited too long while others wait, too; 1: all."""
    ageing: float | None = 1.5
    """Nobody of a class waits for longer than that many times the longest wait in order of arrival, if that can be had.

    None: only the timeout bounds waits."""
    fair_tenants: bool = False
    """Share the workers between the tenants that wait, by weight."""
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    """1 for a tenant that is not named."""
    ttft_target_s: float | None = None
    """For the order `deadline`: the target of a request that names none itself, and whose class has none."""
    ttft_targets_s: Mapping[int, float] = field(default_factory=dict)
    """Targets by the client's `priority`."""
    tpot_limit_s: float | None = None
    """No answer is sent to a worker whose steps would take longer then; None: no limit."""
    tpot_limits_s: Mapping[int, float] = field(default_factory=dict)
    """Limits by the client's `priority`."""
    length_buckets: tuple[LengthBucket, ...] = ()
    """Preferred workers by prompt length, in order of length."""
    overflow_s: float = 1.0
    """A prompt leaves the workers of its bucket for one that is better by so much."""
    elastic_roles: bool = False
    """Mixed workers stand on one side each, and change it as the load does."""
    model_modes: Mapping[str, str] = field(default_factory=dict)
    """Modes by model, where one is not served like the others; `auto` picks."""
    model_aggregate_below_tokens: Mapping[str, int] = field(default_factory=dict)
    """As the next one, by model."""
    aggregate_below_tokens: int | None = 0
    """Prompts with fewer tokens to compute need no handoff; 0: every prompt is handed over; None: by predicted cost."""
    without: frozenset[str] = frozenset()
    """Mechanisms that are left out (`MECHANISMS`): to measure what each gains; no operator's choice."""
