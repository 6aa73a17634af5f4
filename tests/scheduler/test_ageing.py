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
    ("fair_s", "factor", "bound_s"),
    [(4.0, 1.0, 4.0), (4.0, 2.0, 8.0), (0.1, 1.0, 1.0), (99, 1.0, 30), (4, None, 30)],
)
def test_the_bound_is_the_wait_in_order_of_arrival(fair_s: float, factor: float | None, bound_s: float) -> None:
    ageing = Ageing(30.0, 0.5, factor, True)
    request = waiting("a", 10, since=100.0)
    assert not ageing.is_late(request, 129.9), "as long as nobody had to wait only the timeout counts"
    ageing.lines_up(fair_s, 100.0)
    assert not ageing.is_late(request, 100.0 + bound_s - 0.01)
    assert ageing.is_late(request, 100.0 + bound_s)
    assert ageing.is_starved(request, 100.0 + bound_s) == (bound_s == 30.0)


def test_the_longest_wait_of_the_last_minute_counts() -> None:
    ageing = Ageing(30.0, 0.5, 1.0, True)
    for at, fair_s in ((0.0, 4.0), (10.0, 8.0), (20.0, 2.0), (30.0, 3.0)):
        ageing.lines_up(fair_s, at)
    assert ageing.bound_s == 8.0
    ageing.lines_up(1.5, 75.0)
    assert ageing.bound_s == 3.0, "that of 10 s is forgotten, and 2 s were less than the 3 s after them"


def _pressed(rows: list[tuple[float, float]], late: bool = False) -> str:
    """Who must go before the last row, at 10 s with a bound of 10 s: rows of since when and seconds of work."""
    requests = []
    for number, (since, work_s) in enumerate(rows):
        requests.append(waiting(str(number), 10, since=since))
        requests[-1].work_s = work_s
    return "".join(sorted(Ageing(10.0, 0.5, None, True).pressed(requests, requests[-1], late, 10.0)))


def test_the_short_go_first_while_everybody_can_be_in_time() -> None:
    assert _pressed([(2.0, 1.0), (9.0, 0.1)]) == ""  # 2 s are left for 1 s of work
    assert _pressed([(0.9, 0.6), (9.0, 0.1)]) == "0"  # 0.9 s for 0.6 s


def test_all_up_to_the_tightest_must_go() -> None:
    assert _pressed([(2.0, 1.0), (3.0, 1.9), (9.0, 3.0), (9.5, 0.1)]) == "01"


def test_where_not_all_can_be_in_time_the_largest_is_given_up() -> None:
    assert _pressed([(2.0, 5.0), (3.0, 2.7), (9.5, 0.1)]) == "1"
    assert _pressed([(2.0, 50.0), (3.0, 1.0), (9.5, 0.1)]) == ""


def test_beside_the_late_the_others_have_what_their_share_leaves() -> None:
    assert _pressed([(3.0, 1.5), (9.5, 0.1)]) == ""  # 3 s for 1.5 s
    assert _pressed([(3.0, 1.5), (9.5, 0.1)], late=True) == "0"  # 3 s for twice as much


@given(st.lists(st.tuples(st.floats(0.0, 9.9), st.floats(0.01, 3.0)), min_size=2, max_size=12))
def test_in_the_order_that_results_nobody_is_late_who_would_not_be_in_order_of_arrival(
    rows: list[tuple[float, float]],
) -> None:
    """One worker, shortest first, nobody new: served to the end under the rule."""
    requests = []
    for number, (since, work_s) in enumerate(rows):
        requests.append(waiting(str(number), 10, since=since))
        requests[-1].work_s = work_s
    by_age = sorted(requests, key=lambda r: r.queued_at)
    end, feasible = 10.0, True
    for request in by_age:
        end += request.work_s
        feasible = feasible and end <= request.queued_at + 10.0
    now, left, ageing = 10.0, list(requests), Ageing(10.0, 0.5, None, True)
    while left:
        first = min(left, key=lambda r: (r.work_s, r.queued_at))
        pressed = ageing.pressed(left, first, False, now)
        chosen = min([r for r in left if r.rid in pressed] or [first], key=lambda r: r.queued_at)
        now += chosen.work_s
        left.remove(chosen)
        assert not feasible or now <= chosen.queued_at + 10.0 + 1e-9


@given(st.lists(st.tuples(st.booleans(), st.floats(0.01, 2.0))), st.sampled_from([0.25, 0.5, 0.8, 1.0]))
def test_the_late_get_their_share_to_within_one_prompt(wanted: list[tuple[bool, float]], share: float) -> None:
    """Whoever has the turn takes it; what each side had differs from its share by no more than one prompt."""
    ageing, had = Ageing(30.0, share, 1.0, True), {True: 0.0, False: 0.0}
    for _, cost in wanted:
        late = ageing.late_first
        ageing.took(late, cost)
        had[late] += cost
    total = had[True] + had[False]
    assert abs(had[True] - share * total) <= 2.0 + 1e-9
    ageing.even()
    assert ageing.late_first


def _line_up(rows: list[tuple[int, float, int]], **settings: object) -> list[str]:
    """Who goes first at 10 s: rows of tokens, since when, class; the longest wait in order of arrival was 3 s."""
    lineup = make_lineup(SchedulingSettings(**{"order": "shortest-uncached", "ageing": 1.0, **settings}))  # type: ignore[arg-type]
    queue = WaitingQueue()
    requests: list[Request] = []
    for number, (tokens, since, priority) in enumerate(rows):
        request = waiting(str(number), tokens, since=since, priority=priority)
        lineup.lines_up(3.0, 9.0)
        queue.push(request, ("m",), 99.0)
        requests.append(request)
    first = lineup.head(queue, 9, 10.0)
    lineup.took(first[0], 1, 5.0, 10.0)
    queue.remove(first[0])
    return [first[0].rid, *[r.rid for r in lineup.head(queue, 9, 10.0)]]


def test_the_late_go_first_in_their_class_then_it_is_the_others_turn() -> None:
    rows = [(900, 1.0, 0), (10, 9.5, 0), (20, 9.5, 0), (800, 2.0, 0)]
    assert _line_up(rows) == ["0", "1", "2", "3"]
    assert _line_up(rows, starved_share=1.0) == ["0", "3", "1", "2"]
    assert _line_up(rows, ageing=None) == ["1", "2", "3", "0"]


def test_no_class_is_overtaken_by_the_late_of_another() -> None:
    assert _line_up([(900, 1.0, 5), (10, 9.5, 0), (20, 9.5, 0)]) == ["1", "2", "0"]


def test_the_starved_overtake_every_class_as_far_as_their_share_goes() -> None:
    rows = [(900, 1.0, 5), (10, 9.5, 0), (800, 2.0, 7), (20, 9.5, 0)]
    assert _line_up(rows, starvation_timeout_s=7.0) == ["0", "1", "3", "2"]
    assert _line_up(rows, starvation_timeout_s=7.0, starved_share=1.0) == ["0", "2", "1", "3"]


@pytest.mark.parametrize("order", ["fcfs", "deadline"])
def test_orders_that_pass_nobody_over_age_nobody(order: str) -> None:
    rows = [(900, 1.0, 5), (10, 9.5, 0), (800, 2.0, 7), (20, 9.5, 0)]
    assert _line_up(rows, order=order) == ["1", "3", "0", "2"]
