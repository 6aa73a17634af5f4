"""benchmarks/routing: what it makes of results, how it cuts a trace, what it writes for gateways."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer

from benchmarks.relay.bench import Failed
from benchmarks.relay.build import Missing
from benchmarks.routing.__main__ import _rounds, _slices
from benchmarks.routing.gateways import GATEWAYS, Place, WorkerAddress, chosen, omni_config
from benchmarks.routing.kept import Kept
from benchmarks.routing.machine import Instant, Shares, shares
from benchmarks.routing.measure import Result, _check_legs
from benchmarks.routing.report import report
from benchmarks.routing.words import write_word_model
from omni_proxy.config import ConfigError, parse
from omni_proxy.sim.bench.measure import Seen, bench_figures
from omni_proxy.sim.bench.prompts import PromptForm, Prompts
from omni_proxy.sim.figures import Slo
from omni_proxy.sim.pretend.prompts import tokens_of_text
from omni_proxy.sim.workload import SimRequest


def seen(number: int, ttft: float, outcome: str = "completed") -> Seen:
    return Seen(
        number,
        float(number),
        float(number),
        number + ttft + 1,
        200,
        outcome,
        prompt_tokens=10,
        first=number + ttft,
        last=number + ttft + 1,
        completion_tokens=11,
    )


def result(gateway: str, load: float, seed: int, ttft: float, pd: bool = True) -> Result:
    requests = [seen(n, ttft) for n in range(10)]
    return Result(gateway, load, seed, bench_figures(requests, Slo()), pd, cached_share=0.25, gateway_cpu_s=1.5)


def test_the_median_of_slices_and_the_ratio_to_the_best_peer() -> None:
    results = [result("omni-proxy", 0.75, seed, ttft) for seed, ttft in enumerate((0.5, 1.0, 9.0))]
    results += [result("a", 0.75, seed, 2.0) for seed in range(3)] + [result("b", 0.75, seed, 4.0) for seed in range(3)]
    results += [result("omni-proxy, TPOT limit", 0.75, seed, 0.4) for seed in range(3)]
    results += [result("nginx", 0.75, 0, 0.5, pd=False), Result("c", 0.75, 0, None, reason="not installed")]
    text = report(results)
    assert "median of 3 slices" in text
    assert "omni-proxy to the best peer with PD: TTFT mean 0.50 (a)" in text
    assert "omni-proxy, TPOT limit to the best peer with PD: TTFT mean 0.20 (a)" in text
    assert "without PD, where every worker does both: TTFT mean 2.00 (nginx wins)" in text
    assert "c: no figures: not installed" in text


def place(folder: Path) -> Place:
    prefill = WorkerAddress(1001, "prefill", 1002, 1004, 32, 32_000)
    workers = [prefill, WorkerAddress(1003, "decode", None, 1005, 256, 32_000)]
    return Place(1000, 999, workers, folder, folder / "model", 0.025)


def test_our_config_is_valid(tmp_path: Path) -> None:
    config = parse(yaml.safe_load(omni_config(place(tmp_path), limited=True)), "omni.yaml")
    assert (config.scheduling.tpot_limit_s, config.scheduling.aggregate_below_tokens) == (0.025, None)
    config = parse(yaml.safe_load(omni_config(place(tmp_path), limited=False)), "omni.yaml")
    assert (config.scheduling.tpot_limit_s, config.scheduling.aggregate_below_tokens) == (None, 0)
    assert [(w.role.value, w.max_seqs) for w in config.workers] == [("prefill", 32), ("decode", 256)]


def test_every_gateway_gets_every_worker(tmp_path: Path) -> None:
    with suppress(Missing):
        next(gateway for gateway in GATEWAYS if gateway.family == "nginx").command(place(tmp_path))
        assert "least_conn; server 127.0.0.1:1001; server 127.0.0.1:1003;" in (tmp_path / "nginx.conf").read_text()
    assert len({gateway.row for gateway in GATEWAYS}) == len(GATEWAYS)
    assert len({gateway.name for gateway in GATEWAYS}) == len(GATEWAYS)
    with pytest.raises(ConfigError, match="there is no 'apache'"):
        chosen("omni,apache")
    assert [gateway.row for gateway in chosen("vllm-router/kv_aware,omni")] == [
        "omni-proxy",
        "omni-proxy, TPOT limit",
        "vllm-router kv_aware",
    ]
    assert {gateway.family for gateway in chosen("sglang-router")} == {"sglang-router"}


def test_the_router_that_follows_kv_events_is_told_of_them(tmp_path: Path) -> None:
    (kv_aware,) = chosen("vllm-router/kv_aware")
    with suppress(Missing):
        command = kv_aware.command(place(tmp_path))
        assert command[command.index("--pd-kv-events") + 1] == "http://127.0.0.1:1001=tcp://127.0.0.1:1004"
        assert command[command.index("--prefill-policy") + 1] == "kv_aware"


def test_results_are_kept_and_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    kept = Kept.of(path, {"requests": "3", "speed": "4"})
    kept.add(result("omni-proxy", 0.5, 0, 1.0))
    kept.add(Result("nginx least_conn, no PD", 0.5, 0, None, reason="not installed"))
    again = Kept.of(path, {"speed": "4", "requests": "3"})
    assert again.has(("omni-proxy", 0.5, 0))
    assert not again.has(("nginx least_conn, no PD", 0.5, 0))
    assert again.results["omni-proxy", 0.5, 0] == result("omni-proxy", 0.5, 0, 1.0)
    options = argparse.Namespace(
        trace=None, synthetic="poisson,requests=3,rate=1", requests=3, seeds=2, loads="0.5,0.9", load_basis="cold",
        prefill=1, decode=1, preset="demo",
    )  # fmt: skip
    left = [(r.load, r.seed, [g.name for g in r.gateways]) for r in _rounds(options, chosen("omni,nginx"), again)]
    both = ["omni", "omni/limit", "nginx"]
    assert left == [(0.5, 0, both[1:]), (0.9, 0, both), (0.5, 1, both), (0.9, 1, both)]
    with pytest.raises(ConfigError, match="of another run: speed was 4, now it is 2"):
        Kept.of(path, {"requests": "3", "speed": "2"})
    path.write_text("[]")
    with pytest.raises(ConfigError, match="holds no results of this benchmark"):
        Kept.of(path, {})


def test_loads_that_are_no_numbers_are_refused() -> None:
    options = argparse.Namespace(
        trace=None, synthetic="poisson,requests=3", requests=3, seeds=1, loads="0.5,x", load_basis="cold",
        prefill=1, decode=1, preset="demo",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="--loads: must be numbers above 0, got 'x'"):
        _rounds(options, chosen("omni"), Kept.of(None, {}))


def test_a_saturated_run_is_told_apart() -> None:
    begin, end = Instant(0.0, 0.0, 0.0, 0.0, 0.0), Instant(10.0, 2.0, 6.0, 3.0, 12.0)
    found = shares(begin, end, [0], [1])
    assert (found.gateway, found.workers, found.client) == (0.2, 0.6, 0.3)
    assert found.foreign == pytest.approx(0.05)
    assert found.faults(0.01) == ["workers and client used 90% of their cores"]
    assert Shares(gateway=0.9, foreign=0.2).faults(0.3) == [
        "the gateway used 90% of its core", "others used 20% of the machine", "the client was 0.30 s late at p99",
    ]  # fmt: skip
    busy = Result("a", 0.5, 1, bench_figures([seen(0, 1.0)], Slo()), shares=found)
    text = report([busy])
    assert "Not to be trusted: a, slice 1: workers and client used 90% of their cores." in text
    assert "20%/90%" in text


def test_slices_begin_at_their_own_zero(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = (f'{{"timestamp": {1000 * n}, "input_length": 5, "output_length": 1, "hash_ids": [{n}]}}' for n in range(7))
    trace.write_text("\n".join(rows))
    options = argparse.Namespace(trace=trace, synthetic=None, requests=3, seeds=2)
    first, second = _slices(options)
    assert [r.arrival_s for r in first.requests] == [r.arrival_s for r in second.requests] == [0.0, 1.0, 2.0]
    assert second.requests[0].block_keys == (3,)
    with pytest.raises(ConfigError, match="has no 4 slices of 3 requests"):
        _slices(argparse.Namespace(trace=trace, synthetic=None, requests=3, seeds=4))


def test_the_word_model_counts_as_the_workers_do(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(write_word_model(tmp_path) / "tokenizer.json"))
    text = Prompts(PromptForm.WORDS, 64).body(SimRequest(0, 200, 1, (1, 2, 3, 4)), 0, chat=False)["prompt"]
    assert tokenizer.encode(text).ids == list(tokens_of_text(text))


def test_a_short_cut_is_found_out() -> None:
    _check_legs([seen(0, 1.0)], 10)
    with pytest.raises(Failed, match="saw 0 of 10 prompt tokens"):
        _check_legs([seen(0, 1.0)], 0)
