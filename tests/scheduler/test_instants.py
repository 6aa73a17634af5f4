from __future__ import annotations

import pytest

from omni_proxy.scheduler.instants import sooner


@pytest.mark.parametrize(
    ("one", "other", "first"),
    [(None, None, None), (1.0, None, 1.0), (None, 2.0, 2.0), (1.0, 2.0, 1.0), (2.0, 1.0, 1.0), (0.0, None, 0.0)],
)
def test_never_comes_after_all(one: float | None, other: float | None, first: float | None) -> None:
    assert sooner(one, other) == first
