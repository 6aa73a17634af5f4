"""Who is late, and how much of the workers' time the late have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.lifecycle.request import Request
from omni_proxy.scheduler.ageing import Ageing
from omni_proxy.scheduler.queue import WaitingQueue
from omni_proxy.scheduler.registry import make_lineup
from omni_proxy.scheduler.settings import SchedulingSettings
from tests.scheduler.test_orders import waiting


@pytest.mark.parametrize(
    ("fair_s", "factor", "late_after"),
    [(4.0, 1.0, 4.0), (4.0, 2.0, 8.0), (0.1, 1.0, 1.0), (99, 1.0, 30), (4, None, 30)],
)
def test_late_is_who_waited_as_long_as_in_order_of_arrival(
    fair_s: float, factor: float | None, late_after: float
) -> None:
    ageing = Ageing(30.0, 0.5, factor)
    request = waiting("a", 10, since=100.0)
    assert not ageing.is_late(request, 129.9), "before it lines up only the timeout counts"
    ageing.lines_up(request, fair_s)
    assert not ageing.is_late(request, 100.0 + late_after - 0.01)
    assert ageing.is_late(request, 100.0 + late_after)
    assert ageing.is_starved(request, 100.0 + late_after) == (late_after == 30.0)


def test_who_lines_up_again_is_late_no_later_than_before() -> None:
    ageing = Ageing(30.0, 0.5, 1.0)
    request = waiting("a", 10, since=0.0)
    ageing.lines_up(request, 4.0)
    ageing.lines_up(request, 20.0)
    assert ageing.is_late(request, 4.0)


@given(st.lists(st.tuples(st.booleans(), st.floats(0.01, 2.0))), st.sampled_from([0.25, 0.5, 0.8, 1.0]))
def test_the_late_get_their_share_to_within_one_prompt(wanted: list[tuple[bool, float]], share: float) -> None:
    """Whoever has the turn takes it; what each side had differs from its share by no more than one prompt."""
    ageing, had = Ageing(30.0, share, 1.0), {True: 0.0, False: 0.0}
    for _, cost in wanted:
        late = ageing.late_first
        ageing.took(late, cost)
        had[late] += cost
    total = had[True] + had[False]
    assert abs(had[True] - share * total) <= 2.0 + 1e-9
    ageing.even()
    assert ageing.late_first


def _line_up(rows: list[tuple[int, float, int]], **settings: object) -> list[str]:
    """Who goes first at 10 s: rows of tokens, since when, class; each would wait 3 s in order of arrival."""
    lineup = make_lineup(SchedulingSettings(**{"order": "shortest-uncached", **settings}))  # type: ignore[arg-type]
    queue = WaitingQueue()
    requests: list[Request] = []
    for number, (tokens, since, priority) in enumerate(rows):
        request = waiting(str(number), tokens, since=since, priority=priority)
        lineup.lines_up(request, 3.0)
        queue.push(request, ("m",), 99.0)
        requests.append(request)
    first = lineup.head(queue, 9, 10.0)
    lineup.took(first[0], 1, 5.0, 10.0)
    queue.remove(first[0])
    return [first[0].rid, *[r.rid for r in lineup.head(queue, 9, 10.0)]]


def test_the_aged_go_first_in_their_class_then_it_is_the_others_turn() -> None:
    rows = [(900, 1.0, 0), (10, 9.5, 0), (20, 9.5, 0), (800, 2.0, 0)]
    assert _line_up(rows) == ["0", "1", "2", "3"]
    assert _line_up(rows, starved_share=1.0) == ["0", "3", "1", "2"]
    assert _line_up(rows, ageing=None) == ["1", "2", "3", "0"]


def test_no_class_is_overtaken_by_the_aged_of_another() -> None:
    assert _line_up([(900, 1.0, 5), (10, 9.5, 0), (20, 9.5, 0)]) == ["1", "2", "0"]


def test_the_starved_overtake_every_class_as_far_as_their_share_goes() -> None:
    rows = [(900, 1.0, 5), (10, 9.5, 0), (800, 2.0, 7), (20, 9.5, 0)]
    assert _line_up(rows, starvation_timeout_s=7.0) == ["0", "1", "3", "2"]
    assert _line_up(rows, starvation_timeout_s=7.0, starved_share=1.0) == ["0", "2", "1", "3"]


@pytest.mark.parametrize("order", ["fcfs", "deadline"])
def test_orders_that_pass_nobody_over_age_nobody(order: str) -> None:
    rows = [(900, 1.0, 5), (10, 9.5, 0), (800, 2.0, 7), (20, 9.5, 0)]
    assert _line_up(rows, order=order) == ["1", "3", "0", "2"]
