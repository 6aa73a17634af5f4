"""The index answers as a plain map of sets would, whatever happens in whatever order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.apc.block_index import BlockIndex
from omni_proxy.apc.index import TIER_WORTH, Tier

WORKERS = {("a", 0): 16, ("a", 1): 16, ("b", 0): 32, ("c", 0): 16}
KEYS = list(range(1, 13))

HOLDERS = st.sampled_from(sorted(WORKERS))
CHANGES = st.one_of(
    st.tuples(st.just("insert"), HOLDERS, st.lists(st.sampled_from(KEYS), max_size=8), st.sampled_from(Tier)),
    st.tuples(st.just("remove"), HOLDERS, st.lists(st.sampled_from(KEYS), max_size=8), st.sampled_from(Tier)),
    st.tuples(st.just("forget"), HOLDERS, st.just([]), st.just(Tier.DEVICE)),
    st.tuples(st.just("sweep"), HOLDERS, st.just([]), st.just(Tier.DEVICE)),
)

Model = dict[tuple[str, int], dict[Tier, set[int]]]


def expected(model: Model, keys: list[int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for holder, tiers in model.items():
        size = WORKERS[holder]
        walked = keys[size // 16 - 1 :: size // 16]
        worth, before = 0.0, 0
        for tier in Tier:
            reach = 0
            while reach < len(walked) and any(walked[reach] in tiers[t] for t in Tier if t <= tier):
                reach += 1
            worth += TIER_WORTH[tier] * (reach - before)
            before = reach
        tokens = int(worth * size)
        if tokens > found.get(holder[0], 0):
            found[holder[0]] = tokens
    return found


@given(st.lists(CHANGES, max_size=30), st.permutations(KEYS))
def test_matches_are_those_of_a_map_of_sets(
    changes: list[tuple[str, tuple[str, int], list[int], Tier]], prompt: list[int]
) -> None:
    index = BlockIndex()
    model: Model = {}
    for what, holder, keys, tier in changes:
        if what == "insert":
            if holder not in model:
                model[holder] = {t: set() for t in Tier}
                index.add_holder(*holder, WORKERS[holder])
            index.insert(*holder, keys, tier)
            model[holder][tier].update(keys)
        elif what == "remove":
            index.remove(*holder, keys, tier)
            if holder in model:
                model[holder][tier].difference_update(keys)
        elif what == "forget":
            index.forget_holder(*holder)
            model.pop(holder, None)
        else:
            index.sweep()
        assert index.match(prompt) == expected(model, prompt)
    while index.sweep():
        pass
    assert index.match(prompt) == expected(model, prompt)
    held = [len(set().union(*(tiers[tier] for tiers in model.values()))) for tier in Tier]
    assert len(index) == sum(held)


def test_a_holder_that_comes_back_has_nothing_of_before() -> None:
    index = BlockIndex()
    for _ in range(3):
        index.add_holder("a", 0, 16)
        assert index.match([1, 2]) == {}
        index.insert("a", 0, [1, 2])
        assert index.match([1, 2]) == {"a": 32}
        index.forget_holder("a", 0)
        assert index.match([1, 2]) == {}


def test_what_is_far_away_counts_for_less_and_is_present_all_the_same() -> None:
    index = BlockIndex()
    index.add_holder("a", 0, 16)
    index.insert("a", 0, [1, 2])
    index.insert("a", 0, [3, 4], Tier.CPU)
    assert index.match([1, 2, 3, 4, 5]) == {"a": 32 + int(32 * TIER_WORTH[Tier.CPU])}
    assert index.present("a", [1, 2, 3, 4, 5]) == 64
    assert index.present("b", [1]) == 0


def test_the_longest_of_a_workers_ranks_counts() -> None:
    index = BlockIndex()
    for rank, keys in ((0, [1]), (1, [1, 2, 3]), (2, [2, 3])):
        index.add_holder("a", rank, 16)
        index.insert("a", rank, keys)
    assert index.match([1, 2, 3]) == {"a": 48}
    assert index.present("a", [1, 2, 3]) == 48
