"""`omni-proxy plan`: the curve, the fewest workers, what breaks, and limits that cannot be met."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from omni_proxy.cli import main
from omni_proxy.messages import Role
from omni_proxy.sim.figures import Figures, Latency, Slo, Totals, summarise
from omni_proxy.sim.plan import Planner, Target, plan_text
from omni_proxy.sim.synthetic import parse_synthetic
from omni_proxy.sim.workload import Workload

SLO = Slo(ttft=1.0, tpot=0.1)


def model_of(needed_prefill: float, needed_decode: float) -> Planner:
    """A planner over a world in which limits are met from so many workers on, in proportion to the rate."""
    workload = parse_synthetic("poisson,requests=50", 1)

    def simulate(loaded: Workload, prefill: int, decode: int, lost: Role | None) -> Figures:
        prefill, decode = prefill - (lost is Role.PREFILL), decode - (lost is Role.DECODE)
        denser = workload.span_s / loaded.span_s
        ttft = 0.5 if prefill >= needed_prefill * denser else 2.0
        tpot = 0.05 if decode >= needed_decode * denser else 0.2
        answered = [Latency(float(n), ttft, tpot, ttft + 10 * tpot) for n in range(50)]
        return summarise(answered, Totals({"completed": 50}, 50.0, 1, 1, 0), SLO, {})

    return Planner(workload, Target(SLO, 0.9), simulate)


def test_the_fewest_workers_are_found() -> None:
    found = model_of(4, 2).plan(12)
    assert len(found.curve) == 11
    assert found.fewest is not None
    assert (found.fewest.prefill, found.fewest.decode) == (4, 2)
    assert "Fewest workers: 6, as 4P + 2D." in plan_text(found)


def test_what_breaks_first_is_said() -> None:
    found = model_of(3.5, 1.0).plan(8)
    assert found.fewest is not None
    assert (found.fewest.prefill, found.fewest.decode) == (4, 1)
    assert found.breaking is not None
    assert found.breaking.factor == 1.1
    assert found.breaking.limit == "tpot"
    assert "TPOT breaks first, at 1.1 times the rate" in plan_text(found)


def test_what_one_lost_worker_does_is_said() -> None:
    found = model_of(3.5, 0.5).plan(8)
    assert found.fewest is not None
    assert (found.fewest.prefill, found.fewest.decode) == (4, 1)
    assert [(loss.role, loss.point.figures.attained) for loss in found.losses] == [
        (Role.PREFILL, 0.0),
        (Role.DECODE, 0.0),
    ]
    text = plan_text(found)
    assert "When one prefill worker dies in the middle and stays away, 0.0% of requests meet the limits" in text
    assert "less than the 90% that are asked for" in text
    assert "the limits are still met" in plan_text(model_of(0.5, 0.0).plan(2))


def test_too_few_workers_say_what_is_missing() -> None:
    found = model_of(9, 2).plan(6)
    assert found.fewest is None
    assert "No split of 6 workers meets the limits" in plan_text(found)
    assert "TTFT 0.0%, TPOT 100.0%" in plan_text(found)


COMMAND = [
    "plan",
    "--synthetic",
    "poisson,requests=60,rate=6,prompt=400,output=40",
    "--preset",
    "demo",
    "--workers",
    "4",
]


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--slo", "ttft=2,tpot=0.1", "--json", str(tmp_path / "p.json")]) == 0
    text = capsys.readouterr().out
    assert "Splits of 4 workers" in text
    assert "Fewest workers: " in text
    assert "When one decode worker dies in the middle" in text
    assert len(json.loads((tmp_path / "p.json").read_bytes())["curve"]) == 3


def test_nothing_that_meets_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--rate", "500", "--slo", "ttft=0.3,tpot=0.1"]) == 1
    assert "No split of 4 workers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--slo", "ttft=0.001"], "ttft=0.001 cannot be met by any number of workers: 90% of the requests"),
        (["--slo", "tpot=0.0001"], "times the limit"),
        (["--attain", "1.5"], "--attain: must be a share"),
        (["--workers", "1"], "must be a whole number from 2, got '1'"),
        (["--preset", "x"], "no preset 'x'"),
    ],
)
def test_faults_are_one_line(arguments: list[str], fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main([*COMMAND, *arguments])
    except SystemExit as exc:
        code = int(exc.code or 0)
    shown = capsys.readouterr().err
    assert code == 2
    assert fault in shown
    assert len(shown.splitlines()) == 1
