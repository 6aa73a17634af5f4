"""The engine as its caller sees it: right tokens under all schedules, exact counts, and requests that end once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from omni_proxy.workers.engine.engine import Engine
from omni_proxy.workers.engine.types import (
    EngineConfig,
    EngineRequest,
    FinishReason,
    InvalidRequest,
    PullFrom,
    RequestTooLong,
    SamplingParams,
)
from tests.workers.engine.helpers import Call, generate, greedy, prompt, request, running, until

LENGTHS = (1, 3, 4, 5, 18, 40)


def test_greedy_tokens_equal_transformers_alone_and_batched(checkpoint: Path, reference_of: Callable[..., Any]) -> None:
    prompts = {n: prompt(n, seed=n) for n in LENGTHS}
    want = {n: reference_of(checkpoint).greedy(tokens, 10) for n, tokens in prompts.items()}
    with running(checkpoint, prefix_caching=False) as engine:
        for n, tokens in prompts.items():
            assert generate(engine, f"alone-{n}", tokens, 10) == want[n]
        calls = {n: Call(engine, request(f"batch-{n}", t, 10)) for n, t in prompts.items()}
        assert {n: call.tokens for n, call in calls.items()} == want
        assert engine.stats().prompt_tokens_computed == 2 * sum(LENGTHS)


def test_chunks_and_prefix_hits_change_no_token(checkpoint: Path, reference_of: Callable[..., Any]) -> None:
    prompts = [prompt(n, seed=1) for n in (40, 40, 33, 40, 12)]  # of one seed: common prefixes
    prompts[3] = (*prompts[3][:20], *prompt(20, seed=2))
    want = [reference_of(checkpoint).greedy(tokens, 8) for tokens in prompts]
    with running(checkpoint, max_num_seqs=4, max_num_batched_tokens=7) as engine:
        got = [generate(engine, str(i), tokens) for i, tokens in enumerate(prompts)]
        assert got == want
        assert engine.stats().prefix_hits == 39 + 32 + 20 + 11
        calls = [Call(engine, request(f"again-{i}", tokens)) for i, tokens in enumerate(prompts)]
        assert [call.tokens for call in calls] == want


def test_preemption_changes_no_token(checkpoint: Path, reference_of: Callable[..., Any]) -> None:
    """Four sequences that grow to 28 tokens in a cache of 56."""
    prompts = [prompt(8, seed=n) for n in range(4)]
    want = [reference_of(checkpoint).greedy(tokens, 20) for tokens in prompts]
    block = block_bytes(checkpoint)
    with running(checkpoint, kv_cache_bytes=14 * block) as engine:
        assert engine.info.num_blocks == 14
        calls = [Call(engine, request(str(n), tokens, 20)) for n, tokens in enumerate(prompts)]
        assert [call.tokens for call in calls] == want
        stats = engine.stats()
        assert stats.preemptions > 0
        assert (stats.blocks_used, stats.generation_tokens) == (0, 80)
        assert all(call.end().cached_tokens == 0 for call in calls)


def block_bytes(folder: Path) -> int:
    with running(folder) as engine:
        return engine.info.block_bytes


def test_stats_are_exact(tied: Path) -> None:
    tokens = prompt(18)
    with running(tied) as engine:
        first, second = (Call(engine, request(name, tokens, 5)).end() for name in "ab")
        assert (first.cached_tokens, second.cached_tokens) == (0, 16)
        stats = engine.stats()
        assert stats.prompt_tokens_computed == 18 + 2
        assert (stats.prompt_tokens_cached, stats.prompt_tokens_pulled) == (16, 0)
        assert (stats.prefix_queries, stats.prefix_hits) == (36, 16)
        assert stats.generation_tokens == 10
        assert stats.requests_finished == {"stop": 0, "length": 2, "abort": 0, "error": 0, "abandoned": 0}
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        rows = 18 + 2 + 2 * 4
        assert [sum(layer) for layer in stats.expert_tokens] == [2 * rows] * 2


def test_end_tokens_stop_and_min_tokens_holds_them_off(tied: Path, reference_of: Callable[..., Any]) -> None:
    tokens = prompt(9)
    free = reference_of(tied).greedy(tokens, 12)
    stop = free[3]
    cut = free[: free.index(stop) + 1]
    with running(tied) as engine:
        early = Call(engine, request("stop", tokens, sampling=greedy(12, stop_token_ids=frozenset({stop}))))
        assert early.tokens == cut
        assert early.end().finish_reason is FinishReason.STOP
        held = greedy(12, stop_token_ids=frozenset({stop}), min_tokens=12)
        call = Call(engine, request("min", tokens, sampling=held))
        assert len(call.tokens) == 12
        assert stop not in call.tokens
        assert call.end().finish_reason is FinishReason.LENGTH


def test_the_models_own_end_token_stops_unless_ignored(
    write_checkpoint: Callable[..., Path], tied: Path, reference_of: Callable[..., Any]
) -> None:
    tokens = prompt(9)
    free = reference_of(tied).greedy(tokens, 6)
    folder = write_checkpoint("tied", eos_token_id=free[2])
    with running(folder) as engine:
        call = Call(engine, request("eos", tokens, sampling=SamplingParams(6, temperature=0)))
        assert call.tokens == free[: free.index(free[2]) + 1]
        assert call.end().finish_reason is FinishReason.STOP
        assert generate(engine, "ignored", tokens, 6) == free


def test_a_seed_draws_the_same_alone_and_in_company(tied: Path) -> None:
    sampling = SamplingParams(12, temperature=1.0, top_p=0.95, seed=42, ignore_eos=True)
    with running(tied) as engine:
        alone = generate(engine, "alone", prompt(9), sampling=sampling)
        others = [Call(engine, request(f"o{n}", prompt(n + 5, seed=n), 16)) for n in range(5)]
        assert generate(engine, "company", prompt(9), sampling=sampling) == alone
        other = replace(sampling, seed=43)
        assert generate(engine, "other", prompt(9), sampling=other) != alone
        unseeded = replace(sampling, seed=None)
        assert generate(engine, "u1", prompt(9), sampling=unseeded) != generate(
            engine, "u2", prompt(9), sampling=unseeded
        )
        assert all(call.end().finish_reason is FinishReason.LENGTH for call in others)


def test_logprobs_come_with_each_token(tied: Path, reference_of: Callable[..., Any]) -> None:
    tokens = prompt(9)
    with running(tied) as engine:
        call = Call(engine, request("r", tokens, sampling=greedy(4, logprobs=2)))
        call.end()
    got = [lp for output in call.outputs for lp in output.logprobs or ()]
    assert [lp.token_id for lp in got] == call.tokens
    want = reference_of(tied).logits((*tokens, *call.tokens))[8:-1].log_softmax(-1)
    for lp, row in zip(got, want, strict=True):
        assert lp.logprob == pytest.approx(row[lp.token_id].item(), abs=1e-3)
        assert lp.top[0] == (lp.token_id, lp.logprob)
        assert len(lp.top) == 2


def test_generation_ends_at_the_models_length(tied: Path) -> None:
    with running(tied, max_model_len=12) as engine:
        call = Call(engine, request("r", prompt(9), 100))
        assert len(call.tokens) == 3
        assert call.end().finish_reason is FinishReason.LENGTH


def test_abort_ends_a_running_and_a_waiting_request(tied: Path) -> None:
    with running(tied, max_num_seqs=1) as engine:
        first = Call(engine, request("first", prompt(8), 200))
        first.next()
        second = Call(engine, request("second", prompt(8), 200))
        for call in (second, first):
            engine.abort(call.asked.request_id)
            assert call.end().finish_reason is FinishReason.ABORT
        engine.abort("first")
        engine.abort("unknown")
        assert generate(engine, "first", prompt(8))  # the id is free again
        assert engine.stats().blocks_used == 0


def test_a_failing_step_ends_its_requests_and_the_engine_lives_on(
    tied: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running(tied) as engine:
        real = engine._runner.run

        def broken(chunks: Any, progress: Any) -> Any:
            monkeypatch.setattr(engine._runner, "run", real)
            raise FloatingPointError("out of numbers")

        monkeypatch.setattr(engine._runner, "run", broken)
        last = Call(engine, request("bad", prompt(8))).end()
        assert (last.finish_reason, last.error) == (FinishReason.ERROR, "FloatingPointError: out of numbers")
        assert "out of numbers" in caplog.text
        assert engine.alive
        assert generate(engine, "good", prompt(8))
        assert engine.stats().requests_finished["error"] == 1


def test_a_caller_that_raises_is_aborted(tied: Path) -> None:
    def deaf(_: object) -> None:
        raise BrokenPipeError

    with running(tied) as engine:
        engine.submit(request("deaf", prompt(8), 200), deaf)
        until(lambda: engine.stats().requests_finished["abort"] == 1)
        assert generate(engine, "good", prompt(8))


def test_stop_ends_all_requests(tied: Path) -> None:
    engine = Engine(EngineConfig(str(tied), threads=1, block_size=4))
    assert not engine.alive
    engine.start()
    call = Call(engine, request("r", prompt(8), 200))
    engine.stop()
    assert call.end().finish_reason is FinishReason.ABORT
    assert not engine.alive
    with pytest.raises(RuntimeError, match="stopped"):
        engine.submit(request("late", prompt(8)), print)
    engine.stop()


def test_requests_queued_when_it_stops_are_told(tied: Path) -> None:
    engine = Engine(EngineConfig(str(tied), threads=1, block_size=4, max_num_seqs=1))
    calls = [Call(engine, request(str(n), prompt(8), 200)) for n in range(5)]
    engine.start()
    engine.stop()
    assert [call.end().finish_reason for call in calls] == [FinishReason.ABORT] * 5


def test_an_engine_that_breaks_tells_everybody(
    tied: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(EngineConfig(str(tied), threads=1, block_size=4))

    def broken() -> list[str]:
        raise OSError("no clock")

    monkeypatch.setattr(engine._transfers, "expire_leases", broken)
    call = Call(engine, request("r", prompt(8), 200))
    engine.start()
    assert call.end().error == "OSError: no clock"
    until(lambda: not engine.alive)
    assert "no clock" in caplog.text
    engine.stop()


def test_a_plan_that_fails_ends_all_and_the_engine_lives_on(tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tied) as engine:
        real = engine._planner.plan

        def broken() -> Any:
            monkeypatch.setattr(engine._planner, "plan", real)
            raise AssertionError("lost")

        monkeypatch.setattr(engine._planner, "plan", broken)
        assert Call(engine, request("bad", prompt(8))).end().error == "AssertionError: lost"
        assert generate(engine, "good", prompt(8))


def test_an_engine_that_never_started_can_be_stopped(tied: Path) -> None:
    Engine(EngineConfig(str(tied))).stop()


def test_the_prefix_cache_can_be_reset_when_idle(tied: Path) -> None:
    tokens = prompt(12)
    with running(tied) as engine:
        generate(engine, "a", tokens)
        assert engine.reset_prefix_cache()
        assert Call(engine, request("b", tokens, 1)).end().cached_tokens == 0
        busy = Call(engine, request("c", tokens, 200))
        busy.next()
        assert not engine.reset_prefix_cache()
        engine.abort("c")
        busy.end()


def test_salts_separate_caches(tied: Path) -> None:
    with running(tied) as engine:
        generate(engine, "a", prompt(12), cache_salt="x")
        assert Call(engine, request("b", prompt(12), 1, cache_salt="y")).end().cached_tokens == 0
        assert Call(engine, request("c", prompt(12), 1, cache_salt="x")).end().cached_tokens == 11


BASE = EngineRequest("r", (1, 2, 3), SamplingParams(4))
PULL = PullFrom("P", "r", "127.0.0.1", 5000, (0,), 3)


def sampled(**changes: Any) -> EngineRequest:
    return replace(BASE, sampling=replace(BASE.sampling, **changes))


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (replace(BASE, request_id=""), "request_id"),
        (replace(BASE, prompt_token_ids=()), "prompt"),
        (replace(BASE, prompt_token_ids=(1, 256)), "prompt"),
        (replace(BASE, prompt_token_ids=(-1, 2)), "prompt"),
        (sampled(max_tokens=0), "max_tokens"),
        (sampled(temperature=-0.1), "temperature"),
        (sampled(temperature=float("nan")), "temperature"),
        (sampled(top_p=0.0), "top_p"),
        (sampled(top_p=1.1), "top_p"),
        (sampled(top_k=-1), "top_k"),
        (sampled(min_tokens=5), "min_tokens"),
        (sampled(min_tokens=-1), "min_tokens"),
        (sampled(logprobs=257), "logprobs"),
        (sampled(logprobs=-1), "logprobs"),
        (sampled(stop_token_ids=frozenset({256})), "stop_token_ids"),
        (sampled(min_tokens=1, stop_token_ids=frozenset(range(256))), "stop_token_ids"),
        (replace(BASE, pull=replace(PULL, num_tokens=4)), "kv_transfer_params"),
        (replace(BASE, pull=replace(PULL, num_tokens=0)), "kv_transfer_params"),
        (replace(BASE, pull=replace(PULL, port=0)), "kv_transfer_params"),
    ],
)
def test_an_impossible_request_is_refused_at_once(idle: Engine, bad: EngineRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        idle.submit(bad, print)
    assert caught.value.field == field
    assert idle.stats().waiting == 0


@pytest.fixture(scope="module")
def idle(tied: Path) -> Any:
    engine = Engine(EngineConfig(str(tied), max_model_len=16, block_size=4))
    yield engine
    engine.stop()


def test_a_prompt_that_never_fits_is_refused(idle: Engine) -> None:
    with pytest.raises(RequestTooLong, match="16 tokens"):
        idle.submit(replace(BASE, prompt_token_ids=(1,) * 16), print)


def test_an_id_in_use_is_refused(tied: Path) -> None:
    with running(tied) as engine:
        call = Call(engine, request("r", prompt(8), 200))
        with pytest.raises(InvalidRequest, match="in use"):
            engine.submit(request("r", prompt(8)), print)
        engine.abort("r")
        call.end()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kv_cache_bytes": 100}, "less than one block"),
        ({"kv_cache_bytes": 40_000, "max_model_len": 200}, "does not fit the KV cache"),
        ({"max_model_len": 257}, "outside the model's 2..256"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "exceeds max_num_batched_tokens"),
        ({"dtype": "float16"}, "dtype must be one of"),
        ({"role": "both"}, "role must be one of"),
        ({"kv_lease_s": 0.0}, "kv_lease_s must be above 0"),
        ({"kv_load_failure_policy": "hope"}, "kv_load_failure_policy must be one of"),
    ],
)
def test_sizes_that_make_no_engine_are_refused(tied: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Engine(EngineConfig(str(tied), **changes))


def test_a_small_cache_shortens_what_is_accepted(tied: Path) -> None:
    engine = Engine(EngineConfig(str(tied), block_size=4, kv_cache_bytes=5 * 2048))
    assert (engine.info.num_blocks, engine.info.max_model_len) == (5, 20)
    engine.stop()


def test_a_sleeping_engine_has_no_cache_and_takes_nothing(tied: Path) -> None:
    with running(tied) as engine:
        want = generate(engine, "before", prompt(20))
        busy = Call(engine, request("busy", prompt(8), 200))
        busy.next()
        assert not engine.sleep()
        busy.end()
        assert engine.sleep()
        assert engine.asleep
        assert engine.sleep()
        with pytest.raises(RuntimeError, match="the engine sleeps"):
            Call(engine, request("meanwhile", prompt(8)))
        assert engine._runner._kv.numel() == 0
        assert engine.wake_up()
        after = Call(engine, request("after", prompt(20)))
        assert after.tokens == want
        assert after.end().cached_tokens == 0


def test_kept_kv_keeps_the_engine_awake(tied: Path) -> None:
    with running(tied) as engine:
        Call(engine, request("p", prompt(20), 1, keep_kv=True)).end()
        assert not engine.sleep()
        engine.release("p")
        assert engine.sleep()


def test_the_first_output_tells_how_long_the_request_waited(tied: Path) -> None:
    with running(tied, max_num_seqs=1) as engine:
        first = Call(engine, request("first", prompt(8), 60))
        second = Call(engine, request("second", prompt(8), 3))
        first.end()
        second.end()
        assert [output.queued_s for output in second.outputs[1:]] == [0.0] * (len(second.outputs) - 1)
        assert second.outputs[0].queued_s > first.outputs[0].queued_s > 0
