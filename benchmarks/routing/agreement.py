"""`python -m benchmarks.routing.agreement`: does our load client measure what an independent one measures?

Sends the same requests on the same schedule to the same pretending worker, once with aiperf (NVIDIA's client, from
PyPI, in an environment of its own) and once with `omni-proxy bench`, with cold caches before each, and compares.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import uvloop

from benchmarks.relay import procs
from benchmarks.relay.bench import Failed, free_ports, wait_for_port
from benchmarks.relay.build import Missing, peer_program
from benchmarks.routing.fleet import ask
from benchmarks.routing.measure import MODEL, make_prompts
from benchmarks.routing.words import write_word_model
from omni_proxy.sim.bench.client import BenchPlan, send_all
from omni_proxy.sim.bench.measure import bench_figures
from omni_proxy.sim.bench.prompts import Prompts
from omni_proxy.sim.figures import Slo
from omni_proxy.sim.report import seconds_text, table
from omni_proxy.sim.synthetic import parse_synthetic
from omni_proxy.sim.workload import Workload

AIPERF: Final = ("aiperf", "0.13.0")
_RUN_TIMEOUT_S: Final = 600.0
_WORKLOAD: Final = "poisson,requests=200,rate=6,prompt=1500,spread=0.6,output=60"
# Means and medians: further out one client interpolates and the other names a value that occurred.
_ROWS: Final = (
    ("TTFT mean", "time_to_first_token", "avg"),
    ("TTFT p50", "time_to_first_token", "p50"),
    ("TPOT mean", "inter_token_latency", "avg"),
    ("TPOT p50", "inter_token_latency", "p50"),
    ("E2E mean", "request_latency", "avg"),
    ("E2E p50", "request_latency", "p50"),
)


def main() -> int:
    """Run; 0 where every figure agrees within the tolerance, 1 where one does not, 2 where nothing was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing.agreement", description=__doc__)
    parser.add_argument("--synthetic", default=_WORKLOAD, metavar="KIND,key=value,...")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tolerance", type=float, default=0.05, metavar="SHARE")
    options = parser.parse_args()
    workload = parse_synthetic(options.synthetic, options.seed)
    try:
        theirs, ours = _both(workload)
    except (Failed, Missing) as exc:
        print(f"benchmarks.routing.agreement: {exc}", file=sys.stderr)
        return 2
    rows, apart = [["", "aiperf", "omni-proxy bench", "difference"]], 0.0
    for name, metric, which in _ROWS:
        difference = ours[name] / theirs[metric][which] * 1000 - 1
        apart = max(apart, abs(difference))
        rows.append([name, seconds_text(theirs[metric][which] / 1000), seconds_text(ours[name]), f"{difference:+.1%}"])
    print(table(rows))
    print(
        f"at most {apart:.1%} apart: {'within' if apart <= options.tolerance else 'more than'} {options.tolerance:.0%}"
    )
    return 0 if apart <= options.tolerance else 1


def _both(workload: Workload) -> tuple[dict[str, Any], dict[str, float]]:
    program = peer_program(*AIPERF)
    with tempfile.TemporaryDirectory(prefix="agreement-") as name:
        folder = Path(name)
        words = write_word_model(folder / "model")
        (port,) = free_ports(1)
        command = [sys.executable, "-m", "omni_proxy", "worker", "--simulate", "h200-deepseek-r1", "--port", str(port)]
        with procs.Proc([*command, "--block-size", "64"], _cpus(), folder / "worker.log") as worker:
            wait_for_port(port, worker)
            prompts = make_prompts(workload)
            theirs = _aiperf(program, port, workload, prompts, words, folder)
            ask(port, "POST", "/reset_prefix_cache")
            return theirs, _ours(port, workload, prompts)


def _cpus() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _aiperf(program: str, port: int, workload: Workload, prompts: Prompts, words: Path, folder: Path) -> dict[str, Any]:
    trace = folder / "requests.jsonl"
    with trace.open("w") as out:
        for number, request in enumerate(workload.requests):
            row = {"timestamp": round(request.arrival_s * 1000), "output_length": request.output_tokens}
            text = prompts.body(request, number, chat=False)["prompt"]
            out.write(json.dumps({**row, "text_input": text}) + "\n")
    command = [program, "profile", "--model", MODEL, "--url", f"http://127.0.0.1:{port}", "--streaming"]
    command += ["--endpoint-type", "completions", "--endpoint", "/v1/completions", "--tokenizer", str(words)]
    command += ["--fixed-schedule", "--input-file", str(trace), "--custom-dataset-type", "mooncake_trace"]
    command += ["--extra-inputs", "ignore_eos:true", "--ui", "none"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired as exc:
        raise Failed(f"aiperf did not end within {_RUN_TIMEOUT_S:.0f} s") from exc
    results = list(folder.glob("artifacts/*/profile_export_aiperf.json"))
    if done.returncode or not results:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise Failed(f"aiperf failed: {lines[-1] if lines else 'it printed nothing'}")
    found: dict[str, Any] = json.loads(results[0].read_text())
    return found


def _ours(port: int, workload: Workload, prompts: Prompts) -> dict[str, float]:
    plan = BenchPlan(MODEL, chat=False, stream=True, concurrency=None, timeout_s=600.0)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seen = runner.run(send_all(f"http://127.0.0.1:{port}", workload, prompts, plan))
    found = bench_figures(seen, Slo())
    if found.ttft is None or found.tpot is None or found.e2e is None:
        raise Failed("our client got no answer")
    return {
        "TTFT mean": found.ttft.mean,
        "TTFT p50": found.ttft.p50,
        "TPOT mean": found.tpot.mean,
        "TPOT p50": found.tpot.p50,
        "E2E mean": found.e2e.mean,
        "E2E p50": found.e2e.p50,
    }


if __name__ == "__main__":
    raise SystemExit(main())
