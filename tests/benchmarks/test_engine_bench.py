"""The engine's benchmark: its table says what was reached, and a faulty option is one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.engine.report import Line, report

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.engine", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("line", "reached"),
    [
        (Line("a", "tok/s", 90, 10, 9.0, 8.0), True),
        (Line("a", "tok/s", 70, 10, 7.0, 8.0), False),
        (Line("a", "s", 3.9, want=4.0), True),
        (Line("a", "s", 4.1, want=4.0), False),
        (Line("a", "share", 0.69, want=0.7), False),
        (Line("a", "ms", 5.0), None),
    ],
)
def test_a_line_knows_whether_it_was_reached(line: Line, reached: bool | None) -> None:
    assert line.reached is reached
    assert ("missed" in report([line])) is (reached is False)


@pytest.mark.slow
def test_the_smallest_part_runs(tmp_path: Path) -> None:
    done = run("--only", "drafts", "--turns", "1", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    lines = json.loads((tmp_path / "out.json").read_text())
    assert [line["want"] for line in lines] == [1.3, 0.95, 0.95]
    assert all(line["ours"] > 0 and line["ratio"] > 0 for line in lines)


def test_no_turns_are_refused() -> None:
    done = run("--turns", "0")
    assert done.returncode == 2
    assert "--turns must be at least 1, got 0" in done.stderr
