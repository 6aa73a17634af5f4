"""Drafts that are made inside calls of several steps: the decisions are Python's, the tokens those without drafts."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_kernels import registry
from omni_kernels.cpu.bursts import policy_of, said_of, take_back
from omni_proxy.workers.engine.counters import Counters
from omni_proxy.workers.engine.drafting import count_burst, learn_burst
from omni_proxy.workers.engine.engine import Engine
from omni_proxy.workers.engine.sampler import Draw, uniform, uniforms
from omni_proxy.workers.engine.speculation import Drafter, Luck, Policy, RowCosts
from omni_proxy.workers.engine.types import EngineRequest, FinishReason, SamplingParams
from tests.workers.engine.helpers import Call, greedy, prompt, request, running, until
from tests.workers.engine.test_bursts import Always
from tests.workers.engine.test_speculation import sequence

LOOP = (1, 2, 3, 4, 5) * 6


# -- one definition


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    found = registry.cpu_library()
    if found is None:
        pytest.skip("no compiled kernels here")
    return found


def native_draft(library: ctypes.CDLL, policy: Policy, luck: Luck, most: int, rows: int) -> tuple[int, ...]:
    room = array("i", bytes(4 * policy.longest))
    count = library.omni_draft(policy_of(policy), said_of(luck, most), rows, room.buffer_info()[0])
    return tuple(room[:count])


def state(luck: Luck) -> tuple[object, ...]:
    return luck.rate, luck.pause, luck.resumes_at


policies = st.builds(Policy, st.integers(1, 9), st.floats(0.05, 1.0))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    policy=policies,
    tokens=st.lists(st.integers(0, 2), max_size=40),
    turns=st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=70), st.integers(0, 12)), max_size=25),
    share=st.floats(0.05, 1.0),
)
def test_a_call_decides_as_python_does(
    library: ctypes.CDLL, policy: Policy, tokens: list[int], turns: list[tuple[list[int], int]], share: float
) -> None:
    """Any text, any luck, to the bit; what a row costs changes in between."""
    ours, theirs = Luck(), Luck()
    for n, (more, most) in enumerate(turns):
        policy = policy if n % 5 else Policy(policy.longest, share)
        theirs.text.extend(tokens[len(theirs.text) :])
        draft = ours.propose(policy, tokens, most)
        assert native_draft(library, policy, theirs, most + 1, 99) == draft
        assert native_draft(library, policy, theirs, 99, most) == draft
        if draft:
            right = next((i for i, pair in enumerate(zip(draft, more, strict=False)) if pair[0] != pair[1]), len(draft))
            said = said_of(theirs, 99)
            library.omni_drafted(policy_of(policy), said, len(draft), min(right, len(draft)))
            take_back(said, theirs)
            ours.learn(policy, len(tokens), len(draft), min(right, len(draft)))
        assert state(theirs) == state(ours)
        tokens += more


@pytest.mark.parametrize("gap", [1, 60, 61, 62, 63, 64, 65, 66, 127, 128, 129, 1000, 5000])
@pytest.mark.parametrize("noise", [0, 7])
def test_the_last_place_is_found_wherever_it_is(library: ctypes.CDLL, gap: int, noise: int) -> None:
    """Also where almost everything looks alike."""
    tokens = [8, 9, 10, *([noise] * 3), 8, 9, 10, 11, *([8, 9, noise] * gap)[:gap], 8, 9, 10]
    luck = Luck(text=array("i", tokens))
    assert native_draft(library, Policy(4), luck, 99, 99) == Luck().propose(Policy(4), tokens, 99)


def test_nothing_to_find(library: ctypes.CDLL) -> None:
    for tokens in ([], [1], [1, 2], [1, 2, 3], list(range(300))):
        assert native_draft(library, Policy(4), Luck(text=array("i", tokens)), 99, 99) == ()


def test_a_table_of_uniforms_is_what_each_is() -> None:
    draws = [Draw(SamplingParams(9), seed, index) for seed, index in ((0, 0), (1, 7), (2**64 - 1, 3), (-5, 12345))]
    table = uniforms(draws, 6)
    assert table.dtype == np.float64
    assert table.tolist() == [[uniform(draw.seed, draw.index + n) for draw in draws] for n in range(6)]


# -- what is learned and counted


class Times:
    plain_steps, plain_s, drafted_steps, drafted_s, draft_rows = 4, 0.4, 2, 0.44, 12


def test_costs_are_learned_from_a_call() -> None:
    costs = RowCosts()
    learn_burst(costs, 1, Times)
    assert costs.share(1, shared=True) == pytest.approx((0.44 - 0.2) / 12 / 0.1)
    assert costs.share(1) == 0.3  # of calls of one step nothing is known
    costs.observe(1, 0, 0.2)
    assert costs.share(1) == pytest.approx(0.02 / 0.2)


@pytest.mark.parametrize(("taken", "drafts", "right"), [(1, 0, 0), (2, 1, 3), (5, 1, 3), (6, 2, 4), (8, 3, 6)])
def test_drafts_after_the_end_are_not_counted(taken: int, drafts: int, right: int) -> None:
    counters = Counters()
    count_burst(counters, [(0, 0), (4, 3), (3, 1), (2, 2)], taken)
    assert (counters.spec_drafts, counters.spec_accepted_tokens) == (drafts, right)
    assert sum(counters.spec_accepted_places) == right


def test_blocks_are_wanted_for_what_may_come() -> None:
    drafter, seq = Drafter(8, 1000), sequence(max_tokens=100)
    assert drafter.reach(seq, 8) == 72
    drafter.luck(seq).resumes_at = len(seq.tokens) + 8
    assert drafter.reach(seq, 8) == 8
    assert drafter.reach(seq, 9) == 81
    assert Drafter(8, 1000).reach(sequence(max_tokens=5), 8) == 5


# -- in an engine


@pytest.fixture(scope="module")
def pair(checkpoints: dict[str, Path]) -> Iterator[tuple[Engine, Engine]]:
    """The same model step by step without drafts, and with both."""
    with (
        running(checkpoints["tied"], kv_cache_bytes=4 << 20, burst_steps=1, speculation="off") as plain,
        running(checkpoints["tied"], kv_cache_bytes=4 << 20) as drafting,
    ):
        if not drafting._runner.bursts:
            pytest.skip("no compiled kernels here")
        drafting._bursts.steps = Always(8).steps  # type: ignore[method-assign]  # a busy machine's steps may be slow
        yield plain, drafting


def both(pair: tuple[Engine, Engine], asked: list[EngineRequest]) -> list[tuple[Call, Call]]:
    calls = [[Call(engine, one) for one in asked] for engine in pair]
    for call in (*calls[0], *calls[1]):
        call.end()
    return list(zip(*calls, strict=True))


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.4}, {"temperature": 1.0, "top_p": 0.8}])
def test_tokens_are_bit_equal(pair: tuple[Engine, Engine], options: dict[str, float]) -> None:
    """Of answers of different luck and length, side by side."""
    asked = [
        request(f"{options}{n}", tokens, sampling=SamplingParams(50 + n, seed=n, ignore_eos=True, **options))
        for n, tokens in enumerate((LOOP, prompt(40), (5, 5, 5, 5), prompt(9, seed=3) * 4))
    ]
    for plain, drafted in both(pair, asked):
        assert drafted.tokens == plain.tokens
        assert len(drafted.outputs) < len(plain.outputs)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=3),
    most=st.integers(1, 60),
    heat=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_any_prompt(pair: tuple[Engine, Engine], prompts: list[list[int]], most: int, heat: float) -> None:
    sampling = SamplingParams(most, temperature=heat, seed=1, ignore_eos=True)
    for plain, drafted in both(pair, [request(f"{n}", one, sampling=sampling) for n, one in enumerate(prompts)]):
        assert drafted.tokens == plain.tokens
        assert len(drafted.tokens) == most


def test_drafts_are_made_taken_and_counted(pair: tuple[Engine, Engine]) -> None:
    before = pair[1].stats()
    plain, drafted = both(pair, [request("taken", LOOP, 120)])[0]
    after = pair[1].stats()
    assert drafted.tokens == plain.tokens
    right = after.spec_accepted_tokens - before.spec_accepted_tokens
    assert 0 < right <= after.spec_draft_tokens - before.spec_draft_tokens
    assert right < 120 == after.generation_tokens - before.generation_tokens
    assert sum(after.spec_accepted_places) == after.spec_accepted_tokens
    assert len(drafted.outputs[0].token_ids) == 1
    assert sum(len(output.token_ids) for output in drafted.outputs) == 120


def test_an_end_within_a_draft_is_the_end(pair: tuple[Engine, Engine]) -> None:
    said = both(pair, [request("probe", LOOP, 80)])[0][1].tokens
    for place in (3, 20, 41, 47, 60):
        sampling = greedy(80, stop_token_ids=frozenset({said[place]}))
        plain, drafted = both(pair, [request(f"stop{place}", LOOP, sampling=sampling)])[0]
        assert drafted.tokens == plain.tokens
        assert drafted.end().finish_reason is plain.end().finish_reason is FinishReason.STOP


def test_what_a_call_has_computed_is_a_good_prefix(pair: tuple[Engine, Engine]) -> None:
    said = both(pair, [request("said", LOOP, 60)])[0][1].tokens
    plain, drafted = both(pair, [request("again", (*LOOP, *said), 30)])[0]
    assert drafted.end().cached_tokens == plain.end().cached_tokens > 60
    assert drafted.tokens == plain.tokens


def test_under_little_memory_and_aborts(checkpoints: dict[str, Path]) -> None:
    """Drafts take no block that a neighbour needs, through preemption; what is aborted leaves nothing behind."""
    small = {"kv_cache_bytes": 40 * 2048, "max_num_seqs": 6, "max_num_batched_tokens": 24}
    asked = [request(f"r{n}", (LOOP * 2)[n : n + 20], 40 + n) for n in range(12)]
    found = []
    for speculation in ("off", "ngram"):
        with running(checkpoints["tied"], speculation=speculation, **small) as engine:
            engine._bursts.steps = Always(8 if engine._runner.bursts else 1).steps  # type: ignore[method-assign]
            calls = [Call(engine, one) for one in asked]
            for call in calls[::4]:
                call.next()
                engine.abort(call.asked.request_id)
            found.append([call.tokens for n, call in enumerate(calls) if n % 4])
            assert {call.end().finish_reason for call in calls[::4]} <= {FinishReason.ABORT, FinishReason.LENGTH}
            until(lambda engine=engine: engine.stats().blocks_used == 0, "every block comes home")  # type: ignore[misc]
    assert found[0] == found[1]
