"""Orders of several gateways end the same everywhere, whoever was out of touch."""

from __future__ import annotations

import random

import msgspec
import pytest

from omni_proxy.config import Worker
from omni_proxy.messages import Role
from omni_proxy.workers.orders import FORGET_S, Order, Orders


def worker(name: str = "p0") -> Worker:
    return Worker.model_validate({"name": name, "url": f"http://{name}:1", "role": "prefill"})


def test_orders_go_over_what_a_source_says() -> None:
    orders = Orders()
    orders.put("p0", Order(1.0, drained=True, weight=3.0, role=Role.DECODE))
    orders.put("p1", Order(1.0, removed=True))
    found = orders.applied([worker("p0"), worker("p1"), worker("p2")])
    assert [w.name for w in found] == ["p0", "p2"]
    assert (found[0].down, found[0].weight, found[0].role) == (True, 3.0, Role.DECODE)
    assert found[1] == worker("p2")


def test_the_later_order_counts_and_a_lost_one_is_told_again() -> None:
    orders = Orders()
    orders.put("p0", Order(10.0, drained=True))
    changed, tell, faulty = orders.merge({}, 11.0)
    assert (changed, set(tell), faulty) == (False, {"p0"}, [])
    older, newer = (msgspec.json.encode(Order(at)) for at in (9.0, 12.0))
    assert orders.merge({"p0": older}, 13.0)[:2] == (False, tell)
    assert orders.merge({"p0": newer}, 13.0) == (True, {}, [])
    assert not orders.get("p0").drained


def test_what_was_taken_back_is_forgotten_in_the_end() -> None:
    orders = Orders()
    taken_back = {"p0": orders.put("p0", Order(1.0))}
    assert orders.merge(taken_back, 2.0) == (False, {}, [])
    assert orders.merge(taken_back, 2.0 + FORGET_S) == (False, {"p0": None}, [])
    assert orders.get("p0").at == 0.0


@pytest.mark.parametrize(
    "data", [b"", b"{", b'{"at":1,"weight":0}', b'{"at":1,"role":"baker"}', b'{"at":1,"added":{"name":"p0"}}', b"[]"]
)
def test_orders_that_make_no_sense_are_named_and_change_nothing(data: bytes) -> None:
    orders = Orders()
    assert orders.merge({"p0": data, "p1": b'{"at":1,"drained":true}'}, 2.0) == (True, {}, ["p0"])
    assert orders.get("p1").drained


@pytest.mark.parametrize("seed", range(20))
def test_gateways_that_lose_touch_end_the_same(seed: int) -> None:
    rng = random.Random(seed)
    gateways, shared, now = [Orders() for _ in range(3)], dict[str, bytes](), 0.0

    def meet(one: Orders) -> None:
        for name, data in one.merge(shared, now)[1].items():
            shared.pop(name, None) if data is None else shared.update({name: data})

    for _ in range(200):
        now += rng.random()
        one = rng.choice(gateways)
        if rng.random() < 0.5:
            name = f"p{rng.randrange(4)}"
            order = Order(now, drained=rng.choice((None, True)), weight=rng.choice((None, 2.0)))
            data = one.put(name, order)
            if rng.random() < 0.5:
                shared[name] = data
        elif rng.random() < 0.1:
            shared.clear()
        else:
            meet(one)
    for _ in range(2):
        for one in gateways:
            meet(one)
    first, *others = ([one.get(f"p{i}") for i in range(4)] for one in gateways)
    assert all(other == first for other in others)
