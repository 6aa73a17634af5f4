"""The scheduler's benchmark runs, small."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scheduler.compare import compare, scheduler
from benchmarks.scheduler.floor import floor_ttfts
from benchmarks.scheduler.mechanisms import CASES
from benchmarks.scheduler.passes import at_once_us, pass_ms
from omni_proxy.scheduler.settings import MECHANISMS
from omni_proxy.sim.cluster import make_cluster
from omni_proxy.sim.presets import preset
from omni_proxy.sim.synthetic import parse_synthetic
from omni_proxy.sim.world import World


@pytest.mark.slow
def test_a_comparison_has_a_row_for_each(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [f'{{"timestamp":{n * 100},"input_length":700,"output_length":5,"hash_ids":[1,{n + 9}]}}' for n in range(20)]
    trace.write_text("\n".join(rows))
    lines: list[str] = []
    compare(trace, 0.9, "cold", None, True, lines.append)
    named = [line.split("  ")[0] for line in lines[2:6]]
    assert named == ["match-ratio", "least-requests", "token-cost", "omni-proxy"]
    assert any(line.startswith("prefixes not followed") for line in lines)
    assert lines[-1].startswith("nobody waits")


@pytest.mark.parametrize("kind", ["prefixes,rate=20", "poisson,rate=5,prompt=8000", "fanout,rate=10"])
def test_no_request_beats_the_floor_and_one_that_is_alone_meets_it(kind: str) -> None:
    workload, model = parse_synthetic(f"{kind},requests=120", 3), preset("h200-deepseek-r1")
    run = World(workload, make_cluster(2, 2, 0, model), scheduler({})).run()
    floors = list(floor_ttfts(workload, model))
    over = []
    for record in run.records:
        assert record.first_token_at is not None
        over.append(record.first_token_at - record.arrived_at - floors[int(record.rid[1:])])
    assert min(over) >= -1e-9
    assert min(over) < 0.02, "what moving KV takes is not in the floor"


def test_every_mechanism_has_a_workload_that_shows_what_it_gains() -> None:
    shown = {name for case in CASES for name in case.off.get("without", frozenset())}  # type: ignore[attr-defined]
    assert shown == set(MECHANISMS)


@pytest.mark.slow
def test_planning_is_measured() -> None:
    middle, worst = pass_ms(2, 2, 20, "weighted")
    assert 0 < middle <= worst
    assert at_once_us(2, 2, rounds=3) > 0
