"""The policies that a config may name. Pure; an unknown name is an error at load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

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


def make_order(settings: SchedulingSettings) -> Order:
    """The order of that name. Raises KeyError."""
    kinds: Mapping[str, type] = ORDERS
    order: Order = kinds[settings.order](settings)
    return order


def make_lineup(settings: SchedulingSettings) -> Lineup:
    """The order with what stands above it."""
    shares = Shares(settings.tenant_weights) if settings.fair_tenants else None
    return Lineup(make_order(settings), settings.starvation_timeout_s, shares)
