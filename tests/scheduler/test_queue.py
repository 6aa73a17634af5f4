"""Lines, turns, deadlines."""

from __future__ import annotations

import pytest

from omni_proxy.lifecycle.request import Request
from omni_proxy.scheduler.queue import WaitingQueue
from tests.core.steps import spec

LINE, OTHER = ("m",), ("n",)


def request(rid: str, tokens: int = 10) -> Request:
    return Request(rid, spec(tokens), 0.0)


def queue_of(*rids: str) -> WaitingQueue:
    queue = WaitingQueue()
    for number, rid in enumerate(rids):
        queue.push(request(rid), LINE, float(number))
    return queue


def served(queue: WaitingQueue, *stuck: str) -> list[str]:
    """Serve everyone but those who find no room."""
    turns = []
    for one in queue.fronts():
        turns.append(one.rid)
        if one.rid not in stuck:
            queue.remove(one)
    return turns


def test_first_come_first_served() -> None:
    queue = queue_of("b", "a", "c")
    assert served(queue) == ["b", "a", "c"]
    assert (len(queue), queue.tokens, queue.next_deadline()) == (0, 0, None)


def test_a_retry_goes_before_all_others() -> None:
    queue = queue_of("a", "b")
    queue.push(request("x"), OTHER, 1.0)
    queue.push(request("r"), LINE, 1.0, first=True)
    queue.push(request("y"), OTHER, 1.0, first=True)
    assert served(queue) == ["y", "r", "a", "b", "x"]


def test_a_line_stops_at_the_first_without_room_and_others_go_on() -> None:
    queue = queue_of("a", "b", "c")
    queue.push(request("x"), OTHER, 1.0)
    queue.push(request("y"), OTHER, 1.0)
    assert served(queue, "b") == ["a", "b", "x", "y"]
    assert [r.rid for r in queue.requests()] == ["b", "c"]


def test_lines_take_turns_by_arrival() -> None:
    queue = WaitingQueue()
    for number, rid in enumerate("abcd"):
        queue.push(request(rid), (LINE, OTHER)[number % 2], 1.0)
    assert served(queue) == ["a", "b", "c", "d"]


def test_nobody_waits_twice() -> None:
    queue = queue_of("a")
    with pytest.raises(AssertionError, match="waits already"):
        queue.push(request("a"), OTHER, 1.0)


def test_leaving() -> None:
    queue = queue_of("a", "b")
    assert queue.remove(request("a"))
    assert not queue.remove(request("a"))
    assert not queue.remove(request("z"))
    assert "a" not in queue
    assert "b" in queue
    assert queue.tokens == 10


def test_tokens_leave_as_they_came() -> None:
    queue = WaitingQueue()
    one = request("a", 10)
    queue.push(one, LINE, 1.0)
    one.prompt_tokens = 99
    queue.remove(one)
    assert queue.tokens == 0


def test_heads() -> None:
    queue = queue_of("a", "b")
    head = queue.head(LINE)
    assert head is not None
    assert head.rid == "a"
    assert queue.head(OTHER) is None


def test_deadlines() -> None:
    queue = WaitingQueue()
    one, two = request("one"), request("two")
    queue.push(one, LINE, 5.0)
    queue.push(two, LINE, 3.0)
    assert (queue.deadline(one), queue.next_deadline()) == (5.0, 3.0)
    assert (queue.overdue(2.9), queue.overdue(3.0)) == (None, "two")
    queue.remove(two)
    assert queue.overdue(4.9) is None
    queue.push(two, LINE, 9.0)
    queue.remove(one)
    assert queue.next_deadline() == 9.0


def test_waits_that_are_over_leave_nothing_behind() -> None:
    queue = queue_of("stays")
    for number in range(5000):
        one = request(f"r{number}")
        queue.push(one, LINE, 60.0)
        queue.remove(one)
    assert len(queue._deadlines) < 200
    assert queue.next_deadline() == 0.0
