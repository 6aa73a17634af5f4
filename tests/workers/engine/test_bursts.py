"""Several steps in one call change when tokens come, never which; and nobody who waits is kept waiting by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_proxy.workers.engine.bursts import Bursts
from omni_proxy.workers.engine.engine import Engine
from omni_proxy.workers.engine.planner import Planner
from omni_proxy.workers.engine.sequence import Sequence
from omni_proxy.workers.engine.types import EngineRequest, FinishReason, SamplingParams
from tests.workers.engine.helpers import Call, greedy, prompt, request, running
from tests.workers.engine.test_planner import carry_out, planner, sequence

QUICK = 1e-5
"""Seconds of a step so short that nothing speaks against a long burst."""


def decoding(sampling: SamplingParams | None = None, said: int = 5, **fields: Any) -> Sequence:
    """A sequence that has said some tokens."""
    seq = Sequence(EngineRequest("r", (1, 2, 3), sampling or SamplingParams(100), **fields), 4)
    seq.tokens += [7] * said
    return seq


def bursts(most: int = 8, seconds: float = QUICK) -> Bursts:
    made = Bursts(most, max_model_len=256)
    made.took(1, seconds)
    return made


# -- how many


def test_the_first_step_of_a_batch_goes_alone() -> None:
    made = bursts()
    assert made.steps([decoding()]) == 8
    assert made.steps([decoding(), decoding()]) == 1  # two have not been seen yet


@pytest.mark.parametrize(("seconds", "steps"), [(0.0003, 8), (0.0019, 4), (0.0039, 2), (0.005, 1), (0.5, 1)])
def test_long_steps_make_short_bursts(seconds: float, steps: int) -> None:
    assert bursts(seconds=seconds).steps([decoding()]) == steps


def test_one_slow_step_is_no_reason() -> None:
    made = bursts()
    made.took(1, QUICK)
    made.took(1, 1.0)
    assert made.steps([decoding()]) == 8


@pytest.mark.parametrize(
    ("seq", "steps"),
    [
        (decoding(SamplingParams(8), said=5), 3),
        (decoding(SamplingParams(1000), said=250), 3),
        (decoding(said=0), 1),
        (decoding(SamplingParams(100, min_tokens=6)), 1),
        (decoding(SamplingParams(100, min_tokens=5)), 8),
        (decoding(SamplingParams(100, logprobs=0)), 1),
        (decoding(SamplingParams(100, min_p=0.1)), 1),
        (decoding(SamplingParams(100, presence_penalty=0.1)), 1),
        (decoding(SamplingParams(100, logit_bias=((3, 1.0),))), 1),
        (decoding(SamplingParams(100, temperature=0.5, top_k=3, top_p=0.5)), 8),
        (decoding(room=3), 1),
        (decoding(guide=object()), 1),
    ],
)
def test_what_a_sequence_allows(seq: Sequence, steps: int) -> None:
    made = bursts()
    made.took(2, QUICK)
    assert made.steps([seq]) == steps
    assert made.steps([decoding(), seq]) == steps


# -- in a plan


class Always:
    """Any number of steps, whatever they take."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def steps(self, sequences: list[Sequence]) -> int:
        return self._steps


def with_bursts(blocks: int, steps: int = 4) -> Planner:
    pool = planner(blocks)[1]
    return Planner(pool, 4, 16, bursts=Always(steps))


def test_nobody_who_waits_is_kept_waiting() -> None:
    plans = with_bursts(blocks=16)
    plans.add(sequence("a", 3))
    first = plans.plan()
    assert first.steps == 1  # a prompt
    carry_out(plans, first)
    assert plans.plan().steps == 4
    plans.add(sequence("b", 20))
    assert plans.plan().steps == 1  # its first part
    plans.add(sequence("c", 3, pull=3))
    assert plans.plan().steps == 1  # a pull that may end at any time


def test_a_burst_takes_only_blocks_that_nobody_needs() -> None:
    plans = with_bursts(blocks=3)
    for name in "ab":
        plans.add(sequence(name, 3))
    carry_out(plans, plans.plan())
    assert plans.plan().steps == 1  # each would need a second block, and one is left
    plans.remove("b")
    assert plans.plan().steps == 4
    plans.check()


# -- in an engine


@pytest.fixture(scope="module")
def pair(checkpoints: dict[str, Path]) -> Iterator[tuple[Engine, Engine]]:
    """The same model, with every step by itself and with bursts."""
    config = {"kv_cache_bytes": 4 << 20, "speculation": "off"}
    with (
        running(checkpoints["tied"], burst_steps=1, **config) as single,
        running(checkpoints["tied"], **config) as burst,
    ):
        if not burst._runner.bursts:
            pytest.skip("no compiled kernels here")
        burst._bursts.steps = Always(8).steps  # type: ignore[method-assign]  # a busy machine's steps may be slow
        yield single, burst


def both(pair: tuple[Engine, Engine], asked: list[EngineRequest]) -> list[tuple[Call, Call]]:
    calls = [[Call(engine, one) for one in asked] for engine in pair]
    for call in (*calls[0], *calls[1]):
        call.end()
    return list(zip(*calls, strict=True))


def told(call: Call) -> list[int]:
    """Tokens of each output."""
    return [len(output.token_ids) for output in call.outputs]


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.8}, {"temperature": 0.9, "top_k": 5}],
)
def test_tokens_are_bit_equal(pair: tuple[Engine, Engine], options: dict[str, Any]) -> None:
    sampling = [SamplingParams(41, seed=n, ignore_eos=True, **options) for n in range(3)]
    asked = [request(f"{options}{n}", prompt(9 + n), sampling=one) for n, one in enumerate(sampling)]
    for single, burst in both(pair, asked):
        assert burst.tokens == single.tokens
        assert len(burst.tokens) == 41
        assert len(told(burst)) < len(told(single)) == 41
        assert told(burst)[0] == 1  # the first token goes out at once


def test_beside_drafts_too(pair: tuple[Engine, Engine], checkpoints: dict[str, Path]) -> None:
    loop = (1, 2, 3, 4, 5) * 6
    with running(checkpoints["tied"], kv_cache_bytes=4 << 20) as drafting:
        said = [Call(engine, request("loop", loop, 120)) for engine in (pair[0], drafting)]
        assert said[0].tokens == said[1].tokens
        assert drafting.stats().spec_drafts > 0
        assert len(told(said[1])) < len(told(said[0]))


def test_an_end_within_a_burst_is_the_end(pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    model, computed = pair[1]._runner.model, list[list[int]]()
    whole = model.burst

    def watched(*args: Any) -> Any:
        done = whole(*args)
        computed.append(done.tokens[0])
        return done

    said = both(pair, [request("probe", prompt(9), 40)])[0][1].tokens
    for place in range(3, 12):
        sampling = greedy(40, stop_token_ids=frozenset({said[place]}))
        with monkeypatch.context() as patch:
            patch.setattr(model, "burst", watched)
            single, burst = both(pair, [request(f"stop{place}", prompt(9), sampling=sampling)])[0]
        assert burst.tokens == single.tokens
        assert computed.pop()[-1] == said[place], "nothing is computed behind it"
        assert burst.end().finish_reason is single.end().finish_reason is FinishReason.STOP


def test_what_a_burst_has_computed_is_a_good_prefix(pair: tuple[Engine, Engine]) -> None:
    said = both(pair, [request("said", prompt(30, seed=4), 30)])[0][1].tokens
    again = request("again", (*prompt(30, seed=4), *said), 20)
    single, burst = both(pair, [again])[0]
    assert burst.end().cached_tokens == single.end().cached_tokens > 50
    assert burst.tokens == single.tokens


def test_a_step_that_fails_ends_its_requests(pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = pair[1]

    def broken(*_: object) -> torch.Tensor:
        monkeypatch.undo()
        raise FloatingPointError("out of numbers")

    monkeypatch.setattr(engine._runner.model, "burst", broken)
    last = Call(engine, request("bad", prompt(8), 40)).end()
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, "FloatingPointError: out of numbers")
    assert len(Call(engine, request("good", prompt(8), 40)).tokens) == 40


def test_greedy_tokens_equal_transformers(
    pair: tuple[Engine, Engine], checkpoints: dict[str, Path], reference_of: Callable[..., Any]
) -> None:
    want = reference_of(checkpoints["tied"]).greedy(prompt(12), 30)
    assert Call(pair[1], request("them", prompt(12), 30)).tokens == want
