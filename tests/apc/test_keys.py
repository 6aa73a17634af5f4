"""Keys name prefixes: equal prefixes have equal keys, in every process, and nothing else has."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.apc.keys import UNIT_TOKENS, block_keys, chain, root_key, token_bytes

TOKENS = st.lists(st.integers(0, 3), max_size=4 * UNIT_TOKENS)


@given(TOKENS, TOKENS)
def test_keys_are_equal_exactly_as_far_as_the_tokens_are(one: list[int], other: list[int]) -> None:
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    keys, others = block_keys(one), block_keys(other)
    assert len(keys) == len(one) // UNIT_TOKENS
    same = sum(a == b for a, b in zip(keys, others, strict=False))
    assert same == shared // UNIT_TOKENS
    assert keys[:same] == others[:same]


@given(TOKENS, st.integers(0, 4))
def test_a_chain_can_be_continued_anywhere(tokens: list[int], units: int) -> None:
    data = token_bytes(tokens)
    cut = min(units, len(tokens) // UNIT_TOKENS)
    first = chain(root_key(), token_bytes(tokens[: cut * UNIT_TOKENS]))
    rest = chain(first[-1] if first else root_key(), token_bytes(tokens[cut * UNIT_TOKENS :]))
    assert first + rest == chain(root_key(), data)


def test_adapters_and_salts_tell_prompts_apart() -> None:
    tokens = list(range(UNIT_TOKENS))
    variants = [{}, {"lora": "a"}, {"salt": "a"}, {"lora": "a", "salt": "b"}, {"lora": "b", "salt": "a"}]
    assert len({block_keys(tokens, **v) for v in variants}) == len(variants)


def test_keys_are_the_same_in_another_process() -> None:
    code = "from omni_proxy.apc.keys import block_keys; print(*block_keys(range(64), 'l', 's'))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert tuple(map(int, told.split())) == block_keys(range(64), "l", "s")
    assert block_keys(range(16)) == (KNOWN,)


KNOWN = 8773583392624668237


@pytest.mark.parametrize("tokens", [[-1], [1 << 32], ["a"], [None], [1.5]])
def test_what_is_no_token_is_refused(tokens: list[object]) -> None:
    with pytest.raises((OverflowError, TypeError)):
        token_bytes(tokens)  # type: ignore[arg-type]
