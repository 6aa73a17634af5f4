"""Names that a config may use."""

from __future__ import annotations

import pytest

from omni_proxy.core import Core, CoreSettings
from omni_proxy.scheduler.registry import ORDERS, make_order
from omni_proxy.scheduler.settings import SchedulingSettings
from tests.scheduler.test_orders import waiting


@pytest.mark.parametrize("name", ORDERS)
def test_every_order_ranks(name: str) -> None:
    order = make_order(SchedulingSettings(order=name))
    ranks = order.ranks([waiting("a", 10), waiting("b", 20)], 1.0)
    assert len(ranks) == 2


def test_an_unknown_name_is_an_error_at_load() -> None:
    with pytest.raises(KeyError, match="no-such"):
        Core(CoreSettings(scheduling=SchedulingSettings(order="no-such")))
