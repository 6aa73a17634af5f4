"""When a worker is free, when it may get more, and what its answers teach."""

from __future__ import annotations

import pytest

from omni_proxy.scheduler.backlog import LEAD_S, Backlog
from tests.core.steps import p

A, B, C = (p(rid, 1, "p0") for rid in "abc")


def test_an_idle_worker_is_free_and_open() -> None:
    backlog = Backlog()
    assert backlog.free_at(5.0) == 5.0
    assert backlog.opens_at(5.0, LEAD_S) == 5.0
    assert backlog.overdue_s(5.0) == 0.0
    assert backlog.next_check(5.0) is None


def test_prompts_add_up_and_the_next_is_sent_just_before_the_end() -> None:
    backlog = Backlog()
    one = backlog.cost.seconds(2000, 0)
    assert backlog.granted(A, 2000, 0, 1.0) == pytest.approx(1.0 + one)
    assert backlog.opens_at(1.0, LEAD_S) == pytest.approx(1.0 + one - LEAD_S)
    assert backlog.granted(B, 2000, 0, 1.0) == pytest.approx(1.0 + 2 * one)
    assert backlog.free_at(1.0) == pytest.approx(1.0 + 2 * one)
    assert backlog.opens_at(1.0, LEAD_S) is None, "a whole prompt waits there: more only after an answer"
    backlog.computed(A, 2000, 0, 1.0 + one)
    assert backlog.opens_at(1.0 + one, LEAD_S) == pytest.approx(1.0 + 2 * one - LEAD_S)
    backlog.computed(B, 2000, 0, 2.0)
    assert len(backlog) == 0
    assert backlog.total_s == 0.0


def test_what_is_overdue_is_taken_to_need_as_long_again() -> None:
    backlog = Backlog()
    one = backlog.cost.seconds(2000, 0)
    backlog.granted(A, 2000, 0, 0.0)
    assert backlog.overdue_s(one) == 0.0
    assert backlog.overdue_s(one + 3.0) == pytest.approx(3.0)
    assert backlog.free_at(one + 3.0) == pytest.approx(one + 6.0)
    assert backlog.next_check(one + 3.0) == pytest.approx(one + 6.0)


def learn(backlog: Backlog, *answers: tuple[float, int]) -> None:
    """Prompts one after another on a worker that is never idle: (seconds, tokens)."""
    now = 0.0
    leases = [p(str(n), 1, "p0") for n in range(len(answers) + 1)]
    backlog.granted(leases[0], answers[0][1], 0, now)
    for n, (seconds, tokens) in enumerate(answers):
        following = answers[n + 1][1] if n + 1 < len(answers) else 1
        backlog.granted(leases[n + 1], following, 0, now)
        now += seconds
        backlog.computed(leases[n], tokens, 0, now)


def test_the_time_between_answers_teaches() -> None:
    backlog = Backlog()
    learn(backlog, *[(1.0, 1000), (2.0, 2000)] * 20)
    assert backlog.cost.seconds(1500, 0) == pytest.approx(1.5, rel=0.05)


def test_prompts_of_one_pass_are_learned_together() -> None:
    backlog = Backlog()
    for n in range(40):
        leases = [p(f"{n}-{k}", 1, "p0") for k in range(4)]
        for lease in leases:
            backlog.granted(lease, 1000, 0, 10.0 * n)
        for lease in leases:
            backlog.computed(lease, 1000, None, 10.0 * n + 4.0)
    assert 4 * backlog.cost.seconds(1000, 0) == pytest.approx(4.0, rel=0.05)
    assert backlog.cost.fit.error < 0.2


@pytest.mark.parametrize("cached", [0, 400])
def test_a_worker_that_counts_other_tokens_than_were_estimated(cached: int) -> None:
    backlog = Backlog()
    for n in range(20):
        lease, begin = p(str(n), 1, "p0"), 10.0 * n
        backlog.granted(lease, 3000, 0, begin)
        backlog.computed(lease, 800, cached, begin + 2.0)
    assert backlog.cost.seconds(3000 - cached * 3000 // 800, cached * 3000 // 800) == pytest.approx(2.0, rel=0.05)


def test_answers_in_quick_succession_are_not_one_pass_for_ever() -> None:
    backlog, now = Backlog(), 5.0
    backlog.granted(p("0", 1, "p0"), 100, 0, now)
    for n in range(40):
        backlog.granted(p(str(n + 1), 1, "p0"), 100, 0, now)
        now += 0.0004
        backlog.computed(p(str(n), 1, "p0"), 100, 0, now)
    assert backlog.cost.fit.observations >= 15
    assert backlog.cost.seconds(100, 0) == pytest.approx(0.0004, rel=0.05)


def test_what_a_lost_prompt_held_up_teaches_nothing() -> None:
    backlog = Backlog()
    for lease in (A, B, C):
        backlog.granted(lease, 100, 0, 0.0)
    backlog.dropped(A, 50.0)
    backlog.computed(B, 100, 0, 51.0)
    backlog.computed(C, 100, 0, 51.1)
    backlog.granted(A, 100, 0, 60.0)
    backlog.computed(A, 100, 0, 60.2)
    assert backlog.cost.seconds(100, 0) < 1.0
    backlog.dropped(A, 61.0)
    backlog.computed(B, 100, 0, 61.0)
