"""Ranks as processes: the same tokens and bits as without them, across re-placements, failures and losses."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import omni_kernels as ops
from omni_proxy.workers.engine.engine import Engine
from omni_proxy.workers.engine.expert_parallel.experts import ExpertSlots
from omni_proxy.workers.engine.expert_parallel.group import StartFailed
from omni_proxy.workers.engine.expert_parallel.leader import ExpertOptions, ExpertParallel, first_placement
from omni_proxy.workers.engine.expert_parallel.weights import load_slots
from omni_proxy.workers.engine.expert_parallel.wire import RankLost
from omni_proxy.workers.engine.hf_config import read_config
from omni_proxy.workers.engine.placement.controller import Step
from omni_proxy.workers.engine.placement.match import moves_between
from omni_proxy.workers.engine.placement.place import Options, place
from omni_proxy.workers.engine.placement.plan import Placement
from omni_proxy.workers.engine.placement.shares import Split
from omni_proxy.workers.engine.placement.topology import Topology
from omni_proxy.workers.engine.types import EngineConfig, FinishReason
from tests.workers.engine.helpers import WAIT_S, Call, prompt, request, running, until

pytestmark = [pytest.mark.slow, pytest.mark.e2e]
MOE_LAYERS = (0, 2)


@contextmanager
def ranks(model: Path, count: int, **options_: float) -> Iterator[ExpertParallel]:
    options = ExpertOptions(count, **{"window_steps": 0, **options_})  # type: ignore[arg-type]
    experts = ExpertParallel(model, read_config(model), torch.float32, options, on_lost=lambda: None)
    try:
        yield experts
    finally:
        experts.stop()
        assert not any(alive(pid) for pid in experts.pids)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def other_placement(model: Path, count: int, seed: int) -> Placement:
    """One for skewed loads, with as many slots as the first."""
    loads = np.random.default_rng(seed).gamma(0.3, size=(2, 8)) + 1e-3
    return place(loads, Topology(count), Options(count, Split.PROPORTIONAL))


class Reference:
    """All experts in this process, each row computed alone."""

    def __init__(self, model: Path) -> None:
        self.slots: ExpertSlots = load_slots(model, read_config(model), [list(range(8))] * 2, torch.float32)

    def layer(self, nth: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = []
        for row, chosen, parts in zip(x, ids.tolist(), weights, strict=True):
            total = torch.zeros_like(row)
            for choice, (expert, part) in enumerate(zip(chosen, parts, strict=True)):
                counts = np.zeros((1, 8), np.int64)
                counts[0, expert] = 1
                scaled = self.slots.compute(nth, row.unsqueeze(0), counts)[0] * part
                total = total + scaled if choice else scaled
            rows.append(total)
        return torch.stack(rows)


def rows_for(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 64, generator=generator)
    ids, weights, _ = ops.moe_route(torch.randn(count, 8, generator=generator), 2, True)
    return x, ids, weights


def step(experts: ExpertParallel, seed: int, count: int) -> list[torch.Tensor]:
    return [experts(layer, *rows_for(seed + layer, count)) for layer in MOE_LAYERS]


def test_layers_are_equal_bit_for_bit_wherever_experts_are(model: Path) -> None:
    count = 3
    reference = Reference(model)
    with ranks(model, count) as experts:
        placement = first_placement(read_config(model), ExpertOptions(count))
        for seed in range(8):
            if seed in (2, 5):
                after = other_placement(model, count, seed)
                experts.replace(Step(after, tuple(moves_between(placement, after))))
                placement = after
            size = (1, 2, 7, 19)[seed % 4]
            want = [reference.layer(nth, *rows_for(seed + layer, size)) for nth, layer in enumerate(MOE_LAYERS)]
            assert all(torch.equal(a, b) for a, b in zip(step(experts, seed, size), want, strict=True))
        assert experts.stats().copied > 0
        whole = step(experts, 1, 5)
        experts(0, *rows_for(9, 3))  # and nothing for layer 2: the step has failed
        assert all(torch.equal(a, b) for a, b in zip(step(experts, 1, 5), whole, strict=True))


def test_greedy_tokens_equal_the_unplaced_engine_while_experts_move(model: Path) -> None:
    count = 2
    prompts = [prompt(3 + 4 * n, seed=n) for n in range(6)]
    with running(model, prefix_caching=False) as engine:
        calls = [Call(engine, request(str(n), tokens, 40)) for n, tokens in enumerate(prompts)]
        want = [call.tokens for call in calls]
    with running(model, prefix_caching=False, expert_parallel=count, expert_window_steps=4) as engine:
        calls = [Call(engine, request(str(n), tokens, 40)) for n, tokens in enumerate(prompts)]
        assert [call.tokens for call in calls] == want
        again = 0
        while engine.stats().experts_copied == 0:
            again += 1
            assert Call(engine, request(f"again-{again}", prompts[5], 40)).tokens == want[5]
        stats = engine.stats()
    assert len(stats.expert_imbalance) == len(MOE_LAYERS)
    assert all(ratio >= 1 for ratio in stats.expert_imbalance)


def test_a_lost_rank_ends_requests_and_the_engine(model: Path) -> None:
    engine = Engine(EngineConfig(str(model), block_size=4, kv_cache_bytes=1 << 20, threads=1, expert_parallel=2))
    engine.start()
    try:
        call = Call(engine, request("r", prompt(5), 200))
        call.next()
        assert engine._experts is not None
        os.kill(engine._experts.pids[0], signal.SIGKILL)
        last = call.end()
        assert last.finish_reason is FinishReason.ABANDONED
        assert "rank" in (last.error or "")
        until(lambda: not engine.alive, "the engine's end")
    finally:
        engine.stop()


def test_a_rank_lost_while_idle_ends_the_engine(model: Path) -> None:
    engine = Engine(EngineConfig(str(model), block_size=4, kv_cache_bytes=1 << 20, threads=1, expert_parallel=2))
    engine.start()
    try:
        assert engine._experts is not None
        os.kill(engine._experts.pids[0], signal.SIGKILL)
        until(lambda: not engine.alive, "the engine's end")
    finally:
        engine.stop()
    assert not any(alive(pid) for pid in engine._experts.pids)


def test_a_rank_lost_during_a_replacement_is_a_lost_rank(model: Path) -> None:
    """It stands still when its weights are to move, and then it is gone."""
    with ranks(model, 2) as experts, ThreadPoolExecutor(1) as pool:
        step(experts, 0, 3)
        before, after = first_placement(read_config(model), ExpertOptions(2)), other_placement(model, 2, 5)
        experts.replace(Step(after, tuple(moves_between(before, after))))
        os.kill(experts.pids[0], signal.SIGSTOP)
        running_step = pool.submit(step, experts, 0, 3)
        until(lambda: experts._group._busy_since is not None)
        os.kill(experts.pids[0], signal.SIGKILL)
        with pytest.raises(RankLost):
            running_step.result(WAIT_S)


def test_a_rank_that_hangs_is_ended(model: Path) -> None:
    with ranks(model, 2, hang_timeout_s=0.5) as experts:
        step(experts, 0, 3)
        os.kill(experts.pids[0], signal.SIGSTOP)
        with pytest.raises(RankLost):
            step(experts, 0, 3)


def test_a_model_without_experts_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="no MoE layers"):
        first_placement(replace(read_config(model), sparse_layers=frozenset()), ExpertOptions(2))


def test_ranks_that_cannot_load_are_one_line(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    with pytest.raises(StartFailed, match=r"expert rank 1: .*model\.safetensors"):
        ExpertParallel(tmp_path, read_config(model), torch.float32, ExpertOptions(2), on_lost=lambda: None)
