"""The world around the live core: every request ends once, times add up, the same seed gives the same run."""

from __future__ import annotations

import msgspec
import pytest

from omni_proxy.core import Core, CoreSettings
from omni_proxy.messages import Mode, Outcome, Stage
from omni_proxy.sim.baselines import BASELINES, RouterWorker, router
from omni_proxy.sim.cluster import make_cluster
from omni_proxy.sim.run import Delays
from omni_proxy.sim.synthetic import parse_synthetic
from omni_proxy.sim.workload import SimRequest, Workload
from omni_proxy.sim.world import World
from tests.sim.helpers import BLOCK, SMALL, requests, simulate


def test_one_request_takes_the_time_of_its_parts() -> None:
    run = simulate(requests((0.0, 100, 3)))
    (record,) = run.records
    delays = Delays()
    prefill = 2 * 0.01 + 0.1
    transfer = 100 * 1000 / 1e6 + 0.001
    first_pass = 0.01 + 0.01 + 0.001 + 100e-6
    expected = (
        delays.tokenize_s + 100 * delays.tokenize_token_s + 4 * delays.network_s + prefill + transfer + first_pass
    )
    assert record.first_token_at == pytest.approx(expected)
    assert record.mode is Mode.SEQUENTIAL
    assert record.completion_tokens == 3
    assert [stage for stage, _, _ in record.marks] == list(Stage)


@pytest.mark.parametrize("mode", list(Mode))
def test_every_mode_answers_everything(mode: Mode) -> None:
    workload = parse_synthetic("prefixes,requests=60,rate=4,prompt=100,prefix=128,output=20", 3)
    settings = CoreSettings(schedule_mode=mode, prefix_aware=True)
    workers = make_cluster(2, 2, 0, SMALL)
    world = World(workload, workers, lambda index: Core(settings))
    run = world.run()
    assert [r.outcome for r in run.records] == [Outcome.COMPLETED] * 60
    assert {r.mode for r in run.records} == {mode}
    assert all(e.cache.used_tokens == 0 for e in run.engines)


def test_parallel_mode_saves_a_round_trip_to_the_gateway() -> None:
    first = {}
    for mode in (Mode.SEQUENTIAL, Mode.PARALLEL):
        (record,) = simulate(requests((0.0, 100, 3)), schedule_mode=mode).records
        assert record.first_token_at is not None
        first[mode] = record.first_token_at
    assert first[Mode.SEQUENTIAL] - first[Mode.PARALLEL] == pytest.approx(2 * Delays().network_s)


def test_the_same_seed_gives_the_same_run() -> None:
    runs = [simulate(parse_synthetic("turns,requests=80,prompt=60,output=30,prefix=64", 5), 2, 2) for _ in range(2)]
    assert msgspec.json.encode(runs[0].records) == msgspec.json.encode(runs[1].records)
    assert runs[0].samples == runs[1].samples


def test_a_turn_waits_for_the_end_of_the_turn_before() -> None:
    turns = (SimRequest(0.0, 50, 5), SimRequest(2.0, 80, 5, after=0))
    run = simulate(Workload("turns", BLOCK, turns))
    first, second = run.records
    assert first.ended_at is not None
    assert second.arrived_at == pytest.approx(first.ended_at + 2.0)


def test_what_can_never_fit_fails_and_the_rest_goes_on() -> None:
    run = simulate(requests((0.0, 1000, 100), (0.0, 20, 2)))
    assert {r.rid: r.outcome for r in run.records} == {
        "r0000000": Outcome.FAILED,
        "r0000001": Outcome.COMPLETED,
    }


def test_transfers_share_a_link() -> None:
    """Two decode workers pull from one prefill worker: the second waits for the first."""
    run = simulate(requests((0.0, 480, 2), (0.0, 480, 2)), prefill=1, decode=2)
    first, second = sorted(r.first_token_at or 0.0 for r in run.records)
    assert second - first > 0.4


def test_requests_that_wait_too_long_time_out() -> None:
    workload = requests(*[(0.0, 900, 2)] * 8)
    run = simulate(workload, queue_timeout_s=1.5)
    outcomes = {r.outcome for r in run.records}
    assert outcomes == {Outcome.COMPLETED, Outcome.TIMED_OUT}
    assert len(run.records) == 8


@pytest.mark.parametrize("name", list(BASELINES))
def test_routers_answer_everything(name: str) -> None:
    workload = parse_synthetic("prefixes,requests=60,rate=4,prompt=100,prefix=128,output=20", 3)
    run = World(workload, make_cluster(3, 2, 0, SMALL), router(name)).run()
    assert [r.outcome for r in run.records] == [Outcome.COMPLETED] * 60
    if name == "match-ratio":
        spread = World(workload, make_cluster(3, 2, 0, SMALL), router("round-robin")).run()
        assert sum(r.cached_tokens or 0 for r in run.records) > sum(r.cached_tokens or 0 for r in spread.records)


def test_token_cost_counts_what_is_left_to_compute() -> None:
    workers = [RouterWorker("a", 0, requests=1, tokens=500), RouterWorker("b", 1, requests=3, tokens=300)]
    assert BASELINES["token-cost"](workers, 1000, {}).name == "b"
    assert BASELINES["token-cost"](workers, 1000, {"a": 256}).name == "a"
