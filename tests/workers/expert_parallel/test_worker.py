"""A worker with `--expert-parallel 2` answers as without, says how its ranks are loaded, and leaves none behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.workers.engine.helpers import until
from tests.workers.expert_parallel.conftest import SHAPE
from tests.workers.server.conftest import write_tokenizer
from tests.workers.server.process import WorkerProcess, start_worker

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    vocab = write_tokenizer(tmp_path)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SHAPE, "vocab_size": vocab})).save_pretrained(tmp_path)
    return tmp_path


def answer(worker: WorkerProcess) -> list[int]:
    body = {"prompt": "the cat sat on the mat", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    url = worker.url + "/v1/completions"
    response = httpx.post(url, json={**body, "return_token_ids": True}, timeout=60, trust_env=False)
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["choices"][0]["token_ids"]
    return tokens


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are found in /proc")
def test_a_worker_with_ranks_answers_as_one_without(folder: Path) -> None:
    sizes = {"block_size": 4, "kv_cache_bytes": 4 << 20}
    alone = start_worker(folder, **sizes)
    shared = start_worker(folder, expert_parallel=2, expert_window_steps=4, **sizes)
    ranks: list[int] = []
    try:
        alone.wait_ready()
        shared.wait_ready()
        ranks = children(shared.process.pid)
        assert len(ranks) == 1
        want = answer(alone)
        assert [answer(shared) for _ in range(3)] == [want] * 3
        metrics = shared.metrics()
        assert metrics["omni_expert_imbalance"] >= 2  # two MoE layers, each at least 1
        assert "omni_experts_copied_total" in metrics
        assert "omni_expert_imbalance" not in alone.metrics()
        os.kill(shared.process.pid, signal.SIGTERM)
        assert shared.process.wait(20) == 0
    finally:
        alone.end()
        shared.end()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), "the ranks' end")
