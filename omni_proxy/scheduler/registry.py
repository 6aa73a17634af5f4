"""The policies that a config may name. Pure; an unknown name is an error at load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from omni_proxy.scheduler.ageing import Ageing
from omni_proxy.scheduler.lineup import Lineup, Shares
from omni_proxy.scheduler.orders import Deadline, FirstCome, OmniNginx, Order, ShortestUncached, Weighted
from omni_proxy.scheduler.settings import SchedulingSettings

ORDERS: Final[Mapping[str, type[Order]]] = {
    "weighted": Weighted,
    "fcfs": FirstCome,
    "shortest-uncached": ShortestUncached,
    "deadline": Deadline,
    "omni-nginx": OmniNginx,
}

PREFER_SHORT: Final = frozenset({"weighted", "shortest-uncached", "omni-nginx"})
"""Orders in which long prompts can be passed over for ever."""


def make_order(settings: SchedulingSettings) -> Order:
    """The order of that name. Raises KeyError."""
    kinds: Mapping[str, type] = ORDERS
    order: Order = kinds[settings.order](settings)
    return order


def make_lineup(settings: SchedulingSettings) -> Lineup:
    """The order with what stands above it."""
    shares = Shares(settings.tenant_weights) if settings.fair_tenants else None
    prefers_short = settings.order in PREFER_SHORT
    ageing = Ageing(
        settings.starvation_timeout_s,
        settings.starved_share if prefers_short else 1.0,
        settings.ageing if prefers_short else None,
        prefers_short,
    )
    return Lineup(make_order(settings), ageing, shares)
