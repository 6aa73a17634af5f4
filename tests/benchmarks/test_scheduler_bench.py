"""The scheduler's benchmark runs, small."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scheduler.compare import compare
from benchmarks.scheduler.passes import at_once_us, pass_ms


@pytest.mark.slow
def test_a_comparison_has_a_row_for_each(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [f'{{"timestamp":{n * 100},"input_length":700,"output_length":5,"hash_ids":[1,{n + 9}]}}' for n in range(20)]
    trace.write_text("\n".join(rows))
    lines: list[str] = []
    compare(trace, 0.9, "cold", None, True, lines.append)
    assert [line.split("  ")[0] for line in lines[2:5]] == ["match-ratio", "least-requests", "omni-proxy"]
    assert any(line.startswith("prefixes not followed") for line in lines)


@pytest.mark.slow
def test_planning_is_measured() -> None:
    middle, worst = pass_ms(2, 2, 20, "weighted")
    assert 0 < middle <= worst
    assert at_once_us(2, 2, rounds=3) > 0
