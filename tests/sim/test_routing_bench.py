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
from benchmarks.routing.__main__ import _chosen, _slices
from benchmarks.routing.gateways import GATEWAYS, Place, WorkerAddress, omni_config
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
    results += [result("nginx", 0.75, 0, 0.5, pd=False), Result("c", 0.75, 0, None, reason="not installed")]
    text = report(results)
    assert "median of 3 slices" in text
    assert "omni-proxy to the best peer with PD: TTFT mean 0.50 (a)" in text
    assert "without PD, where every worker does both: TTFT mean 2.00 (nginx wins)" in text
    assert "c: no figures: not installed" in text


def place(folder: Path) -> Place:
    workers = [WorkerAddress(1001, "prefill", 1002, 32, 32_000), WorkerAddress(1003, "decode", None, 256, 32_000)]
    return Place(1000, 999, workers, folder, folder / "model")


def test_our_config_is_valid(tmp_path: Path) -> None:
    config = parse(yaml.safe_load(omni_config(place(tmp_path), "apc")), "omni.yaml")
    assert [(w.role.value, w.max_seqs) for w in config.workers] == [("prefill", 32), ("decode", 256)]


def test_every_gateway_gets_every_worker(tmp_path: Path) -> None:
    with suppress(Missing):
        next(gateway for gateway in GATEWAYS if gateway.family == "nginx").command(place(tmp_path))
        assert "least_conn; server 127.0.0.1:1001; server 127.0.0.1:1003;" in (tmp_path / "nginx.conf").read_text()
    assert len({gateway.row for gateway in GATEWAYS}) == len(GATEWAYS)
    with pytest.raises(ConfigError, match="there is no 'apache'"):
        _chosen("omni,apache")


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
