"""Who goes first, order by order."""

from __future__ import annotations

import pytest

from omni_proxy.lifecycle.request import Request
from omni_proxy.scheduler.registry import make_order
from omni_proxy.scheduler.settings import SchedulingSettings
from tests.core.steps import spec


def waiting(rid: str, tokens: int, since: float = 0.0, cached: int = 0, **more: object) -> Request:
    """A request that lines up at `since`, with `cached` tokens on some worker."""
    request = Request(rid, spec(tokens, **more), since)
    request.match({"p0": cached} if cached else {}, since)
    return request


def order_of(requests: list[Request], now: float, name: str, **settings: object) -> str:
    order = make_order(SchedulingSettings(order=name, **settings))  # type: ignore[arg-type]
    ranked = sorted(zip(order.ranks(requests, now), [r.rid for r in requests], strict=True))
    return "".join(rid for _, rid in ranked)


LONG_OLD = waiting("a", 1000, since=0.0)
SHORT_NEW = waiting("b", 100, since=9.0)
CACHED = waiting("c", 1000, since=5.0, cached=950)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("fcfs", "acb"), ("shortest-uncached", "cba"), ("omni-nginx", "bac"), ("weighted", "cba"), ("deadline", "acb")],
)
def test_orders_differ(name: str, expected: str) -> None:
    assert order_of([LONG_OLD, SHORT_NEW, CACHED], 10.0, name) == expected


def test_the_weights_weigh() -> None:
    requests = [LONG_OLD, SHORT_NEW, CACHED]
    assert order_of(requests, 10.0, "weighted", length_weight=0.0, wait_weight=1.0) == "acb"
    assert order_of(requests, 10.0, "weighted", length_weight=1.0, wait_weight=0.0) == "cba"
    assert order_of(requests, 10.0, "weighted", length_weight=0.0, wait_weight=0.5, apc_weight=1.0) == "cab"


def test_the_formula_of_omni_proxy_for_nginx() -> None:
    order = make_order(SchedulingSettings(order="omni-nginx"))
    (first, second) = order.ranks([waiting("a", 100, since=0.0), waiting("b", 50, since=0.9)], 1.0)
    assert first == pytest.approx(-(0.8 * 0 + 0.2 * 1.0))
    assert second == pytest.approx(-(0.8 * 0.5 + 0.2 * 0.1))
    (alone,) = order.ranks([waiting("a", 100, since=0.0)], 0.01)
    assert alone == pytest.approx(-0.2 * 0.01 / 0.05), "waits are compared with 50 ms at least"


def test_deadlines_that_can_be_met_go_before_those_that_were_missed() -> None:
    requests = [
        waiting("a", 1, ttft_target_s=1.0),
        waiting("b", 1, ttft_target_s=30.0),
        waiting("c", 1),
        waiting("d", 1, ttft_target_s=12.0),
    ]
    assert order_of(requests, 5.0, "deadline", ttft_target_s=20.0) == "dcba"
