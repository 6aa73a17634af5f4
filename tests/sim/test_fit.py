"""Fitting an engine model: the costs behind simulated runs are found again, also among outliers."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from omni_proxy.cli import main
from omni_proxy.config import ConfigError
from omni_proxy.core import Core, CoreSettings
from omni_proxy.messages import RequestRecord
from omni_proxy.sim.bench.measure import BenchResult, Seen, bench_figures
from omni_proxy.sim.cluster import make_cluster
from omni_proxy.sim.engine_model import pairs
from omni_proxy.sim.figures import Slo
from omni_proxy.sim.fit import fit_model, least_squares
from omni_proxy.sim.presets import preset
from omni_proxy.sim.workload import SimRequest, Workload
from omni_proxy.sim.world import World

TRUE = msgspec.structs.replace(preset("demo"), request_s=0.0, first_token_s=0.0)


def seen_of(records: list[RequestRecord]) -> list[Seen]:
    """A simulated run as a load client would have seen it."""
    seen = []
    for number, record in enumerate(records):
        assert record.ended_at is not None
        seen.append(
            Seen(
                number,
                record.arrived_at,
                record.arrived_at,
                record.ended_at,
                200,
                "completed",
                prompt_tokens=record.prompt_tokens,
                first=record.first_token_at,
                last=record.ended_at,
                completion_tokens=record.completion_tokens,
                cached_tokens=record.cached_tokens,
            )
        )
    return seen


def run_of(requests: list[SimRequest]) -> list[Seen]:
    settings = CoreSettings(queue_timeout_s=1e6)
    world = World(Workload("w", 64, tuple(requests)), make_cluster(0, 0, 1, TRUE), lambda index: Core(settings))
    return seen_of(world.run().records)


def runs() -> list[list[Seen]]:
    alone = [SimRequest(20.0 * n, 100 * (n % 20) + 60, 20) for n in range(40)]
    together = [SimRequest(0.0, 60 + 40 * (n % 5), 200) for n in range(16)]
    few = [SimRequest(0.0, 60 + 400 * (n % 3), 200) for n in range(4)]
    return [run_of(alone), run_of(together), run_of(few)]


def test_the_costs_behind_a_run_are_found_again() -> None:
    found = fit_model(runs(), preset("demo"))
    assert found.prefill_error < 0.05
    assert found.decode_error < 0.1
    for tokens in (100, 1000, 1900):
        assert found.model.alone_s(tokens) + found.model.request_s == pytest.approx(TRUE.alone_s(tokens), rel=0.2)
    for seqs, kv in ((1, 300), (4, 2000), (16, 4000)):
        expected = TRUE.step_s + TRUE.decode_step_s(seqs, kv)
        assert found.model.step_s + found.model.decode_step_s(seqs, kv) == pytest.approx(expected, rel=0.2)


def test_stalls_do_not_make_the_model() -> None:
    clean = fit_model(runs(), preset("demo")).model
    alone, *others = runs()
    stalled = [
        msgspec.structs.replace(s, first=(s.first or 0.0) + 5.0, last=(s.last or 0.0) + 5.0) if n in (3, 11) else s
        for n, s in enumerate(alone)
    ]
    found = fit_model([stalled, *others], preset("demo")).model
    assert found.token_s == pytest.approx(clean.token_s, rel=0.3)


def test_no_cost_is_negative() -> None:
    chance = random.Random(1)
    samples = [((1.0, n, pairs(n, 0)), 0.01 + 1e-4 * n + chance.gauss(0, 0.003)) for n in range(50, 2000, 50)]
    assert all(value >= 0 for value in least_squares(samples))
    assert least_squares([((1.0, 2.0), 3.0)] * 10)[1] >= 0


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="a fit needs 8"):
        fit_model([], preset("demo"))


def test_the_command_reads_recorded_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for number, run in enumerate(runs()):
        result = BenchResult("u", "w", {}, 1.0, bench_figures(run, Slo()), None, 0.0, tuple(run))
        path = tmp_path / f"{number}.json"
        path.write_bytes(msgspec.json.encode(result))
        files.append(str(path))
    out = tmp_path / "engine.yaml"
    assert main(["fit", "--runs", *files, "--out", str(out)]) == 0
    assert "us a token" in capsys.readouterr().out
    load = ["--synthetic", "poisson,requests=20,prompt=200", "--mixed", "1"]
    assert main(["simulate", *load, "--engine", str(out)]) == 0


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["fit"], "give either --url or --runs"),
        (["fit", "--runs", "absent.json"], "absent.json: No such file"),
        (["fit", "--url", "nothing"], "must be http://HOST:PORT"),
        (["fit", "--url", "http://127.0.0.1:1"], "cannot connect"),
        (["fidelity"], "give either --trace or --synthetic"),
        (["fidelity", "--synthetic", "poisson", "--simulate", "x"], "no preset 'x'"),
    ],
)
def test_faults_are_one_line(arguments: list[str], fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert fault in shown
    assert len(shown.splitlines()) == 1


def test_another_file_is_no_result_of_bench(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    assert main(["fit", "--runs", str(tmp_path / "x.json")]) == 2
