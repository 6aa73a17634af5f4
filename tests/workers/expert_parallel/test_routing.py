"""Rows reach a rank that holds their expert, in the parts that the shares give."""

from __future__ import annotations

import numpy as np
import pytest

from omni_proxy.workers.engine.expert_parallel.routing import LayerRouter
from omni_proxy.workers.engine.placement.plan import Placement


@pytest.fixture
def router() -> LayerRouter:
    slots = np.array([[[0, 1, 3], [0, 2, -1]]])
    shares = np.array([[[0.2, 1.0, 1.0], [0.8, 1.0, 0.0]]])
    return LayerRouter(Placement(4, slots, shares), 0)


def test_every_row_goes_to_a_holder_of_its_expert(router: LayerRouter) -> None:
    ids = np.random.default_rng(0).integers(0, 4, 200)
    route = router.route(ids)
    sent = ids[route.order]
    places = np.repeat(np.arange(6), route.counts.ravel())
    assert (router.slots.ravel()[places] == sent).all()
    assert sorted(route.order.tolist()) == list(range(200))


def test_shares_are_followed_over_many_small_steps(router: LayerRouter) -> None:
    total = np.sum([router.route(np.array([0])).counts for _ in range(500)], axis=0)
    assert total[0, 0] / 500 == pytest.approx(0.2, abs=0.01)
    many = router.route(np.zeros(500, np.int64)).counts
    assert many[1, 0] / 500 == pytest.approx(0.8, abs=0.01)


def test_a_step_without_rows(router: LayerRouter) -> None:
    route = router.route(np.zeros(0, np.int64))
    assert not len(route.order)
    assert not route.counts.any()


def test_new_shares_and_slots_hold_at_once(router: LayerRouter) -> None:
    router.update(np.array([[1, 2, 3], [0, -1, -1]]), np.array([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]))
    assert router.route(np.zeros(9, np.int64)).counts.tolist() == [[0, 0, 0], [9, 0, 0]]
    assert router.place_of(2, 0) == 1
