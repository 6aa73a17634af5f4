"""Drafts by a model's own head: what it guesses is what its definition guesses, and what comes out is never changed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest
import torch

import omni_kernels as ops
from omni_proxy.workers.engine.attention import Rows
from omni_proxy.workers.engine.draft_checkpoint import load_with_head
from omni_proxy.workers.engine.draft_head import DraftHead
from omni_proxy.workers.engine.engine import Engine
from omni_proxy.workers.engine.guesser import Guesser
from omni_proxy.workers.engine.head_drafts import GUESS, HeadDrafter
from omni_proxy.workers.engine.model import Batch, DecoderModel
from omni_proxy.workers.engine.planner import Chunk
from omni_proxy.workers.engine.sequence import Sequence as EngineSequence
from omni_proxy.workers.engine.server_metrics import ServerMetrics
from omni_proxy.workers.engine.types import FinishReason, JoinRoom, SamplingParams
from tests.workers.engine.heads import KINDS, Headed, write_headed
from tests.workers.engine.helpers import Call, generate, greedy, prompt, pull_from, request, running, until

VOCAB = 128
LIMIT = 1e-3

Make = Callable[..., Headed]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Checkpoints, written once."""
    made: dict[tuple[str, float | None], Headed] = {}

    def headed(kind: str, copy: float | None = None) -> Headed:
        if (kind, copy) not in made:
            made[kind, copy] = write_headed(tmp_path_factory.mktemp(kind), kind, copy)
        return made[kind, copy]

    return headed


def always(engine: Engine, count: int, seed: int | None = None) -> None:
    """Have the head make every draft: of `count` tokens, or of up to so many by chance."""
    drafter, chance = engine._drafter, random.Random(seed)
    assert isinstance(drafter, HeadDrafter)

    def propose(seq: EngineSequence, sequences: int, most: int) -> tuple[int, ...]:
        left = seq.request.sampling.max_tokens - seq.num_generated - 1
        wanted = 0 if not seq.num_generated else count if seed is None else chance.randrange(count + 1)
        return (GUESS,) * max(0, min(wanted, left, most))

    drafter.propose = propose  # type: ignore[method-assign]


def guesses_of(engine: Engine) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """What is guessed from now on, and after which tokens."""
    guesser = engine._runner._guesser
    assert guesser is not None
    seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    guess = guesser.guess

    def watch(chunks: Sequence[Chunk], cache: torch.Tensor) -> Sequence[Chunk]:
        filled = guess(chunks, cache)
        seen.extend((tuple(c.seq.tokens), c.draft) for c, asked in zip(filled, chunks, strict=True) if asked.draft)
        return filled

    guesser.guess = watch  # type: ignore[method-assign]
    return seen


def assert_guesses(headed: Headed, seen: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """All are what the definition says, as far as it does not hesitate between two."""
    for tokens, draft in seen:
        for (token, lead), got in zip(headed.guesses(tokens, len(draft)), draft, strict=True):
            if lead < LIMIT:
                break
            assert got == token


# -- the head


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [(0, 30), (0, 1, 9, 10, 30)])
def test_its_logits_are_those_of_the_definition(make: Make, kind: str, cuts: tuple[int, ...]) -> None:
    headed, tokens = make(kind), prompt(31, vocab=VOCAB)
    checkpoint, weights = load_with_head(headed.folder, torch.float32, True, headed.options["draft_model"])
    assert weights is not None
    model = DecoderModel(checkpoint, 256)
    head = DraftHead(weights, checkpoint, model.output, 256)
    kv, hidden = torch.zeros(model.kv_shape(8, 4)), torch.empty(31, checkpoint.config.hidden_size)
    table = [3, 1, 7, 0, 2, 5, 4, 6]
    slots = torch.tensor([table[p // 4] * 4 + p % 4 for p in range(31)])
    with torch.inference_mode():
        whole = Batch(
            torch.tensor(tokens),
            torch.arange(31),
            slots,
            ops.attention_batch([31], [31], [table], 4),
            torch.tensor([30]),
        )
        model.forward(whole, kv[:-1], hidden=hidden)
        torch.testing.assert_close(hidden, headed.hidden(tokens), atol=LIMIT, rtol=0)
        for start, stop in pairwise(cuts):
            batch = ops.attention_batch([stop - start], [stop], [table], 4)
            rows = Rows(head.places(torch.arange(start, stop), slots[start:stop]), batch)
            following = torch.tensor(tokens[start + 1 : stop + 1])
            got = head.logits(head(hidden[start:stop], following, kv[-1], rows))
            torch.testing.assert_close(got, headed.logits(tokens)[start:stop], atol=LIMIT, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_guessed_through_chunks_hits_and_wrong_guesses(make: Make, kind: str) -> None:
    """Rows of the head's cache are right whatever was accepted before, in a batch, and behind a cached prefix."""
    headed = make(kind)
    prompts = [prompt(n, seed=n, vocab=VOCAB) for n in (3, 37, 16, 50)]
    with running(headed.folder, max_num_batched_tokens=16, max_num_seqs=4, **headed.options) as engine:
        always(engine, 4, seed=3)
        seen = guesses_of(engine)
        calls = [Call(engine, request(str(n), tokens, 25)) for n, tokens in enumerate(prompts)]
        answers = [call.tokens for call in calls]
        assert len(seen) > 20
        again = Call(engine, request("again", (*prompts[1], *answers[1]), 10))
        assert again.end().cached_tokens >= 56
    assert_guesses(headed, seen)


# -- what comes out


@pytest.fixture(scope="module")
def pairs(make: Make) -> Iterator[Callable[..., tuple[Engine, Engine]]]:
    """The same model without drafts, and with the head's on every step."""
    with ExitStack() as stack:
        made: dict[tuple[str, float | None], tuple[Engine, Engine]] = {}

        def pair(kind: str, copy: float | None = None) -> tuple[Engine, Engine]:
            if (kind, copy) not in made:
                headed = make(kind, copy)
                plain = stack.enter_context(running(headed.folder, speculation="off"))
                spec = stack.enter_context(running(headed.folder, **headed.options))
                always(spec, 4, seed=7)
                made[kind, copy] = plain, spec
            return made[kind, copy]

        yield pair


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("copy", [None, 0.02])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 5])
def test_tokens_are_equal(
    pairs: Callable[..., tuple[Engine, Engine]], kind: str, copy: float | None, temperature: float, batch: int
) -> None:
    plain, spec = pairs(kind, copy)
    sampling = SamplingParams(30, temperature=temperature, seed=11, ignore_eos=True, top_p=0.95, logprobs=1)
    asked = [request(f"{n}{batch}", prompt(5 + 9 * n, seed=n, vocab=VOCAB), sampling=sampling) for n in range(batch)]
    calls = [[Call(engine, one) for one in asked] for engine in (plain, spec)]
    for quiet, drafted in zip(*calls, strict=True):
        assert drafted.tokens == quiet.tokens
        found = [[one.logprob for out in call.outputs for one in out.logprobs or ()] for call in (quiet, drafted)]
        assert found[1] == pytest.approx(found[0], abs=1e-4)
        assert len(found[1]) == 30


def test_ends_within_a_draft(pairs: Callable[..., tuple[Engine, Engine]]) -> None:
    plain, spec = pairs("eagle", 0.02)
    tokens = prompt(9, vocab=VOCAB)
    said = generate(plain, "probe", tokens, 40)
    for place in (2, 17, 31):
        sampling = greedy(40, stop_token_ids=frozenset({said[place]}))
        calls = [Call(engine, request(f"stop{place}", tokens, sampling=sampling)) for engine in (plain, spec)]
        assert calls[0].tokens == calls[1].tokens
        assert calls[1].end().finish_reason is FinishReason.STOP


def test_sampled_tokens_have_the_model_s_distribution(pairs: Callable[..., tuple[Engine, Engine]]) -> None:
    """Over many seeds, what is drawn inside drafts is distributed as what is drawn without (chi-squared, 1 in 1000)."""
    plain, spec = pairs("eagle", 0.02)
    before = spec.stats().spec_accepted_tokens
    counts: list[Counter[int]] = [Counter(), Counter()]
    for seed in range(150):
        for engine, first, count in ((spec, 0, counts[0]), (plain, 10_000, counts[1])):
            params = SamplingParams(6, temperature=0.9, seed=seed + first, ignore_eos=True, top_k=4)
            count.update(t % 5 for t in Call(engine, request(f"s{seed}", (9, 8, 7), sampling=params)).tokens)
    assert spec.stats().spec_accepted_tokens - before > 50
    drafted, expected = counts
    statistic = sum((drafted[k] - expected[k]) ** 2 / (drafted[k] + expected[k]) for k in set(drafted) | set(expected))
    assert statistic < 18.5  # 4 degrees of freedom


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_knows_its_model_is_mostly_right(make: Make, kind: str) -> None:
    headed = make(kind, 0.001)
    with running(headed.folder, **headed.options) as engine:
        always(engine, 3)
        call = Call(engine, request("r", prompt(20, vocab=VOCAB), 80))
        assert len(call.tokens) == 80
        stats = engine.stats()
        assert stats.spec_guessed_tokens == stats.spec_draft_tokens > 0
        assert stats.spec_guessed_accepted == stats.spec_accepted_tokens > 0.7 * stats.spec_draft_tokens
        assert len(call.outputs) < 45
        told = ServerMetrics(lambda: stats, "m").exposition().decode()
        assert len(stats.spec_accepted_places) == 3
        assert sum(stats.spec_accepted_places) == stats.spec_accepted_tokens
        assert 'accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"}' in told
        for name, count in (("draft", stats.spec_guessed_tokens), ("accepted", stats.spec_guessed_accepted)):
            assert f'omni_{name}_tokens_total{{engine="0",kind="head",model_name="m"}} {float(count)}' in told
            assert f'omni_{name}_tokens_total{{engine="0",kind="ngram",model_name="m"}} 0.0' in told


def test_masks_and_penalties_get_no_drafts(make: Make) -> None:
    headed = make("eagle", 0.003)
    with running(headed.folder, **headed.options) as engine:
        always(engine, 3)
        sampling = greedy(30, presence_penalty=0.5)
        assert len(Call(engine, request("r", prompt(20, vocab=VOCAB), sampling=sampling)).tokens) == 30
        assert engine.stats().spec_drafts == 0
        guesser = engine._runner._guesser
        assert isinstance(guesser, Guesser)


# -- memory, sleep, handoffs


def test_many_at_once_under_little_memory(make: Make) -> None:
    """Preemption, prefix hits and aborts: the same tokens, every block comes home, nothing is remembered."""
    headed, chance = make("mtp", 0.02), random.Random(4)
    small = {"kv_cache_bytes": 40 * 4 * 4 * 32 * 4, "max_num_seqs": 6, "max_num_batched_tokens": 24}
    asked = [request(f"r{n}", prompt(20, seed=n % 4, vocab=VOCAB), 30 + n) for n in range(12)]
    with running(headed.folder, speculation="off") as quiet:
        want = [Call(quiet, one).tokens for one in asked]
    with running(headed.folder, **small, **headed.options) as engine:
        always(engine, 3, seed=1)
        calls = []
        for one in asked:
            calls.append(Call(engine, one))
            if chance.random() < 0.3:
                engine.abort(chance.choice(calls).asked.request_id)
        for call, tokens in zip(calls, want, strict=True):
            if call.end().finish_reason is FinishReason.LENGTH:
                assert call.tokens == tokens
        assert engine.stats().requests_finished["length"] >= 4
        assert engine.stats().preemptions > 0
        until(lambda: engine.stats().blocks_used == 0, "every block comes home")
        guesser = engine._runner._guesser
        assert guesser is not None
        assert len(guesser) == 0


def test_sleep_and_wake(make: Make) -> None:
    headed = make("mtp", 0.02)
    with running(headed.folder, **headed.options) as engine:
        always(engine, 3)
        seen = guesses_of(engine)
        first = generate(engine, "a", prompt(12, vocab=VOCAB), 20)
        until(engine.sleep, "it sleeps")
        assert engine.wake_up()
        assert generate(engine, "b", prompt(12, vocab=VOCAB), 20) == first
    assert_guesses(headed, seen)


@pytest.mark.parametrize("length", [35, 38])
@pytest.mark.parametrize("push", [False, True])
def test_the_head_s_cache_is_handed_over(make: Make, push: bool, length: int) -> None:
    """D's first guesses are those of somebody who has seen the prompt, whose last chunk fills no block or some."""
    headed, tokens = make("mtp"), prompt(length, vocab=VOCAB)
    options: dict[str, Any] = {"max_num_batched_tokens": 17, "max_num_seqs": 8, **headed.options}
    with (
        running(headed.folder, engine_id="p", **options) as p,
        running(headed.folder, engine_id="d", **options) as d,
        running(headed.folder, speculation="off") as quiet,
    ):
        always(d, 3)
        seen = guesses_of(d)
        port = p.info.side_channel_port
        leg = Call(p, request("leg", tokens, 1, keep_kv=True, room=5 if push else None))
        if push:
            call = Call(d, request("d", tokens, 12, join=JoinRoom("127.0.0.1", port, 5)))
        else:
            call = Call(d, request("d", tokens, 12, pull=pull_from(leg.end().handoff)))
        assert call.tokens == generate(quiet, "q", tokens, 12)
        assert d.stats().prompt_tokens_computed == 1
        until(lambda: p.stats().blocks_used == 0, "P is done")
    assert seen
    assert_guesses(headed, seen)


def test_who_has_no_head_refuses_kv_of_who_has_one(make: Make) -> None:
    headed, tokens = make("mtp"), prompt(9, vocab=VOCAB)
    with running(headed.folder, engine_id="p", **headed.options) as p, running(headed.folder) as d:
        leg = Call(p, request("leg", tokens, 1, keep_kv=True))
        pulled = Call(d, request("pulled", tokens, 2, pull=pull_from(leg.end().handoff)))
        assert "layers is 4 here and 3 there" in str(pulled.end().error)
        p.release("leg")
