"""The gateway's view of bounded caches is the caches' own: traces in simulated time, with the engine's block pool."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.apc.replay import BLOCK, Prompts, Setting, World, replay
from omni_proxy.sim.workload import SimRequest

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"


def conversations(count: int, turns: int) -> list[SimRequest]:
    """Conversations that grow by two blocks a turn behind a common beginning, interleaved."""
    requests, key = [], 1
    histories: list[tuple[int, ...]] = [(0,)] * count
    for turn in range(turns):
        for number in range(count):
            histories[number] += (key, key + 1)
            key += 2
            at = turn * 8.0 + number * 0.2
            blocks = histories[number]
            requests.append(SimRequest(at, len(blocks) * BLOCK - 100, 20, blocks))
    return requests


@pytest.mark.slow
@pytest.mark.parametrize(("events", "least"), [(True, 0.99), (False, 0.90)])
def test_predictions_equal_reports(events: bool, least: float) -> None:
    setting = Setting(workers=3, cache_tokens=60 * BLOCK, events=events)
    result = World(setting, Prompts(1, False)).run(conversations(24, 8))
    assert result.requests == 24 * 8
    assert result.exact_share >= least
    # Sixty blocks hold seven conversations of the last turn: there was something to forget.
    assert 0.1 < result.reported_tokens / result.prompt_tokens < 0.9


@pytest.mark.slow
def test_texts_are_blocks_of_the_same_prefixes() -> None:
    requests = conversations(4, 3)
    result = World(Setting(workers=2, events=True), Prompts(1, True)).run(requests)
    assert result.requests == len(requests)
    assert result.exact_share >= 0.9
    assert result.prompt_tokens == sum(r.prompt_tokens for r in requests)


@pytest.mark.slow
@pytest.mark.skipif(not TRACE.is_file(), reason="the trace is not here")
@pytest.mark.parametrize(("events", "least"), [(True, 0.99), (False, 0.90)])
def test_the_first_minutes_of_a_real_trace(events: bool, least: float) -> None:
    result = replay(TRACE, Setting(minutes=2, cache_tokens=128 * 1024, events=events))
    assert result.requests > 300
    assert result.exact_share >= least
