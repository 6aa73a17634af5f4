"""Blocks that will be cached: longest common prefixes with what is under way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.apc.keys import UNIT_TOKENS
from omni_proxy.scheduler.foreseen import KEPT_S, Foreseen, common_blocks


def prompt(*units: int) -> tuple[int, ...]:
    """Chained keys: each stands for all units up to it."""
    return tuple(hash(units[: n + 1]) for n in range(len(units)))


def test_a_prompt_under_way_counts_as_cached() -> None:
    foreseen = Foreseen()
    foreseen.granted("p0", prompt(1, 2, 3), until=5.0)
    foreseen.plan("p1", prompt(1, 2, 9))
    assert foreseen.add_to({}, prompt(1, 2, 3, 4)) == {"p0": 3 * UNIT_TOKENS, "p1": 2 * UNIT_TOKENS}
    assert foreseen.add_to({"p0": 64, "p2": 16}, prompt(1, 2, 3, 4)) == {"p0": 64, "p1": 32, "p2": 16}
    assert foreseen.add_to({"p0": 64}, prompt(7)) == {"p0": 64}
    assert foreseen.add_to({}, ()) == {}


def test_plans_last_one_walk_and_grants_until_the_index_knows() -> None:
    foreseen = Foreseen()
    foreseen.granted("p0", prompt(1), until=5.0)
    foreseen.plan("p1", prompt(1))
    foreseen.begin_walk(5.0)
    assert foreseen.add_to({}, prompt(1)) == {"p0": UNIT_TOKENS}
    foreseen.begin_walk(5.0 + KEPT_S)
    assert foreseen.add_to({}, prompt(1)) == {}


@given(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.lists(st.integers(0, 2), min_size=1, max_size=20))
def test_common_blocks_are_those_of_a_plain_walk(a: list[int], b: list[int]) -> None:
    first, second = prompt(*a), prompt(*b)
    plain = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_blocks(first, second, 0, min(len(a), len(b))) == plain
