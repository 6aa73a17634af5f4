"""Homes of cold prompts: even, stable, bounded, and blind to what everybody sends."""

from __future__ import annotations

from collections import Counter
from random import Random

from omni_proxy.apc.homes import Homes
from omni_proxy.apc.popularity import Popularity
from omni_proxy.apc.ring import BOUND, Ring

NAMES = [f"p{i}" for i in range(10)]


def idle(name: str) -> float:
    return 0.0


def test_keys_spread_evenly() -> None:
    ring = Ring()
    counts = Counter(ring.home(str(key), NAMES, idle, 1) for key in range(20_000))
    assert set(counts) == set(NAMES)
    # 160 virtual nodes: the share of a worker strays by about 8 % (one sigma).
    assert max(counts.values()) < 1.3 * 2000
    assert min(counts.values()) > 0.7 * 2000


def test_replicas_agree_and_order_of_names_does_not_matter_for_most() -> None:
    one, other = Ring(), Ring()
    for key in map(str, range(200)):
        assert list(one.order(key, NAMES)) == list(other.order(key, NAMES))
        assert one.home(key, NAMES, idle, 1) == other.home(key, NAMES[::-1], idle, 1)


def test_a_member_that_leaves_moves_its_own_keys_only() -> None:
    ring = Ring()
    for key in map(str, range(500)):
        before = ring.home(key, NAMES, idle, 1)
        after = ring.home(key, NAMES[:-1], idle, 1)
        assert after == before or before == NAMES[-1]


def test_a_busy_home_spills_to_the_next_in_order() -> None:
    ring = Ring()
    order = list(ring.order("k", NAMES))
    assert sorted(order) == sorted(NAMES)
    loads = dict.fromkeys(NAMES, 100.0)
    assert ring.home("k", NAMES, loads.__getitem__, 10) == order[0]
    loads[order[0]] = 200.0
    assert ring.home("k", NAMES, loads.__getitem__, 10) == order[1]
    loads[order[1]] = 200.0
    assert ring.home("k", NAMES, loads.__getitem__, 10) == order[2]


def test_no_worker_is_loaded_past_the_bound() -> None:
    ring, random = Ring(), Random(3)
    loads = dict.fromkeys(NAMES, 0.0)
    for _ in range(3000):
        tokens = random.randrange(1, 100)
        name = ring.home("the same key", NAMES, loads.__getitem__, tokens)
        name = name or min(loads, key=loads.__getitem__)
        loads[name] += tokens
    mean = sum(loads.values()) / len(NAMES)
    assert max(loads.values()) <= BOUND * mean + 100


def test_a_prompt_of_any_length_finds_an_idle_worker() -> None:
    assert Ring().home("k", NAMES, idle, 1e9) is not None


def test_a_common_beginning_is_no_home() -> None:
    homes = Homes()
    system = tuple(range(1, 50))
    placed = []
    for user in range(1000):
        keys = (*system, 1000 + user, 5000 + user)
        homes.saw(keys)
        placed.append(homes.home("", keys, NAMES, idle, 10))
    counts = Counter(placed[20:])
    assert max(counts.values()) < 2 * 980 / len(NAMES)


def test_a_session_keeps_its_home() -> None:
    homes, other = Homes(), Homes()
    other.saw((1, 2, 3))
    assert len({homes.home("s", (key,), NAMES, idle, 1) for key in range(20)}) == 1
    assert homes.home("s", (), NAMES, idle, 1) == other.home("s", (9,), NAMES, idle, 1)
    assert homes.home("", (), NAMES, idle, 1) is None
    assert homes.home("s", (), NAMES[:1], idle, 1) is None


def test_popularity_is_bounded_and_follows_the_traffic() -> None:
    popularity, random = Popularity(), Random(5)
    for _ in range(30_000):
        popularity.count((1, 2, random.randrange(1 << 60), 3))
    assert len(popularity) < 20_000
    assert popularity.own_part((1, 2, 77, 3)) == 77
    for _ in range(10_000):
        popularity.count((random.randrange(1 << 60),))
    assert popularity.own_part((1, 2, 77, 3)) == 1
    assert popularity.own_part(()) is None
