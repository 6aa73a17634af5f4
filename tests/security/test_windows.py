"""Counts of the last minute, of several fronts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.access.shared import Counts
from omni_proxy.access.windows import FIELDS, Windows, in_use, reset_s, wait_s


def table(fronts: int = 1, tenants: int = 1) -> list[Windows]:
    cells = memoryview(bytearray(fronts * tenants * FIELDS * 8)).cast("q")
    return [Windows(cells, fronts, me) for me in range(fronts)]


def test_what_one_front_counts_the_others_see() -> None:
    one, two = table(fronts=2, tenants=2)
    one.begin(1, 10, 100.0)
    window = two.begin(1, 5, 100.0)
    assert one.used(1, 100.0) == two.used(1, 100.0) == ((2, 0), (15, 0), 2)
    two.end(1, 5, window, 101.0)
    two.spend(1, 7, 101.0)
    assert one.used(1, 101.0) == ((2, 0), (17, 0), 1)
    assert one.used(0, 101.0) == ((0, 0), (0, 0), 0)


def test_a_minute_fades_while_the_next_one_passes() -> None:
    (one,) = table()
    for _ in range(10):
        one.begin(0, 0, 119.0)
    requests, _, running = one.used(0, 150.0)
    assert (requests, running) == ((0, 10), 10)
    assert in_use(requests, 150.0) == 5
    assert one.used(0, 180.0)[0] == (0, 0)
    one.begin(0, 0, 150.0)
    assert one.used(0, 150.0)[0] == (1, 10)


def test_what_was_set_aside_returns_to_the_minute_it_came_from() -> None:
    (one,) = table()
    window = one.begin(0, 100, 119.0)
    one.end(0, 100, window, 121.0)
    assert one.used(0, 121.0) == ((0, 1), (0, 0), 0)
    window = one.begin(0, 100, 121.0)
    one.end(0, 100, window, 300.0)
    assert one.used(0, 300.0) == ((0, 0), (0, 0), 0)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 40), st.integers(0, 40), st.floats(0, 59.9))
def test_after_the_wait_there_is_room_and_not_before(
    present: int, before: int, limit: int, cost: int, passed: float
) -> None:
    cost = min(cost, limit)
    now = 600.0 + passed
    wait = wait_s((present, before), limit, cost, now)
    later = now + wait

    def used(at: float) -> float:
        return in_use((present, before) if at < 660 else (0, present) if at < 720 else (0, 0), at)

    assert 0 <= wait <= 120
    assert used(later + 1e-6) + cost <= limit + 1e-6
    if wait > 0.01:
        assert used(later - 0.01) + cost > limit
    assert used(now + reset_s((present, before), now) + 1e-6) == pytest.approx(0, abs=1e-4)


def test_fronts_share_a_file_and_a_new_one_has_nothing_running(tmp_path: Path) -> None:
    first = Counts(tmp_path, 2, 0).open(["a", "b"])
    second = Counts(tmp_path, 2, 1).open(["a", "b"])
    first.begin(0, 3, 10.0)
    assert second.used(0, 10.0) == ((1, 0), (3, 0), 1)
    again = Counts(tmp_path, 2, 0).open(["a", "b"])
    again.nothing_runs(0)
    assert second.used(0, 10.0) == ((1, 0), (3, 0), 0)
    assert Counts(tmp_path, 2, 0).open(["b"]).used(0, 10.0) == ((0, 0), (0, 0), 0)
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())
