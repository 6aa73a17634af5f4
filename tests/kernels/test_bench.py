"""The benchmark's command: what it prints and writes, on one small case; times themselves are not judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from omni_kernels import bench
from omni_kernels.bench import timing
from omni_kernels.bench.__main__ import main
from omni_kernels.bench.cases import DEMO
from omni_kernels.bench.peers import vllm_times


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "READ_BYTES", 1 << 20)


@pytest.mark.slow
def test_a_table_and_its_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    assert main(["--ops", "moe", "--shapes", "demo", "--rows", "1", "--turns", "1", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    report = json.loads(out.read_text())
    names = [row["backend"] for row in report["rows"]]
    assert "torch bf16" in names
    assert all(name in printed for name in names)
    assert all(row["ms"] > 0 and row["of bound"] > 0 for row in report["rows"])
    assert "vLLM: no venv given (--vllm-venv)" in report["left_out"]
    assert f"left out: {report['left_out'][-1]}" in printed


@pytest.mark.slow
def test_a_step_of_a_decoder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ops", "decoder", "--turns", "1"]) == 0
    assert capsys.readouterr().out.count("torch op by op") == 4


def test_a_peer_that_is_not_there_is_a_reason(tmp_path: Path) -> None:
    times, reason = vllm_times(tmp_path, DEMO, [1], 1)
    assert times == {}
    assert reason == f"vLLM: {tmp_path / 'bin' / 'python'} is missing"


def test_a_peer_that_fails_is_quoted(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 'first' >&2\necho 'no such kernel' >&2\nexit 1\n")
    python.chmod(0o700)
    assert vllm_times(tmp_path, DEMO, [1], 1) == ({}, "vLLM: no such kernel")


@pytest.mark.slow
def test_the_run_for_a_gpu_goes_through_without_one(tmp_path: Path) -> None:
    script = Path(bench.__file__).parents[2] / "bench" / "h200.py"
    out = tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, str(script), "--dry-run", "--json", str(out)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(out.read_text())
    assert [row["rows"] for row in rows] == [1, 8, 64]
    assert all(row["triton"] > 0 and row["grouped_mm"] > 0 and row["triton fp8"] > 0 for row in rows)


def test_the_least_of_the_turns_counts() -> None:
    order: list[str] = []
    times = timing.least({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    assert order == ["a", "b"] * 3
    assert set(times) == {"a", "b"}
    assert all(value >= 0 for value in times.values())
    timing.least({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 1, {"b"})
    assert order[6:] == ["a", "b", "a", "b", "b"]
