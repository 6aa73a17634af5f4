"""`omni-proxy simulate` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from omni_proxy.cli import main
from omni_proxy.core import CoreSettings
from omni_proxy.scheduler.settings import MECHANISMS, SchedulingSettings
from omni_proxy.sim.ablations import ablations
from omni_proxy.sim.figures import percentile, spread

FAST = ["simulate", "--synthetic", "prefixes,requests=40,prompt=300,prefix=500,output=50", "--preset", "demo"]


@pytest.mark.slow
def test_a_report_as_table_json_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
    assert main([*FAST, "--prefill", "2", "--decode", "1", "--load", "0.5", *files]) == 0
    text = capsys.readouterr().out
    for word in (
        "TTFT",
        "TPOT",
        "E2E",
        "goodput",
        "QPM",
        "cached",
        "prefill_running",
        "prefill-1",
        "40 completed",
        "P busy with",
    ):
        assert word in text
    report = json.loads((tmp_path / "r.json").read_bytes())
    assert report["figures"]["outcomes"] == {"completed": 40}
    assert len(report["latencies"]) == 40
    assert report["settings"]["offered prefill work / capacity"] == "0.500"
    page = (tmp_path / "r.html").read_text()
    main([*FAST, "--prefill", "2", "--decode", "1", "--load", "0.5", "--html", str(tmp_path / "again.html")])
    assert (tmp_path / "again.html").read_text() == page
    assert page.count("<svg") == 1
    assert "http" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    ).replace("https://matplotlib.org", "")
    assert "<script" not in page


def test_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FAST, "--prefill", "2", "--decode", "1", "--compare"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ["omni-proxy", "match-ratio", "token-cost", "least-requests", "round-robin"]
    assert [line.split()[0] for line in lines[1:6]] == names
    off = [line.split("  ")[0] for line in lines[10:]]
    assert lines[9].startswith("omni-proxy")
    assert off[:2] == ["order fcfs", "order shortest-uncached"]
    assert {f"without {name}" for name in MECHANISMS} < set(off)
    assert off[-1] == "prefixes not followed"


def test_what_is_switched_on_is_switched_off_in_turn() -> None:
    usual = {name for name, _ in ablations(CoreSettings())}
    chosen = SchedulingSettings(order="fcfs", elastic_roles=True, tpot_limit_s=0.1)
    found = dict(ablations(CoreSettings(scheduling=chosen)))
    assert set(found) - usual == {"no sides", "no TPOT limit"}
    assert usual - set(found) == {"order fcfs"}
    assert found["no sides"].scheduling.elastic_roles is False
    assert found["no sides"].scheduling.tpot_limit_s == 0.1


def test_workers_of_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "omni.yaml"
    config.write_text(
        "workers:\n"
        "  - {name: p0, url: 'http://a:1', role: prefill}\n"
        "  - {name: d0, url: 'http://b:1', role: decode, max_seqs: 2}\n"
        "  - {name: d1, url: 'http://c:1', role: decode, down: true}\n"
    )
    assert main([*FAST, "--config", str(config)]) == 0
    text = capsys.readouterr().out
    assert "1D + 1P" in text or "1P + 1D" in text


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ([], "give either --trace or --synthetic"),
        (["--trace", "x.jsonl", "--synthetic", "poisson"], "give either --trace or --synthetic"),
        (["--synthetic", "poisson"], "at least one prefill and one decode worker"),
        (["--synthetic", "poisson", "--prefill", "2"], "at least one prefill and one decode worker"),
        (["--synthetic", "poisson", "--prefill", "-1"], "must be a whole number from 0, got '-1'"),
        (["--synthetic", "poisson", "--mixed", "1", "--slow", "x=2"], "no worker 'x'; known are mixed-0"),
        (["--synthetic", "poisson", "--mixed", "1", "--slow", "2"], "must be NAME=X, got '2'"),
        (["--synthetic", "poisson", "--mixed", "1", "--record", "/absent/x"], "/absent/x: No such file"),
        (["--synthetic", "poisson", "--mixed", "1", "--preset", "x"], "no preset 'x'"),
        (["--synthetic", "poisson", "--mixed", "1", "--slo", "ttft=x"], "ttft: must be a number of seconds, got 'x'"),
        (["--synthetic", "poisson", "--mixed", "1", "--slo", "itl=1"], "no limit 'itl'"),
        (["--synthetic", "poisson", "--mixed", "1", "--slo", "ttft=-1"], "--slo: Expected"),
        (["--synthetic", "poisson", "--mixed", "1", "--load", "0"], "must be a number above 0, got '0'"),
        (["--synthetic", "poisson", "--mixed", "1", "--engine", "absent.yaml"], "absent.yaml: No such file"),
        (["--synthetic", "poisson", "--mixed", "1", "--json", "/absent/x"], "/absent/x: No such file"),
    ],
)
def test_faults_are_one_line(arguments: list[str], fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["simulate", *arguments])
    except SystemExit as exc:
        code = int(exc.code or 0)
    shown = capsys.readouterr()
    assert code == 2
    assert fault in shown.err
    assert len(shown.err.splitlines()) == 1


def test_a_slow_worker_gets_the_same_work_and_takes_longer(capsys: pytest.CaptureFixture[str]) -> None:
    means = []
    for slow in ([], ["--slow", "mixed-0=5"]):
        assert main([*FAST, "--mixed", "1", *slow]) == 0
        lines = capsys.readouterr().out.splitlines()
        means.append(next(line.split()[1:3] for line in lines if line.startswith("TPOT")))
    assert means[0] != means[1]


def test_a_simulated_run_can_be_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = str(tmp_path / "log")
    assert main([*FAST, "--prefill", "2", "--decode", "1", "--record", log]) == 0
    assert main(["replay", log]) == 0
    assert "Equal: " in capsys.readouterr().out


def test_an_engine_file_with_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = tmp_path / "e.yaml"
    engine.write_text("step_s: -1\n")
    assert main([*FAST, "--mixed", "1", "--engine", str(engine)]) == 2
    assert "e.yaml: " in capsys.readouterr().err


def test_percentiles_are_values_of_the_run() -> None:
    assert [percentile([1.0, 2.0, 3.0, 4.0], share) for share in (0.25, 0.5, 0.75, 0.9, 1.0)] == [1, 2, 3, 4, 4]
    found = spread([3.0, 1.0, 2.0])
    assert found is not None
    assert (found.mean, found.p50, found.max, found.count) == (2.0, 2.0, 3.0, 3)
    assert spread([]) is None


@pytest.mark.slow
def test_a_reader_that_has_seen_enough() -> None:
    command = [sys.executable, "-m", "omni_proxy", *FAST, "--mixed", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert said == ""
    assert process.returncode == 141
