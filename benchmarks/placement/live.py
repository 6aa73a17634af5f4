"""`python -m benchmarks.placement.live`: decode speed of a skewed model on CPU ranks, fixed against live placement.

A random checkpoint whose router prefers the experts that lie on one rank. Both runs serve the same requests, and the
clock starts after the warm-up in which the live one adapts. Fewer cores than ranks blunt the gain: while one rank waits
for the fullest, another uses its core.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from omni_proxy.workers.engine.engine import Engine
from omni_proxy.workers.engine.expert_parallel.leader import ExpertOptions, first_placement
from omni_proxy.workers.engine.hf_config import read_config
from omni_proxy.workers.engine.types import EngineConfig, EngineRequest, EngineStats, Output, SamplingParams

LAYERS, EXPERTS, TOP_K, HIDDEN, WIDE, VOCAB = 2, 16, 2, 512, 1024, 512
HEADS, KEY_HEADS, HEAD_DIM = 8, 2, 64
HOT = 20.0  # the hot experts' router rows are this much longer
WINDOW_STEPS = 8


@dataclass
class Run:
    """Tokens per second after the warm-up, and how the ranks were loaded then."""

    tokens_per_s: float
    stats: EngineStats
    tokens: dict[str, list[int]] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement.live", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=96)
    parser.add_argument("--warm-up", type=int, default=60, help="tokens per sequence before the clock starts")
    parser.add_argument("--measured", type=int, default=40, help="tokens per sequence that are timed")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each kind, taking turns")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), options.ranks)
        runs: dict[str, list[Run]] = {"fixed": [], "live": []}
        for _ in range(options.rounds):
            for name, window in (("fixed", 0), ("live", WINDOW_STEPS)):
                runs[name].append(decode(model, options, window))
                _say(name, runs[name][-1])
    best = {name: max(run.tokens_per_s for run in kind) for name, kind in runs.items()}
    same = all(run.tokens == runs["fixed"][0].tokens for kind in runs.values() for run in kind)
    print(f"live / fixed, best of {options.rounds}: {best['live'] / best['fixed']:.2f}; same tokens: {same}")


def _say(name: str, run: Run) -> None:
    ratios = ", ".join(f"{ratio:.2f}" for ratio in run.stats.expert_imbalance)
    copied = f"{run.stats.experts_copied} experts copied"
    print(f"{name:>5}: {run.tokens_per_s:7.0f} tokens/s, max/mean rows per rank {ratios}, {copied}", flush=True)


def decode(model: Path, options: argparse.Namespace, window_steps: int) -> Run:
    """Serve all sequences at once on an engine of its own."""
    count, total = options.sequences, options.warm_up + options.measured
    config = EngineConfig(
        str(model),
        max_num_seqs=count,
        kv_cache_bytes=1 << 28,
        threads=1,
        expert_parallel=options.ranks,
        expert_window_steps=window_steps,
    )
    engine = Engine(config)
    engine.start()
    clock = _Clock(count, count * options.warm_up, count * total)
    try:
        for nth in range(count):
            prompt = tuple((nth * 31 + at * 7) % VOCAB for at in range(8))
            sampling = SamplingParams(total, temperature=0.0, ignore_eos=True)
            engine.submit(EngineRequest(str(nth), prompt, sampling), clock.take)
        clock.done.wait()
        return Run(clock.rate(), engine.stats(), clock.tokens)
    finally:
        engine.stop()


class _Clock:
    """Counts tokens in the engine's thread; times those after the first `start` up to `stop`."""

    def __init__(self, sequences: int, start: int, stop: int) -> None:
        self._left, self._start, self._stop = sequences, start, stop
        self._count, self._began, self._ended = 0, 0.0, 0.0
        self.tokens: dict[str, list[int]] = {}
        self.done = threading.Event()

    def take(self, output: Output) -> None:
        self._count += len(output.token_ids)
        self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
        now = time.perf_counter()
        if self._count <= self._start:
            self._began = now
        self._ended = now
        if output.finish_reason is not None:
            self._left -= 1
            if not self._left:
                self.done.set()

    def rate(self) -> float:
        return (self._stop - self._start) / (self._ended - self._began)


def write_model(folder: Path, ranks: int) -> Path:
    """A random checkpoint in which the router prefers the experts that only one rank holds."""
    (folder / "config.json").write_text(json.dumps(_config()))
    chance = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> torch.Tensor:
        values: torch.Tensor = torch.randn(*shape, generator=chance) / shape[-1] ** 0.5
        return values.bfloat16()

    tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN) * 8, "model.norm.weight": torch.ones(HIDDEN)}
    tensors["lm_head.weight"] = matrix(VOCAB, HIDDEN)
    hot = _on_one_rank(folder, ranks)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, shape in _shapes().items():
            tensors[prefix + name] = torch.ones(shape) if len(shape) == 1 else matrix(*shape)
        tensors[prefix + "mlp.gate.weight"][hot[layer]] *= HOT
    save_file({name: tensor.bfloat16().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def _on_one_rank(folder: Path, ranks: int) -> list[list[int]]:
    """Per layer, the experts of the rank with most experts that no other rank holds."""
    placement = first_placement(read_config(folder), ExpertOptions(ranks))
    copies = placement.copies()
    hot = []
    for layer in range(LAYERS):
        alone = [[int(e) for e in slots if e >= 0 and copies[layer, e] == 1] for slots in placement.slots[layer]]
        hot.append(max(alone, key=len))
    return hot


def _shapes() -> dict[str, tuple[int, ...]]:
    return {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj.weight": (KEY_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj.weight": (KEY_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "self_attn.q_norm.weight": (HEAD_DIM,),
        "self_attn.k_norm.weight": (HEAD_DIM,),
        "mlp.gate.weight": (EXPERTS, HIDDEN),
        "mlp.experts.gate_up_proj": (EXPERTS, 2 * WIDE, HIDDEN),
        "mlp.experts.down_proj": (EXPERTS, HIDDEN, WIDE),
    }


def _config() -> dict[str, object]:
    return {
        "model_type": "qwen3_moe",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": WIDE,
        "moe_intermediate_size": WIDE,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
    }


if __name__ == "__main__":
    main()
