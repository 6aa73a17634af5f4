"""The simulation of steering by expert profile: deterministic, and what it must show in cases that are known."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.placement.steering import POLICIES, WORKERS, run


@pytest.mark.parametrize("name", list(POLICIES))
def test_one_seed_gives_one_result(name: str) -> None:
    assert run(POLICIES[name], 1.0, False, 80, 3) == run(POLICIES[name], 1.0, False, 80, 3)


def test_live_placement_is_better_than_a_fixed_one_where_classes_are_alike() -> None:
    plain = next(iter(POLICIES.values()))
    fixed, live = (run(plain, 0.0, live, WORKERS * 600, 0) for live in (False, True))
    assert live[0] < fixed[0]
    assert live[2] > fixed[2]


def test_all_on_one_worker_is_slower() -> None:
    plain, *_ = POLICIES.values()
    spread = run(plain, 0.5, False, 400, 1)
    heaped = run(lambda workers, kind, profiles: 0, 0.5, False, 400, 1)
    assert np.isfinite(heaped).all()
    assert heaped[2] < spread[2]
