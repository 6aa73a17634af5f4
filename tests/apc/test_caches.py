"""Sources of the index: events, our own grants, and what is only guessed of workers that tell nothing."""

from __future__ import annotations

from random import Random

from omni_proxy.apc import speculation
from omni_proxy.apc.caches import Caches
from omni_proxy.apc.recency import RecencyModel
from omni_proxy.messages import BlocksRemoved, BlocksStored, CacheCleared, Lease, Leg, Role, WorkerSpec

KEYS = tuple(range(100, 108))


def caches(*names: str, blocks: int = 8, block_tokens: int | None = 16) -> Caches:
    made = Caches()
    for name in names:
        capacity = blocks * (block_tokens or 16)
        made.member(WorkerSpec(name, Role.PREFILL, kv_capacity_tokens=capacity, block_tokens=block_tokens))
    return made


def lease(number: int, worker: str = "p0") -> Lease:
    return Lease(f"r{number}", 1, worker, Leg.PREFILL)


# ------------------------------------------------------------------------------------ without events


def test_a_silent_worker_holds_what_it_was_sent_last() -> None:
    known = caches("p0", "p1")
    assert known.granted(lease(1), KEYS[:4], 0.0) == 0
    assert known.match(KEYS) == {"p0": 64}
    known.answered(lease(1), 0, 0, 1.0)
    assert known.granted(lease(2), (1, 2, 3, 4, 5), 2.0) == 0
    # Eight blocks fit: the end of the older prompt had to go, its beginning is still there.
    assert known.match(KEYS) == {"p0": 48}
    assert known.match((1, 2, 3, 4, 5)) == {"p0": 80}


def test_what_was_not_computed_is_not_there() -> None:
    known = caches("p0")
    known.granted(lease(1), KEYS[:2], 0.0)
    known.answered(lease(1), 0, 0, 1.0)
    known.granted(lease(2), KEYS[:4], 2.0)
    known.dropped(lease(2))
    assert known.match(KEYS) == {"p0": 32}


def test_a_worker_that_went_down_has_lost_its_cache() -> None:
    known = caches("p0")
    known.granted(lease(1), KEYS, 0.0)
    known.lost("p0", removed=False)
    known.answered(lease(1), 0, 0, 1.0)
    assert known.match(KEYS) == {}
    known.granted(lease(2), KEYS[:1], 2.0)
    assert known.match(KEYS) == {"p0": 16}
    known.lost("p0", removed=True)
    assert known.match(KEYS) == {}
    assert known.granted(lease(3), KEYS, 3.0) is None


def test_blocks_larger_than_a_unit_are_counted_as_blocks() -> None:
    known = caches("p0", blocks=4, block_tokens=64)
    known.granted(lease(1), KEYS[:7], 0.0)
    assert known.match(KEYS) == {"p0": 64}


def test_a_block_size_without_a_common_measure_is_left_alone() -> None:
    known = caches("p0", block_tokens=24)
    assert known.granted(lease(1), KEYS, 0.0) is None
    assert known.match(KEYS) == {}


def test_reports_correct_how_much_is_kept() -> None:
    model = RecencyModel(100)
    model.use(range(100))
    gone = [key for _ in range(20) for key in model.correct(640, 0, 16)]
    assert model.capacity_blocks == 100 - len(gone) < 60
    for _ in range(200):
        model.correct(0, 640, 16)
    assert model.capacity_blocks == 100
    for _ in range(500):
        model.correct(640, 0, 16)
    assert model.capacity_blocks == 25


# --------------------------------------------------------------------------------------- with events


def test_a_worker_that_tells_is_believed() -> None:
    known = caches("p0", "p1")
    known.granted(lease(1), KEYS, 0.0)
    assert not known.tells("p0")
    known.heard(BlocksStored("p0", 0, 16, KEYS[:3]))
    assert known.tells("p0")
    assert known.match(KEYS) == {"p0": 48}
    known.heard(BlocksRemoved("p0", 0, KEYS[2:3]))
    assert known.match(KEYS) == {"p0": 32}
    known.lost("p0", removed=False)  # a probe failed: its own events know better
    assert known.match(KEYS) == {"p0": 32}
    known.heard(CacheCleared("p0", 0))
    assert known.match(KEYS) == {}
    known.heard(BlocksStored("p0", 0, 16, KEYS[:1]))
    assert known.match(KEYS) == {"p0": 16}


def test_a_grant_counts_until_its_events_should_have_come() -> None:
    known = caches("p0")
    known.heard(BlocksStored("p0", 0, 16, KEYS[:1]))
    known.granted(lease(1), KEYS[:4], 10.0)
    known.granted(lease(2), KEYS[:6], 10.0)
    assert known.match(KEYS) == {"p0": 96}
    known.answered(lease(2), 96, 96, 11.0)
    known.granted(lease(3), (), 11.0 + speculation.ANSWERED_S)
    assert known.match(KEYS) == {"p0": 96}  # nothing was heard of it yet
    known.heard(BlocksStored("p0", 0, 16, KEYS[1:6]))
    known.granted(lease(4), (), 11.0 + 2 * speculation.ANSWERED_S)
    known.heard(BlocksRemoved("p0", 0, KEYS[4:6]))
    assert known.match(KEYS) == {"p0": 64}
    known.dropped(lease(1))
    known.heard(BlocksRemoved("p0", 0, KEYS[1:4]))
    assert known.match(KEYS) == {"p0": 16}


def test_a_block_that_was_evicted_is_not_expected_any_more() -> None:
    known = caches("p0")
    known.heard(BlocksStored("p0", 0, 16, KEYS[:1]))
    known.granted(lease(1), KEYS[:4], 0.0)
    known.answered(lease(1), 16, 16, 1.0)
    known.heard(BlocksStored("p0", 0, 16, KEYS[1:4]))
    known.heard(BlocksRemoved("p0", 0, KEYS[2:4], tier=1))
    assert known.match(KEYS) == {"p0": 64}
    known.heard(BlocksRemoved("p0", 0, KEYS[2:4]))
    assert known.match(KEYS) == {"p0": 32}


def test_events_that_never_come_are_not_waited_for_for_ever() -> None:
    known = caches("p0")
    known.heard(BlocksStored("p0", 0, 16, KEYS[:1]))
    known.granted(lease(1), KEYS[:4], 0.0)
    known.answered(lease(1), 16, 16, 1.0)
    for second in range(2, 2 + int(speculation.UNTOLD_S) + int(speculation.ANSWERED_S)):
        known.granted(lease(second), (), float(second))
    assert known.match(KEYS) == {"p0": 16}


def test_a_report_of_less_ends_what_was_expected_without_being_told() -> None:
    known = caches("p0")
    known.heard(BlocksStored("p0", 0, 16, KEYS[:1]))
    known.granted(lease(1), KEYS[:4], 0.0)
    known.answered(lease(1), 16, 16, 1.0)
    assert known.granted(lease(2), KEYS[:4], 2.0) == 64
    known.granted(lease(3), (7, 8), 2.0)
    known.answered(lease(2), 64, 16, 3.0)
    assert known.match(KEYS) == {"p0": 64}  # it was just computed
    assert known.match((7, 8)) == {"p0": 32}  # and this is under way
    known.granted(lease(4), (), 3.0 + speculation.UNTOLD_S)
    assert known.match(KEYS) == {"p0": 16}


def test_a_grant_that_is_never_answered_does_not_count_for_ever() -> None:
    known = caches("p0")
    known.heard(BlocksStored("p0", 0, 16, KEYS[:1]))
    known.granted(lease(1), KEYS, 0.0)
    known.granted(lease(2), (), speculation.UNANSWERED_S)
    assert known.match(KEYS) == {"p0": 16}


def test_events_of_nobody_are_counted() -> None:
    known = caches("p0")
    known.heard(BlocksStored("p9", 0, 16, KEYS))
    known.heard(CacheCleared("p9", 0))
    known.heard(BlocksRemoved("p0", 3, KEYS))
    assert known.unknown_worker_events == 2
    assert known.match(KEYS) == {}


def test_memory_stays_bounded_under_random_traffic() -> None:
    known, random = caches("p0", "p1", blocks=50), Random(1)
    known.heard(BlocksStored("p1", 0, 16, (1,)))
    for number in range(2000):
        one = lease(number, random.choice(("p0", "p1")))
        known.granted(one, [random.randrange(10_000) for _ in range(10)], number * 0.1)
        known.dropped(one) if number % 5 == 0 else known.answered(one, 0, 0, number * 0.1)
    # p0 keeps what fits; of p1 nothing is left but its event and the guesses that may still be told.
    assert len(known.index) <= 50 + 1 + 10 * 10 * (speculation.UNTOLD_S + speculation.ANSWERED_S)
    known.granted(lease(2000), (), 200.0 + speculation.UNTOLD_S + speculation.ANSWERED_S)
    known.granted(lease(2001), (), 200.0 + speculation.UNTOLD_S + 2 * speculation.ANSWERED_S)
    assert len(known.index) <= 50 + 1
