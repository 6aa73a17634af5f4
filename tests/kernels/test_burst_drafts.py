"""A burst that drafts says what one without says; drafts only change how many steps that takes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

import omni_kernels as ops
from tests.kernels.test_decoder import VOCAB, Case, decoder_weights

STARTS = (31, 8, 13)
"""Tokens of each sequence when the burst begins."""
TOKENS = 24


@dataclass(frozen=True)
class Policy:
    longest: int = 5
    share: float = 0.1
    gram: int = 3
    learn: float = 0.25
    first_pause: int = 16
    longest_pause: int = 128


@dataclass
class Luck:
    text: array[int] = field(default_factory=lambda: array("i"))
    rate: float = 0.7
    pause: int = 0
    resumes_at: int = 0


def burst(case: Case, chances: ops.Chances | None, steps: int = TOKENS, **more: Any) -> ops.Burst:
    case.step(case.rows([(n - 1, n - 1) for n in STARTS]))
    r = case.rows([(1, n) for n in STARTS])
    return case.decoder.burst(r.tokens, r.positions, r.slots, r.batch, case.kv, steps, chances, case.counts, **more)


def some_chances(tokens: int = TOKENS) -> ops.Chances:
    f64 = torch.float64
    torch.manual_seed(5)
    heat, top_p = torch.tensor([0.0, 0.8, 1.0], dtype=f64), torch.tensor([1.0, 0.9, 1.0], dtype=f64)
    return ops.Chances(heat, torch.tensor([0, 0, 5]), top_p, torch.rand(tokens, 3, dtype=f64))


def seeded_case() -> Case:
    torch.manual_seed(1)
    return Case(decoder_weights())


def knowing(said: Sequence[int], comes: Sequence[int]) -> Luck:
    """One in whose text it stands already what comes; another text than the model sees, as only drafts are of it."""
    return Luck(array("i", [*said[-3:], *comes, 0, *said]))


def mistaken(said: Sequence[int], comes: Sequence[int]) -> Luck:
    """The same but for every third token."""
    return knowing(said, [t if i % 3 else (t + 1) % VOCAB for i, t in enumerate(comes)])


def unknowing(said: Sequence[int], comes: Sequence[int]) -> Luck:
    return Luck(array("i", said))


@pytest.mark.parametrize("luck_of", [knowing, mistaken, unknowing])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_drafts_change_no_token_and_no_key(compiled: str, luck_of: Any, sampled: bool, threads: int) -> None:
    torch.set_num_threads(threads)
    case, again = seeded_case(), seeded_case()
    plain = burst(case, some_chances() if sampled else None).tokens
    said = [tokens[:n] for tokens, n in zip(case.tokens, STARTS, strict=True)]
    lucks = [luck_of(*pair) for pair in zip(said, plain, strict=True)]
    most = [TOKENS] * 3
    told = burst(again, some_chances() if sampled else None, most=most, drafts=ops.Drafts(Policy(), lucks, 99, 1e9))
    assert [len(tokens) for tokens in told.tokens] == [sum(1 + right for _, right in one) for one in told.fared]
    assert max(map(len, told.tokens)) == TOKENS  # it ends where one sequence does
    steps = told.plain_steps + told.drafted_steps
    assert (steps < TOKENS / 3) == (luck_of is knowing)
    assert told.draft_rows == sum(drafted for one in told.fared for drafted, _ in one)
    for i, tokens in enumerate(told.tokens):
        assert tokens == plain[i][: len(tokens)]
        for place in range(STARTS[i] + len(tokens) - 1):  # the last token's keys come with the next step
            block, at = again.tables[i][place // 4], place % 4
            assert again.kv[:, :, block, at].equal(case.kv[:, :, block, at])


def test_what_was_learned_comes_back(compiled: str) -> None:
    case, again = seeded_case(), seeded_case()
    plain = burst(case, None).tokens
    said = [tokens[:n] for tokens, n in zip(case.tokens, STARTS, strict=True)]
    lucks = [
        make(*pair) for make, pair in zip((knowing, mistaken, unknowing), zip(said, plain, strict=True), strict=True)
    ]
    texts = [list(luck.text) for luck in lucks]
    told = burst(again, None, 2, most=[20] * 3, drafts=ops.Drafts(Policy(share=0.9), lucks, 99, 1e9))
    assert [one[0] for one in told.fared] == [(1, 1), (1, 0), (0, 0)]
    assert lucks[0].rate > 0.7
    assert (lucks[1].pause, lucks[1].resumes_at) == (16, len(texts[1]) + 16)
    assert told.fared[1][1] == (0, 0)
    assert lucks[2] == Luck(array("i", texts[2]))
    assert [list(luck.text) for luck in lucks] == texts


def test_rows_tokens_and_time_are_kept(compiled: str) -> None:
    plain = burst(seeded_case(), None).tokens

    def told(rows: int = 99, limit_s: float = 1e9, most: Sequence[int] = (TOKENS,) * 3) -> ops.Burst:
        case = seeded_case()
        said = [tokens[:n] for tokens, n in zip(case.tokens, STARTS, strict=True)]
        lucks = [knowing(*pair) for pair in zip(said, plain, strict=True)]
        return burst(case, None, most=most, drafts=ops.Drafts(Policy(), lucks, rows, limit_s))

    assert told(rows=0).plain_steps == TOKENS
    assert [one[0] for one in told(rows=6).fared] == [(5, 5), (1, 1), (0, 0)]
    assert len(told(limit_s=0.0).fared[0]) == 1
    assert [len(one) for one in told(most=(9, 3, 9)).tokens] == [6, 3, 6]
    assert [len(one) for one in told(most=(1, 3, 9)).tokens] == [1, 3, 6]


def test_bad_drafts_are_named(compiled: str) -> None:
    lucks = [Luck(array("i", [1, 2])) for _ in STARTS]
    good = ops.Drafts(Policy(), lucks, 9, 1.0)
    for text, drafts, most in (
        ("most must be 3 numbers", good, [1, 1]),
        ("most must be 3 numbers", good, [1, 0, 1]),
        ("drafts must be of 3", replace(good, lucks=lucks[:2]), [9] * 3),
        ("a text must be an array of int32", replace(good, lucks=[Luck(array("q"))] * 3), [9] * 3),
        ("a draft needs a gram", replace(good, policy=Policy(longest=0)), [9] * 3),
        ("a draft needs a gram", replace(good, rows=-1), [9] * 3),
    ):
        with pytest.raises(ValueError, match=f"^burst: {text}"):
            burst(seeded_case(), None, most=most, drafts=drafts)


def test_drafts_past_the_blocks_are_refused(compiled: str) -> None:
    case = seeded_case()
    plain = burst(seeded_case(), None).tokens
    said = [tokens[:n] for tokens, n in zip(case.tokens, STARTS, strict=True)]
    case.tables = [table[:8] for table in case.tables]  # of 4 tokens; the longest sequence has 31
    lucks = [knowing(*pair) for pair in zip(said, plain, strict=True)]
    with pytest.raises(ValueError, match=r"^burst: block_tables"):
        burst(case, None, most=[TOKENS] * 3, drafts=ops.Drafts(Policy(), lucks, 99, 1e9))


def test_an_end_within_a_draft_ends_the_burst() -> None:
    """What is right behind it is told as well: who asked knows where to cut."""
    plain = burst(seeded_case(), None).tokens
    case = seeded_case()
    said = [tokens[:n] for tokens, n in zip(case.tokens, STARTS, strict=True)]
    lucks = [knowing(before, comes) for before, comes in zip(said, plain, strict=True)]
    end = plain[0][2]
    last = plain[0].index(end)
    told = burst(case, None, most=[20] * 3, drafts=ops.Drafts(Policy(), lucks, 99, 1e9), ends=[{end}, (), ()])
    steps = told.plain_steps + told.drafted_steps
    before = sum(right + 1 for _, right in told.fared[0][: steps - 1])
    assert before <= last < len(told.tokens[0]), "the step that says it is the last"
    for tokens, comes in zip(told.tokens, plain, strict=True):
        assert tokens[: len(comes)] == comes[: len(tokens)]
