"""What runs next, and where."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from omni_proxy.config.section import PositiveSeconds, Section, Weight


class OrderName(StrEnum):
    """Who goes first among those that wait for a prefill worker (docs/scheduling.md)."""

    WEIGHTED = "weighted"
    FCFS = "fcfs"
    SHORTEST_UNCACHED = "shortest-uncached"
    DEADLINE = "deadline"
    OMNI_NGINX = "omni-nginx"


PriorityClass = Annotated[int, Field(ge=-(2**63) + 1, le=2**63 - 1)]


class LengthBucket(Section):
    """Workers that are preferred for prompts of some length, from that of the bucket before on."""

    up_to_tokens: Annotated[int, Field(ge=1)] | None = None
    """None, in the last one only: all that are longer."""
    workers: Annotated[tuple[str, ...], Field(min_length=1)]


class Scheduling(Section):
    """What runs next, and where."""

    order: OrderName = OrderName.WEIGHTED
    length_weight: Weight = 0.8
    wait_weight: Weight = 0.2
    apc_weight: Weight = 0.0
    """Weights of the order `weighted`; those of length and wait are also its meaning in Omni Proxy for nginx."""
    starvation_timeout_s: PositiveSeconds = 30.0
    """Who has waited longer goes before all others, as far as `starved_share` goes."""
    starved_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Of the workers' time that the late have while others wait, too; 1: all. Not for orders `fcfs` and `deadline`."""
    ageing: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = 1.5
    """Waits are bounded by that many times the longest wait in order of arrival lately; null: by the timeout only."""
    fair_tenants: bool = False
    """Share the workers between tenants."""
    tenant_weights: dict[str, Annotated[float, Field(gt=0, le=1e6)]] = {}
    ttft_target_s: PositiveSeconds | None = None
    """For the order `deadline`: the target of requests that name none, where their class has none either."""
    ttft_targets_s: dict[PriorityClass, PositiveSeconds] = {}
    """Targets by the client's `priority`."""
    tpot_limit_s: PositiveSeconds | None = None
    """An answer waits rather than go to a worker whose steps would then take longer than this."""
    tpot_limits_s: dict[PriorityClass, PositiveSeconds] = {}
    """Limits by the client's `priority`; that of whoever runs on a worker already holds there, too."""
    length_buckets: tuple[LengthBucket, ...] = ()
    """Preferred workers by prompt length, the shortest first."""
    overflow_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """A prompt leaves the workers of its bucket for one that would serve it sooner by so much."""
    elastic_roles: bool = False
    """Mixed workers prefill or decode, and change sides as the load does; else each does both for its requests."""
    aggregate_below_tokens: Annotated[int, Field(ge=0)] | None = 0
    """Prompts with fewer tokens to compute need no handoff; 0: all are handed over; null: decided by cost.

    By cost, prompts take the time on decode workers that answers there are ahead of their `tpot_limit_s`."""

    @model_validator(mode="after")
    def _weights_weigh(self) -> Self:
        if self.order is OrderName.WEIGHTED and self.length_weight + self.wait_weight + self.apc_weight <= 0:
            raise ValueError("order 'weighted' needs a weight above 0")
        return self

    @model_validator(mode="after")
    def _buckets_ascend(self) -> Self:
        bounds = [bucket.up_to_tokens for bucket in self.length_buckets]
        inner = [bound for bound in bounds[:-1] if bound is not None]
        if len(inner) < len(bounds) - 1:
            raise ValueError("length_buckets: only the last one may be without 'up_to_tokens'")
        last = bounds[-1] if bounds else None
        ordered = [*inner, last] if last is not None else inner
        if ordered != sorted(set(ordered)):
            raise ValueError(f"length_buckets: 'up_to_tokens' must rise from one to the next, not {ordered}")
        return self


class Prewarm(Section):
    """Compute what next turns will begin with while prefill workers are idle (docs/prewarm.md), and how much of it."""

    share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Of each prefill worker's time."""
    tokens_per_s: Annotated[float, Field(gt=0)] | None = None
    """Over all workers; None: no bound but the share."""
    max_tokens: Annotated[int, Field(ge=16)] = 4096
    """Most tokens that one next turn may leave to compute: so long may real work be held up."""
    wait_s: Annotated[float, Field(gt=0)] = 60.0
    """How long one may wait for its worker to be idle."""
    priority: int | None = None
    """The field `priority` of what is sent, for engines that schedule by it; None: none is sent."""
