"""Train the demo model and write it as a Hugging Face folder.

    python -m scripts.demo_model.train --out DIR --minutes 40      # as many steps as fit
    python -m scripts.demo_model.train --out DIR --steps 2000      # exactly so many: what a model card records
    python -m scripts.demo_model.train --out DIR --smoke           # a minute, for tests

Processes of one thread each share the weights in memory. Every process sums its own batches' gradients, then updates
the half of the weights that it owns from everybody's sum. One thread a process costs two waits a step instead of one
an operation, so that a busy machine slows training down but does not stall it.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Final, cast

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from scripts.demo_model.card import write_card
from scripts.demo_model.corpus import conversations
from scripts.demo_model.evaluate import table
from scripts.demo_model.model import DemoModel, Shape, from_hugging_face, to_hugging_face
from scripts.demo_model.tokens import END, PAD, Row, encode, save_tokenizer, train_tokenizer

LONGEST: Final = 1536
SMOKE_SHAPE: Final = Shape(vocab=1024, hidden=128, layers=2, heads=4, kv_heads=2, experts=4, expert_width=64)


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides the result (with the code and the kind of machine)."""

    out: Path
    seed: int = 7
    steps: int | None = None
    minutes: float | None = None
    workers: int = 2
    row_tokens: int = 4096
    rows_per_step: int = 1
    short_steps: int = 300
    matrix_rate: float = 0.02
    other_rate: float = 0.003
    user_weight: float = 0.3
    short_share: float = 0.25
    decay_from: float = 0.65
    warmup: int = 50
    begin: Path | None = None
    smoke: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Conversations of similar length, one a row, padded at the end; `where` are flat positions to learn from,
    the assistant's with weight 1 and the user's with less."""

    ids: Tensor
    where: Tensor
    labels: Tensor
    weights: Tensor


# --- data ---------------------------------------------------------------------------------------------------------


def batches(tokenizer: Tokenizer, recipe: Recipe, worker: int) -> Iterator[Batch]:
    """Endless; never the same conversation twice, so that the training loss is an honest loss."""
    per_pool = 32 * recipe.rows_per_step
    number = 0
    while True:
        short = number * per_pool < recipe.short_steps * recipe.rows_per_step
        short = short or Random(f"{recipe.seed}/{worker}/{number}/short").random() < recipe.short_share
        rng = Random(f"{recipe.seed}/{worker}/{number}")
        yield from pool(tokenizer, rng, recipe, per_pool, short)
        number += 1


def pool(tokenizer: Tokenizer, rng: Random, recipe: Recipe, count: int, short: bool) -> list[Batch]:
    """Exactly `count` batches: rows sorted by length and cut into equal areas, then shuffled."""
    stream = conversations(str(rng.random()), short=short)
    rows: list[Row] = []
    while sum(padded(len(row[0])) for row in rows) < recipe.row_tokens * count * 1.15:
        rows += [row for row in encode(tokenizer, islice(stream, 100)) if len(row[0]) <= LONGEST]
    rows.sort(key=lambda row: len(row[0]) + 8 * rng.random())
    made: list[Batch] = []
    taken: list[Row] = []
    for row in rows:
        longest = max(len(r[0]) for r in (*taken, row))
        if taken and padded(longest) * (len(taken) + 1) > recipe.row_tokens:
            made.append(collate(taken, recipe.user_weight))
            taken = []
        taken.append(row)
    made.append(collate(taken, recipe.user_weight))
    rng.shuffle(made)
    return made[:count] if len(made) >= count else made + made[: count - len(made)]


def padded(length: int) -> int:
    """Few different sizes: oneDNN compiles a kernel for every new one."""
    return -(-length // 32) * 32


def collate(rows: list[Row], user_weight: float) -> Batch:
    width = padded(max(len(ids) for ids, _, _ in rows))
    ids = torch.zeros(len(rows), width + 1, dtype=torch.long)
    for i, (row, _, _) in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    learnt = [(i * width + t, 1.0) for i, (_, said, _) in enumerate(rows) for t in said]
    if user_weight:
        learnt += [(i * width + t, user_weight) for i, (_, _, asked) in enumerate(rows) for t in asked]
    where = torch.tensor([position for position, _ in learnt])
    weights = torch.tensor([weight for _, weight in learnt])
    return Batch(ids[:, :-1].contiguous(), where, ids[:, 1:].reshape(-1)[where], weights)


# --- optimisation -------------------------------------------------------------------------------------------------


def orthogonal(g: Tensor) -> Tensor:
    """Nearest (semi-)orthogonal matrix, by Newton-Schulz iteration: the direction of the Muon update."""
    wide = g.shape[-2] <= g.shape[-1]
    x: Tensor = (g if wide else g.mT).bfloat16()
    x = x / (x.flatten(-2).norm(dim=-1)[..., None, None] + 1e-7)
    for _ in range(5):
        s = x @ x.mT
        x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
    return (x if wide else x.mT).float()


class Optimiser:
    """Muon for the matrices inside the layers, Adam for the rest; only for the weights that this process owns."""

    def __init__(self, owned: dict[str, Tensor], recipe: Recipe) -> None:
        self.owned = owned
        self.recipe = recipe
        self.state = {name: torch.zeros_like(p) for name, p in owned.items()}
        self.square = {name: torch.zeros_like(p) for name, p in owned.items() if not is_matrix(name, p)}

    @torch.no_grad()
    def step(self, grads: dict[str, Tensor], number: int, rate: float) -> None:
        for name, p in self.owned.items():
            update = self.muon if is_matrix(name, p) else self.adam
            update(name, p, grads[name], number, rate)

    def muon(self, name: str, p: Tensor, grad: Tensor, number: int, rate: float) -> None:
        momentum = self.state[name].lerp_(grad, 0.05)
        direction = orthogonal(grad.lerp(momentum, 0.95))
        rate *= self.recipe.matrix_rate * max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
        p.mul_(1 - 0.05 * rate).add_(direction, alpha=-rate)

    def adam(self, name: str, p: Tensor, grad: Tensor, number: int, rate: float) -> None:
        mean = self.state[name].lerp_(grad, 0.1)
        square = self.square[name].lerp_(grad.square(), 0.02)
        fix = math.sqrt(1 - 0.98 ** (number + 1)) / (1 - 0.9 ** (number + 1))
        p.addcdiv_(mean, square.sqrt().add_(1e-8), value=-self.recipe.other_rate * rate * fix)


def is_matrix(name: str, p: Tensor) -> bool:
    return p.ndim >= 2 and "embed" not in name and "router" not in name


def rate_at(step: int, total: int | None, recipe: Recipe) -> float:
    """Warm up, hold, fall linearly to zero; while the total is unknown it holds."""
    warm = min(1.0, (step + 1) / recipe.warmup)
    if total is None:
        return warm
    held = int(recipe.decay_from * total)
    return warm * min(1.0, (total - step) / max(1, total - held))


# --- the loop -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Shared:
    """What the processes see together: weights, one set of gradients each, figures, and the planned number of steps."""

    model: DemoModel
    grads: list[dict[str, Tensor]]
    figures: Tensor  # [worker, (loss sum, targets, tokens, balance)]
    total: Tensor
    barrier: Any


@dataclass(slots=True)
class Progress:
    """How far the run is: what the log and the model card say."""

    workers: int
    began: float
    step: int = 0
    tokens: int = 0
    loss: float = 0.0  # nats a token of the answers, smoothed over some 30 steps
    balance: float = 0.0  # 1 when every expert of every layer gets the same

    def add(self, figures: Tensor) -> None:
        losses, targets, tokens, balance = figures.sum(0).tolist()
        now = losses / targets
        self.loss = now if self.step == 0 else 0.97 * self.loss + 0.03 * now
        self.step, self.tokens, self.balance = self.step + 1, self.tokens + int(tokens), balance / self.workers

    def line(self, total: int | None) -> str:
        figures = {
            "step": self.step,
            "of": total,
            "loss": round(self.loss, 4),
            "balance": round(self.balance, 3),
            "tokens": self.tokens,
            "seconds": round(time.monotonic() - self.began),
            "cpu_seconds": round(time.process_time() * self.workers),
        }
        return json.dumps(figures)


def work(worker: int, shared: Shared, recipe: Recipe, tokenizer_json: str) -> None:
    """One process: the same loop in each, worker 0 also decides, reports and saves."""
    torch.set_num_threads(1)
    stream = batches(Tokenizer.from_str(tokenizer_json), recipe, worker)
    parameters = enumerate(shared.model.named_parameters())
    owned: dict[str, Tensor] = {name: p for i, (name, p) in parameters if i % recipe.workers == worker}
    optimiser = Optimiser(owned, recipe)
    progress = Progress(recipe.workers, time.monotonic())
    total: int | None = None
    while progress.step != total:
        if worker == 0:
            decide(shared, recipe, progress)
        accumulate(shared, worker, islice(stream, recipe.rows_per_step))
        shared.barrier.wait()
        total = int(shared.total) or None
        summed = {name: torch.stack([g[name] for g in shared.grads]).sum(0) for name in owned}
        optimiser.step(summed, progress.step, rate_at(progress.step, total, recipe))
        progress.add(shared.figures)
        shared.barrier.wait()
        if worker == 0:
            report(shared, recipe, progress, total)


def report(shared: Shared, recipe: Recipe, progress: Progress, total: int | None) -> None:
    """A line now and then, the weights less often."""
    if progress.step % 20 == 0 or progress.step == total:
        print(progress.line(total), flush=True)
        with (recipe.out / "train_log.jsonl").open("a") as log:
            log.write(progress.line(total) + "\n")
    if progress.step % 100 == 0:
        save_weights(shared.model, recipe.out)


def decide(shared: Shared, recipe: Recipe, progress: Progress) -> None:
    """Fix the number of steps: as told, or once so much time is gone that the rest is for the falling rate."""
    if int(shared.total):
        return
    if recipe.steps:
        shared.total.fill_(recipe.steps)
    elif recipe.minutes and time.monotonic() - progress.began >= recipe.decay_from * recipe.minutes * 60:
        shared.total.fill_(math.ceil(progress.step / recipe.decay_from))


def accumulate(shared: Shared, worker: int, taken: Iterator[Batch]) -> None:
    """Run the batches of one step and leave the sum of their gradients where everybody sees it."""
    model, grads, figures = shared.model, shared.grads[worker], torch.zeros(4)
    parameters = dict(model.named_parameters())
    for grad in grads.values():
        grad.zero_()
    for batch in taken:
        hidden, balance = model(batch.ids)
        picked = hidden.reshape(-1, model.shape.hidden)[batch.where]
        each = cross_entropy(model, picked, batch.labels)
        loss = (each * batch.weights).sum() / 1000 + model.shape.aux_loss * balance
        got = torch.autograd.grad(loss, list(parameters.values()))
        for name, g in zip(parameters, got, strict=True):
            grads[name].add_(g)
        answers = batch.weights == 1.0
        told = float(each.detach()[answers].sum()), float(answers.sum()), batch.ids.numel(), float(balance.detach())
        figures += torch.tensor(told)
    shared.figures[worker] = figures


def cross_entropy(model: DemoModel, picked: Tensor, labels: Tensor) -> Tensor:
    """One a label; rows rounded up to a multiple of 256 for the same reason as everywhere."""
    missing = -len(labels) % 256
    logits = model.logits(F.pad(picked, (0, 0, 0, missing))).float()
    return F.cross_entropy(logits, F.pad(labels, (0, missing)), reduction="none")[: len(labels)]


def shared_zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return cast(Tensor, torch.zeros(size, dtype=dtype).share_memory_())  # type: ignore[no-untyped-call]


def train(recipe: Recipe, tokenizer: Tokenizer, shape: Shape) -> DemoModel:
    torch.manual_seed(recipe.seed)
    model = DemoModel(shape)
    if recipe.begin:
        from_hugging_face(model, load_file(recipe.begin / "model.safetensors"))
    model.share_memory()
    parameters = list(model.named_parameters())
    shared = Shared(
        model=model,
        grads=[{name: shared_zeros(*p.shape) for name, p in parameters} for _ in range(recipe.workers)],
        figures=shared_zeros(recipe.workers, 4),
        total=shared_zeros(dtype=torch.long),
        barrier=mp.get_context("spawn").Barrier(recipe.workers),
    )
    mp.spawn(  # type: ignore[attr-defined, no-untyped-call]
        work, args=(shared, recipe, tokenizer.to_str()), nprocs=recipe.workers
    )
    return model


# --- the folder ---------------------------------------------------------------------------------------------------


def save_weights(model: DemoModel, out: Path) -> None:
    partial = out / "model.safetensors.partial"
    save_file(to_hugging_face(model), partial, metadata={"format": "pt"})
    partial.rename(out / "model.safetensors")


def write_config(shape: Shape, tokenizer: Tokenizer, out: Path) -> None:
    """By hand, since readers differ: transformers 5 has other names for the number of experts and the rope base."""
    end, pad = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16",
        "torch_dtype": "bfloat16", "vocab_size": shape.vocab, "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
        "num_experts": shape.experts, "num_local_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token, "moe_intermediate_size": shape.expert_width,
        "intermediate_size": shape.expert_width, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "output_router_logits": False, "router_aux_loss_coef": shape.aux_loss,
        "max_position_embeddings": shape.max_positions, "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta, "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "use_sliding_window": False, "sliding_window": None, "tie_word_embeddings": True, "initializer_range": 0.02,
        "use_cache": True, "bos_token_id": None, "eos_token_id": end, "pad_token_id": pad,
    }  # fmt: skip
    generation = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [end, pad], "pad_token_id": pad}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def arguments() -> Recipe:
    usual = Recipe(Path())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--workers", type=int, default=usual.workers)
    parser.add_argument("--row-tokens", type=int, default=usual.row_tokens)
    parser.add_argument("--rows-per-step", type=int, default=usual.rows_per_step)
    parser.add_argument("--short-steps", type=int, default=usual.short_steps)
    parser.add_argument("--matrix-rate", type=float, default=usual.matrix_rate)
    parser.add_argument("--other-rate", type=float, default=usual.other_rate)
    parser.add_argument("--user-weight", type=float, default=usual.user_weight)
    parser.add_argument("--short-share", type=float, default=usual.short_share)
    parser.add_argument("--decay-from", type=float, default=usual.decay_from, help="share of steps at the full rate")
    parser.add_argument("--warmup", type=int, default=usual.warmup, help="steps until the full rate")
    parser.add_argument("--begin", type=Path, help="start from the weights of this folder")
    parser.add_argument("--smoke", action="store_true", help="a small model in about a minute")
    recipe = Recipe(**vars(parser.parse_args()))
    if recipe.steps is None and recipe.minutes is None:
        if not recipe.smoke:
            parser.error("give --minutes, --steps or --smoke")
        recipe = replace(recipe, minutes=0.6, row_tokens=1024, warmup=10)
    return recipe


def command(recipe: Recipe) -> str:
    """What to type for the same run again; the number of steps is filled in when it is known."""
    usual = asdict(Recipe(recipe.out))
    changed = {k: v for k, v in asdict(recipe).items() if v != usual[k] and k not in {"minutes", "steps", "smoke"}}
    options = "".join(f" --{name.replace('_', '-')} {value}" for name, value in changed.items())
    smoke = " --smoke" if recipe.smoke else ""
    return f"python -m scripts.demo_model.train --out DIR{smoke} --steps {{steps}}{options}"


def main() -> None:
    recipe = arguments()
    recipe.out.mkdir(parents=True, exist_ok=True)
    shape = SMOKE_SHAPE if recipe.smoke else Shape()
    kept = recipe.begin and Tokenizer.from_file(str(recipe.begin / "tokenizer.json"))
    tokenizer = kept or train_tokenizer(shape.vocab, recipe.seed)
    write_config(shape, tokenizer, recipe.out)
    save_tokenizer(tokenizer, recipe.out, shape.max_positions)
    log = recipe.out / "train_log.jsonl"
    log.write_text(json.dumps({"command": command(recipe), "longest": LONGEST}) + "\n")
    save_weights(train(recipe, tokenizer, shape), recipe.out)
    print(table(write_card(recipe.out, log, count=1 if recipe.smoke else 100)))


if __name__ == "__main__":
    main()
