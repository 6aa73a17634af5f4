"""What the launcher's workers are started with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from omni_proxy import up
from omni_proxy.cli import main
from omni_proxy.workers.engine import worker
from omni_proxy.workers.engine.worker_options import WorkerOptions


def options_of(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> WorkerOptions:
    """What `omni-proxy worker` makes of them."""
    taken: list[WorkerOptions] = []

    def take(options: WorkerOptions) -> int:
        taken.append(options)
        return 0

    monkeypatch.setattr(worker, "run_worker", take)
    assert main(arguments) == 0
    return taken[0]


def launched(monkeypatch: pytest.MonkeyPatch, **fields: object) -> list[WorkerOptions]:
    said = up.UpOptions(Path("model"), "name", 2, 1, "127.0.0.1", 8000, None, **fields)  # type: ignore[arg-type]
    return [options_of(plan.arguments, monkeypatch) for plan in up._Up(said)._plans()]


def test_each_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several share the cores."""
    workers = launched(monkeypatch)
    assert [(one.role, one.threads) for one in workers] == [("prefill", 1), ("prefill", 1), ("decode", 1)]
    monkeypatch.setattr(worker, "_end_on_signals", lambda code: None)
    monkeypatch.setattr("omni_proxy.workers.engine.worker.prometheus_client.disable_created_metrics", lambda: None)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "7")
    worker._prepare_process(workers[0])
    assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == os.environ["OPENBLAS_NUM_THREADS"] == "1"


def test_types_and_drafts_are_those_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = launched(monkeypatch)[0]
    assert (plain.dtype, plain.quantization, plain.speculation) == ("float32", None, "ngram")
    for one in launched(monkeypatch, dtype="bfloat16", quantization="w8a8", speculation="off"):
        assert (one.dtype, one.quantization, one.speculation) == ("bfloat16", "w8a8", "off")
