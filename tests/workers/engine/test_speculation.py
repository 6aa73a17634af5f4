"""Speculative decoding changes how fast tokens come, never which."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MethodType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.workers.engine.engine import Engine
from omni_proxy.workers.engine.sequence import Sequence as EngineSequence
from omni_proxy.workers.engine.speculation import GRAM, Drafter, GramIndex, RowCosts
from omni_proxy.workers.engine.types import EngineRequest, FinishReason, SamplingParams
from tests.workers.engine.helpers import Call, greedy, prompt, request, running, until

LOOP = (1, 2, 3, 4, 5) * 6


# -- the index


def slow_continuation(tokens: Sequence[int], count: int) -> tuple[int, ...]:
    """The definition: look for the last tokens from the end on."""
    if len(tokens) < GRAM:
        return ()
    last = tuple(tokens[-GRAM:])
    for end in range(len(tokens) - 1, GRAM - 1, -1):
        if tuple(tokens[end - GRAM : end]) == last:
            return tuple(tokens[end + at % (len(tokens) - end)] for at in range(count))
    return ()


@settings(max_examples=80, deadline=None)
@given(tokens=st.lists(st.integers(0, 2), max_size=60), steps=st.lists(st.integers(1, 9), max_size=20))
def test_the_index_finds_what_a_search_finds(tokens: list[int], steps: list[int]) -> None:
    index, known = GramIndex(), 0
    for step in steps:
        known = min(len(tokens), known + step)
        assert index.continuation(tokens[:known], 5) == slow_continuation(tokens[:known], 5)


def test_a_loop_is_followed_round() -> None:
    assert GramIndex().continuation([9, 1, 2, 3, 1, 2, 3], 7) == (1, 2, 3, 1, 2, 3, 1)


# -- how long


def sequence(tokens: Sequence[int] = LOOP, max_tokens: int = 100) -> EngineSequence:
    return EngineSequence(EngineRequest("r", tuple(tokens), greedy(max_tokens)), 4)


def test_drafts_grow_with_luck_and_stop_without() -> None:
    drafter, seq = Drafter(8, 1000), sequence()
    first = len(drafter.propose(seq, 1, 100))
    for _ in range(10):
        drafter.checked(seq, 1, 3, 3)
    assert len(drafter.propose(seq, 1, 100)) == 8 > first
    while draft := drafter.propose(seq, 1, 100):
        drafter.checked(seq, 1, len(draft), 0)
    assert len(seq.tokens) == len(LOOP)  # paused


def test_on_text_that_never_comes_true_few_rows_are_wasted() -> None:
    drafter, seq, wasted = Drafter(8, 10**6), sequence(max_tokens=10**6), 0
    for _ in range(1000):
        draft = drafter.propose(seq, 1, 100)
        if draft:
            wasted += len(draft)
            drafter.checked(seq, 1, len(draft), 0)
        seq.tokens.append(seq.tokens[-5])
    assert wasted * drafter.costs.share(1) < 0.01 * 1000


def test_a_paused_sequence_finds_back() -> None:
    drafter, seq = Drafter(8, 10**6), sequence(max_tokens=10**6)
    while draft := drafter.propose(seq, 1, 100):
        drafter.checked(seq, 1, len(draft), 0)
    lengths = []
    for _ in range(40):
        draft = drafter.propose(seq, 1, 100)
        lengths.append(len(draft))
        if draft:
            drafter.checked(seq, 1, len(draft), len(draft))
        seq.tokens.extend([seq.tokens[-5] for _ in range(1 + len(draft))])
    assert lengths[0] == 0
    assert lengths[-1] == 8


def test_dear_rows_make_short_drafts() -> None:
    lengths = []
    for row_s in (0.05, 0.3, 0.9):
        drafter, seq = Drafter(8, 1000), sequence()
        drafter.costs.observe(1, 0, 1.0)
        drafter.costs.observe(1, 2, 1.0 + 2 * row_s)
        drafter.checked(seq, 1, len(drafter.propose(seq, 1, 1)), 1)
        lengths.append(len(drafter.propose(seq, 1, 100)))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1] == 1


def test_costs_are_learned_by_batch_and_survive_an_outlier() -> None:
    costs = RowCosts()
    assert costs.share(1) == 0.3  # nothing known
    for _ in range(50):
        costs.observe(1, 0, 0.001)
        costs.observe(1, 4, 0.0018)
        costs.observe(8, 0, 0.004)
        costs.observe(8, 8, 0.006)
    assert costs.share(1) == pytest.approx(0.2)
    assert costs.share(8) == pytest.approx(0.5)
    costs.observe(1, 4, 5.0)
    assert costs.share(1) < 0.3


@pytest.mark.parametrize(
    ("max_tokens", "max_len", "most", "expected"), [(1, 99, 9, 0), (2, 99, 9, 1), (9, 32, 9, 1), (9, 99, 2, 2)]
)
def test_a_draft_stays_within_what_may_still_come(max_tokens: int, max_len: int, most: int, expected: int) -> None:
    assert len(Drafter(8, max_len).propose(sequence(max_tokens=max_tokens), 1, most)) == expected


# -- engines


@pytest.fixture(scope="module")
def pair(checkpoints: dict[str, Path]) -> Iterator[tuple[Engine, Engine]]:
    """The same model with and without speculation; beside bursts, drafts would seldom pay on one as small as this."""
    config = {"kv_cache_bytes": 4 << 20, "burst_steps": 1}
    with (
        running(checkpoints["tied"], speculation="off", **config) as plain,
        running(checkpoints["tied"], **config) as spec,
    ):
        yield plain, spec


def both(pair: tuple[Engine, Engine], asked: EngineRequest) -> tuple[Call, Call]:
    plain, spec = Call(pair[0], asked), Call(pair[1], asked)
    plain.end()
    spec.end()
    return plain, spec


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tokens", [LOOP, prompt(40), (5,), (7, 7, 7, 7, 7, 7)])
def test_tokens_are_bit_equal(pair: tuple[Engine, Engine], tokens: tuple[int, ...], temperature: float) -> None:
    sampling = SamplingParams(60, temperature=temperature, seed=11, ignore_eos=True, top_p=0.95, logprobs=2)
    plain, spec = both(pair, request(f"{temperature}{len(tokens)}", tokens, sampling=sampling))
    assert spec.tokens == plain.tokens
    logprobs = [[one for out in call.outputs for one in out.logprobs or ()] for call in (plain, spec)]
    assert logprobs[0] == logprobs[1]
    assert len(logprobs[1]) == 60


def test_drafts_are_made_and_taken(pair: tuple[Engine, Engine]) -> None:
    before = pair[1].stats()
    plain, spec = both(pair, request("taken", LOOP, 100))
    assert spec.tokens == plain.tokens
    after = pair[1].stats()
    assert after.spec_accepted_tokens > before.spec_accepted_tokens
    assert after.spec_draft_tokens >= after.spec_accepted_tokens
    assert after.generation_tokens - before.generation_tokens == 100
    assert len(spec.outputs) < len(plain.outputs)
    assert pair[0].stats().spec_drafts == 0


def test_the_end_of_text_within_a_draft_ends_there(pair: tuple[Engine, Engine]) -> None:
    long = both(pair, request("probe", LOOP, 80))[1].tokens
    for place in (3, 20, 41, 60):
        sampling = greedy(80, stop_token_ids=frozenset({long[place]}))
        plain, spec = both(pair, request(f"stop{place}", LOOP, sampling=sampling))
        assert spec.tokens == plain.tokens
        assert spec.end().finish_reason is plain.end().finish_reason is FinishReason.STOP


def test_min_tokens_holds_inside_drafts(pair: tuple[Engine, Engine]) -> None:
    long = both(pair, request("probe2", LOOP, 40))[1].tokens
    sampling = greedy(40, stop_token_ids=frozenset({long[4]}), min_tokens=17)
    plain, spec = both(pair, request("least", LOOP, sampling=sampling))
    assert spec.tokens == plain.tokens


def test_many_at_once_under_little_memory(checkpoints: dict[str, Path]) -> None:
    """Drafts take no block that a neighbour needs, through preemption and prefix hits."""
    small = {"kv_cache_bytes": 40 * 2048, "max_num_seqs": 6, "max_num_batched_tokens": 24}
    asked = [request(f"r{n}", (LOOP * 2)[n : n + 20], 40 + n) for n in range(12)]
    found = []
    for speculation in ("off", "ngram"):
        with running(checkpoints["tied"], speculation=speculation, **small) as engine:
            calls = [Call(engine, one) for one in asked]
            found.append([call.tokens for call in calls])
            until(lambda engine=engine: engine.stats().blocks_used == 0, "every block comes home")  # type: ignore[misc]
            assert engine.stats().preemptions > 0
    assert found[0] == found[1]


def test_a_prompt_said_again_leaves_a_right_cache(pair: tuple[Engine, Engine]) -> None:
    """Rejected drafts leave nothing behind in blocks that others find."""
    _, spec = pair
    tokens = tuple(Call(spec, request("long", LOOP, 60)).tokens)
    again = Call(spec, request("again", (*LOOP, *tokens), 20))
    plain = Call(pair[0], request("again", (*LOOP, *tokens), 20))
    assert again.tokens == plain.tokens
    assert again.end().cached_tokens > 60


def test_sampled_tokens_have_the_model_s_distribution(pair: tuple[Engine, Engine]) -> None:
    """Over many seeds, what is drawn inside drafts is distributed as what is drawn without (chi-squared, 1 in 1000)."""
    plain, spec = pair
    drafted: Counter[int] = Counter()
    expected: Counter[int] = Counter()
    for seed in range(150):
        params = SamplingParams(6, temperature=0.4, seed=seed, ignore_eos=True, top_k=3)
        other = SamplingParams(6, temperature=0.4, seed=seed + 10_000, ignore_eos=True, top_k=3)
        drafted.update(token % 5 for token in Call(spec, request(f"s{seed}", LOOP, sampling=params)).tokens)
        expected.update(token % 5 for token in Call(plain, request(f"s{seed}", LOOP, sampling=other)).tokens)
    statistic = sum((drafted[k] - expected[k]) ** 2 / (drafted[k] + expected[k]) for k in set(drafted) | set(expected))
    assert statistic < 18.5  # 4 degrees of freedom


def test_a_wrong_drafter_changes_nothing(pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is proposed, right tokens come out."""
    chance = random.Random(3)

    def nonsense(self: Drafter, seq: EngineSequence, sequences: int, most: int) -> tuple[int, ...]:
        left = seq.request.sampling.max_tokens - seq.num_generated - 1
        return tuple(chance.randrange(256) for _ in range(min(left, most, chance.randrange(6))))

    spec = pair[1]
    assert spec._drafter is not None
    monkeypatch.setattr(spec._drafter, "propose", MethodType(nonsense, spec._drafter))
    for tokens in (LOOP, prompt(9, seed=4)):
        first, second = both(pair, request(f"wild{len(tokens)}", tokens, 40))
        assert second.tokens == first.tokens
