"""The scheduler's benchmark runs, small."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scheduler.compare import compare, scheduler
from benchmarks.scheduler.floor import floor_ttfts
from benchmarks.scheduler.mechanisms import CASES
from benchmarks.scheduler.passes import at_once_us, pass_ms
from benchmarks.scheduler.slices import compare_slices, parts_of, slices_of
from omni_proxy.scheduler.settings import MECHANISMS
from omni_proxy.sim.cluster import make_cluster
from omni_proxy.sim.presets import preset
from omni_proxy.sim.synthetic import parse_synthetic
from omni_proxy.sim.world import World


def _trace(folder: Path) -> Path:
    trace = folder / "t.jsonl"
    rows = [f'{{"timestamp":{n * 100},"input_length":700,"output_length":5,"hash_ids":[1,{n + 9}]}}' for n in range(20)]
    trace.write_text("\n".join(rows))
    return trace


@pytest.mark.slow
def test_a_comparison_has_a_row_for_each(tmp_path: Path) -> None:
    trace = _trace(tmp_path)
    lines: list[str] = []
    compare(trace, 0.9, "cold", None, True, lines.append)
    named = [line.split("  ")[0] for line in lines[2:6]]
    assert named == ["match-ratio", "least-requests", "token-cost", "omni-proxy"]
    assert any(line.startswith("prefixes not followed") for line in lines)
    assert lines[-1].startswith("nobody waits")


@pytest.mark.slow
def test_slices_are_compared_with_the_router_by_token_cost(tmp_path: Path) -> None:
    lines: list[str] = []
    compare_slices(_trace(tmp_path), 8, 0.9, "cold", False, lines.append)
    assert lines[0].endswith("2 slices of 8 requests")
    assert [line.split()[0] for line in lines[2:]] == [
        "match-ratio",
        "least-requests",
        "token-cost",
        "omni-proxy",
        "nobody",
    ]
    assert ["±" in line for line in lines[2:]] == [False, False, False, True, False]


def test_a_slice_begins_at_zero_and_the_parts_of_ttft_are_all_of_it(tmp_path: Path) -> None:
    first, second = slices_of(_trace(tmp_path), 9)
    assert [part.requests[0].arrival_s for part in (first, second)] == [0.0, 0.0]
    assert [len(part.requests) for part in (first, second)] == [9, 9]
    workers = make_cluster(1, 1, 0, preset("h200-deepseek-r1"))
    records = World(second, workers, scheduler({})).run().records
    parts = parts_of(records, second, workers)
    ttfts = [record.first_token_at - record.arrived_at for record in records if record.first_token_at is not None]
    assert parts.waiting + parts.missed + parts.computing + parts.around == pytest.approx(sum(ttfts) / 9)
    assert min(parts.waiting, parts.missed, parts.computing, parts.around) >= 0.0


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
