"""`omni-proxy fidelity`: what the kernel counted, the verdict, and a whole run of it."""

from __future__ import annotations

import os
import sys

import pytest

from omni_proxy.cli import main
from omni_proxy.sim.cluster import make_cluster
from omni_proxy.sim.fidelity import EXIT_APART, EXIT_NOT_JUDGED, _compare, _hopping, _Pair
from omni_proxy.sim.figures import Figures, Latency, Slo, Totals, summarise
from omni_proxy.sim.machine import Cores, Thread, Use, Watch, busiest, cores, ran_s, threads, use
from tests.sim.helpers import SMALL


def of(ttft: float) -> Figures:
    answered = [Latency(float(n), ttft, 0.01, ttft + 1) for n in range(4)]
    return summarise(answered, Totals({"completed": 4}, 4.0, 1, 1, 0), Slo(), {})


def test_the_thread_that_ran_most_is_the_engine() -> None:
    before = {"1": Thread(5.0, 1.0, 10), "2": Thread(0.5, 0.0, 2)}
    after = {"1": Thread(5.5, 1.1, 20), "2": Thread(2.5, 1.0, 9), "3": Thread(0.1, 9.0, 1)}
    assert busiest(before, after) == Thread(2.0, 1.0, 7)
    assert busiest({}, {}) is None


def test_shares_of_the_machine() -> None:
    count = os.cpu_count() or 1
    found = use(Cores(0.0, 10.0, 1.0), Cores(10.0, 10.0 + 6.0 * count, 1.0 + count), 2.0 * count)
    assert found is not None
    assert (found.own, found.others, found.steal) == pytest.approx((0.2, 0.4, 0.1))
    assert use(None, Cores(1.0, 1.0, 0.0), 1.0) is None


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counters are Linux's")
def test_the_kernel_counts_this_process() -> None:
    watch, ran = Watch([os.getpid()]), ran_s([os.getpid()])
    while ran_s([os.getpid()]) - ran < 0.02:
        pass
    assert watch.factor() >= 1.0
    assert watch.turn_wait_s() >= 0.0
    assert str(os.getpid()) in threads(os.getpid())
    assert cores() is not None


def test_a_process_that_is_gone_tells_nothing() -> None:
    watch = Watch([2**22 + 1])
    assert (watch.factor(), watch.turn_wait_s(), ran_s([2**22 + 1])) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("simulated", "others", "code", "words"),
    [
        ([0.9, 1.0, 1.9], 0.01, 0, "median of 3 runs: mean TTFT simulated +0.0% of live: within 20%"),
        ([0.7], 0.01, EXIT_APART, "mean TTFT simulated -30.0% of live: more than 20%"),
        ([1.0], 0.5, EXIT_NOT_JUDGED, "not judged: others used 50% of the machine"),
    ],
)
def test_the_verdict(simulated: list[float], others: float, code: int, words: str) -> None:
    said: list[str] = []
    pairs = [_Pair(of(1.0), of(ttft), Use(0.3, others, 0.0)) for ttft in simulated]
    assert _compare(pairs, 0.2, said.append) == code
    assert words in "\n".join(said)


def test_where_the_kernel_tells_nothing_runs_are_judged_all_the_same() -> None:
    assert _compare([_Pair(of(1.0), of(1.1), None)], 0.2, lambda text: None) == 0


def test_connections_that_wait_for_a_core_make_a_worker_slower() -> None:
    (worker, other) = make_cluster(1, 1, 0, SMALL)
    found = _hopping(worker, {worker.spec.name: 0.25}).model
    assert (found.request_s, found.first_token_s) == (SMALL.request_s + 0.25, SMALL.first_token_s + 0.25)
    assert _hopping(other, {worker.spec.name: 0.25}).model == SMALL


@pytest.mark.slow
@pytest.mark.e2e
def test_live_and_simulated_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """Pretending workers behind a real gateway; on a busy machine only the order of magnitude is sure."""
    load = "poisson,requests=30,rate=15,prompt=200,output=10"
    asked = ["--prefill", "1", "--decode", "1", "--synthetic", load, "--simulate", "demo", "--tolerance", "20"]
    assert main(["fidelity", *asked, "--runs", "2"]) in (0, EXIT_NOT_JUDGED)
    text = capsys.readouterr().out
    assert "simulated" in text
    assert "within 2000%" in text
