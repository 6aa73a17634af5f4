"""Homes of sessions: even, stable, and the same on every replica."""

from __future__ import annotations

from collections import Counter

from omni_proxy.apc.homes import MOST_SESSIONS, Homes
from omni_proxy.apc.ring import Ring

NAMES = [f"p{i}" for i in range(10)]


def home(ring: Ring, key: str, names: list[str]) -> str:
    return next(ring.order(key, names))


def test_keys_spread_evenly() -> None:
    ring = Ring()
    counts = Counter(home(ring, str(key), NAMES) for key in range(20_000))
    assert set(counts) == set(NAMES)
    # 160 virtual nodes: the share of a worker strays by about 8 % (one sigma).
    assert max(counts.values()) < 1.3 * 2000
    assert min(counts.values()) > 0.7 * 2000


def test_replicas_agree_and_homes_do_not_hang_on_the_order_of_names() -> None:
    one, other = Ring(), Ring()
    for key in map(str, range(200)):
        assert list(one.order(key, NAMES)) == list(other.order(key, NAMES))
        assert home(one, key, NAMES) == home(other, key, NAMES[::-1])


def test_a_member_that_leaves_moves_its_own_keys_only() -> None:
    ring = Ring()
    for key in map(str, range(500)):
        before = home(ring, key, NAMES)
        after = home(ring, key, NAMES[:-1])
        assert after == before or before == NAMES[-1]


def test_a_home_that_cannot_be_had_leaves_every_other_worker() -> None:
    assert sorted(Ring().order("k", NAMES)) == sorted(NAMES)


def test_a_session_has_one_home_and_moves_where_another_gateway_placed_it() -> None:
    homes, other = Homes(), Homes()
    assert list(homes.order("s", NAMES)) == list(other.order("s", NAMES))
    elsewhere = list(homes.order("s", NAMES))[-1]
    homes.placed_elsewhere([("s", elsewhere)])
    assert next(homes.order("s", NAMES)) == elsewhere
    assert sorted(set(homes.order("s", NAMES))) == sorted(NAMES)


def test_sessions_of_others_are_bounded_and_the_oldest_goes_first() -> None:
    homes = Homes()
    homes.placed_elsewhere((f"s{n}", "elsewhere") for n in range(MOST_SESSIONS + 1))
    assert next(homes.order("s1", NAMES)) == "elsewhere"
    assert next(homes.order("s0", NAMES)) != "elsewhere"
