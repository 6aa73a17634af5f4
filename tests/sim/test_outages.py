"""Workers that die and come back: what the live core makes of it, and what the report says."""

from __future__ import annotations

import random
from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.cli import main
from omni_proxy.config import Config, ConfigError
from omni_proxy.core import Core, CoreSettings
from omni_proxy.messages import Event, Mode, Outcome, WorkerDown, WorkerUp
from omni_proxy.sim.cluster import make_cluster
from omni_proxy.sim.notices import Notice
from omni_proxy.sim.outages import Outage, OutagePlan, checked, outage_figures, parse_outage, random_outages
from omni_proxy.sim.run import Run
from omni_proxy.sim.setup import plan_for
from omni_proxy.sim.synthetic import parse_synthetic
from omni_proxy.sim.workload import Workload
from omni_proxy.sim.world import World
from tests.sim.helpers import SMALL, Checked, engine, job, requests


def run_with(
    workload: Workload, *outages: Outage, prefill: int = 1, decode: int = 1, resume: bool = False, **chosen: object
) -> tuple[Run, list[tuple[float, Event]]]:
    told: list[tuple[float, Event]] = []
    settings = CoreSettings(**{"prefix_aware": True, **chosen})  # type: ignore[arg-type]

    def observe(now: float, event: Event, effects: object) -> None:
        if isinstance(event, WorkerDown | WorkerUp):
            told.append((now, event))

    workers = make_cluster(prefill, decode, 0, SMALL)
    plan = OutagePlan(outages, resume=resume)
    run = World(workload, workers, lambda index: Core(settings), observers=[observe], outages=plan).run()
    return run, told


def outcomes(run: Run) -> list[Outcome | None]:
    return [record.outcome for record in sorted(run.records, key=lambda record: record.rid)]


def test_what_runs_on_a_worker_that_dies_fails_and_what_comes_later_is_served() -> None:
    run, told = run_with(requests((0.0, 100, 50), (9.0, 100, 3)), Outage("decode-0", 0.6, 5.0))
    assert outcomes(run) == [Outcome.FAILED, Outcome.COMPLETED]
    assert [(round(at, 3), type(event)) for at, event in told[2:]] == [(2.1, WorkerDown), (5.1, WorkerUp)]


def test_another_worker_takes_what_comes_while_one_is_dead() -> None:
    rows = [(0.5 * n, 50, 4) for n in range(20)]
    run, _ = run_with(requests(*rows), Outage("prefill-0", 2.0, None), prefill=2, decode=1)
    assert outcomes(run).count(Outcome.COMPLETED) >= 19
    late = [record for record in run.records if record.arrived_at > 4.0]
    assert {record.placements[0].worker for record in late} == {"prefill-1"}


def test_a_decode_worker_that_died_before_its_first_token_is_replaced() -> None:
    """D is dead when the leg comes: connection refused, and the other D takes the same KV."""
    run, _ = run_with(requests((0.0, 100, 5)), Outage("decode-0", 0.0, None), prefill=1, decode=2)
    (record,) = run.records
    assert record.outcome is Outcome.COMPLETED
    assert record.placements[-1].worker == "decode-1"
    found = outage_figures((Outage("decode-0", 0.0, None),), run.records)
    assert (found.touched, found.failed) == (1, 0)
    assert found.retried == (len(record.placements) > 2)


def test_an_answer_that_broke_goes_on_elsewhere_with_resume() -> None:
    load = requests((0.0, 100, 100))
    outage = Outage("decode-0", 1.0, None)
    alone, _ = run_with(load, prefill=1, decode=1)
    broken, _ = run_with(load, outage, prefill=1, decode=2)
    resumed, _ = run_with(load, outage, prefill=1, decode=2, resume=True)
    assert outcomes(broken) == [Outcome.FAILED]
    (record,) = resumed.records
    assert (record.outcome, record.completion_tokens, record.prompt_tokens) == (Outcome.COMPLETED, 100, 100)
    (resume,) = record.resumes
    assert 0 < resume.tokens < 100
    assert (record.ended_at or 0) > (alone.records[0].ended_at or inf)
    assert outage_figures((outage,), resumed.records).resumed == 1


def test_kv_that_died_with_its_worker_is_not_pulled() -> None:
    """P dies after its answer, while D waits for a link that another transfer holds."""
    run, _ = run_with(requests((0.0, 900, 2), (0.0, 60, 2)), Outage("prefill-0", 1.2, 1.3), prefill=1, decode=1)
    assert len(run.records) == 2
    assert all(e.cache.used_tokens == 0 and e.running == 0 for e in run.engines)


def test_a_cache_does_not_survive_its_worker() -> None:
    load = parse_synthetic("prefixes,requests=30,rate=2,prompt=20,prefix=128,output=2,prefixes=1,spread=0", 1)
    whole, _ = run_with(load)
    broken, _ = run_with(load, Outage("prefill-0", 6.05, 6.06))
    cached = [sum(record.cached_tokens or 0 for record in run.records) for run in (whole, broken)]
    assert cached[1] <= cached[0] - 128


def test_an_engine_that_dies_keeps_what_it_counted() -> None:
    one = engine()
    first, second = job(1, 40, 50), job(2, 40, 50, first_key=100)
    one.submit(first, 0.0)
    one.submit(second, 0.0)
    now = 0.0
    while second.joined_serial == 0:
        assert one.wake_at is not None
        now = one.wake_at
        one.advance(now)
    one.die(now + 0.1)  # passes of both take 22 ms: four more are whole
    assert (one.running, one.waiting, one.cache.used_tokens, one.wake_at) == (0, 0, 0, None)
    assert (first.generated, second.generated) == (6, 5)
    assert one.counters.prefill_tokens == 80
    third = job(3, 40, 2)
    one.submit(third, 10.0)
    told = [(notice, found) for _ in range(4) if one.wake_at is not None for notice, found in one.advance(one.wake_at)]
    assert (Notice.FINISHED, third) in told


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32), mode=st.sampled_from(list(Mode)), resume=st.booleans())
def test_every_request_ends_once_whatever_dies(seed: int, mode: Mode, resume: bool) -> None:
    workload = parse_synthetic("prefixes,requests=40,rate=8,prompt=100,prefix=128,output=20", seed)
    workers = make_cluster(2, 2, 0, SMALL)
    names = [worker.spec.name for worker in workers]
    plan = OutagePlan(checked(random_outages("every=2,down=1", names, 5.0, seed), names), resume=resume)
    chosen = CoreSettings(
        schedule_mode=mode, prefix_aware=True, queue_timeout_s=random.Random(seed).choice([3.0, 60.0])
    )
    run = World(workload, workers, lambda index: Checked(Core(chosen)), outages=plan).run()
    assert sorted(record.rid for record in run.records) == [f"r{number:07d}" for number in range(40)]
    for one in run.engines:
        while one.wake_at is not None:
            one.advance(one.wake_at)
        assert (one.running, one.waiting, one.cache.used_tokens) == (0, 0, 0)


def test_the_same_seed_has_the_same_outages() -> None:
    first, second, other = (random_outages("every=10,down=5", ["a", "b"], 100.0, seed) for seed in (1, 1, 2))
    assert first == second != other
    assert {outage.worker for outage in first} == {"a", "b"}
    assert checked(first, ["a", "b"])[0].begin == min(outage.begin for outage in first)


def test_probes_as_the_config_has_them() -> None:
    config = Config.model_validate({"health": {"interval_s": 4.0, "failures_down": 3}, "resume": True})
    plan = plan_for((), config)
    assert (plan.down_after_s, plan.up_after_s, plan.resume) == (10.0, 0.1, True)


@pytest.mark.parametrize("text", ["p0", "@1-2", "p0@2-1", "p0@x", "p0@1-", "p0@-1-2", "p0@1-nan", "p0@inf"])
def test_an_outage_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="must be NAME@FROM-TO"):
        parse_outage(text)


def test_outages_by_name() -> None:
    assert parse_outage("a@b-1@3-4.5") == Outage("a@b-1", 3.0, 4.5)
    assert parse_outage("p0@3") == Outage("p0", 3.0, None)
    with pytest.raises(ConfigError, match="no worker 'x'; known are a, b"):
        checked([Outage("x", 1.0, 2.0)], ["a", "b"])
    with pytest.raises(ConfigError, match="a is down already at"):
        checked([Outage("a", 1.0, 2.0), Outage("a", 1.5, 3.0)], ["a"])


FAST = ["simulate", "--synthetic", "prefixes,requests=40,prompt=300,prefix=500,output=50", "--preset", "demo"]


def test_the_report_tells_of_outages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "r.html"
    asked = ["--prefill", "2", "--decode", "1", "--outage", "prefill-0@1-3", "--html", str(page)]
    assert main([*FAST, *asked]) == 0
    text = capsys.readouterr().out
    assert "prefill-0 from 1 s to 3 s" in text
    assert "prefill-0 from 1 s to 3 s" in page.read_text()
    assert "while a worker was down" in text
    assert main([*FAST, "--mixed", "1"]) == 0
    assert "outages" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--outage", "mixed-0"], "--outage: must be NAME@FROM-TO"),
        (["--outage", "prefill-0@1-2"], "no worker 'prefill-0'; known are mixed-0"),
        (["--outages", "often"], "--outages: there is no setting 'often'; known are every, down"),
        (["--outages", "every=0"], "--outages: every: must be a number of seconds above 0, got '0'"),
        (["--outage", "mixed-0@1-2", "--compare"], "--compare: the other routers do not find out"),
    ],
)
def test_faults_are_one_line(arguments: list[str], fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FAST, "--mixed", "1", *arguments]) == 2
    shown = capsys.readouterr().err
    assert fault in shown
    assert len(shown.splitlines()) == 1
