"""`omni-proxy fit`: measure a worker, or read recorded runs of `bench`, and write its engine model."""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
import uvloop
import yaml

from omni_proxy.config import ConfigError
from omni_proxy.sim.bench.client import BenchPlan, send_all
from omni_proxy.sim.bench.measure import BenchResult, Seen, uncompressed
from omni_proxy.sim.bench.prompts import PromptForm, Prompts
from omni_proxy.sim.commands import write_file
from omni_proxy.sim.engine_model import EngineModel
from omni_proxy.sim.fit import Fit, fit_model
from omni_proxy.sim.http.client import ClientFault, HttpPool
from omni_proxy.sim.presets import chosen_model
from omni_proxy.sim.workload import SimRequest, Workload

BATCHES: Final = (2, 4, 8, 16)
"""Concurrencies at which decode is measured."""
LENGTHS: Final = 24
"""Prompt lengths at which prefill is measured."""


def run_fit(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """The command. Raises ConfigError."""
    base = chosen_model(options.base, options.engine)
    if (options.url is None) == (not options.runs):
        raise ConfigError("give either --url or --runs")
    runs: Sequence[Sequence[Seen]]
    if options.url is not None:
        runs = probe_worker(options.url, base, PromptForm(options.prompt), options.vocabulary, options.seed)
    else:
        runs = [read_run(path) for path in options.runs]
    found = fit_model(runs, base)
    say(fit_text(found))
    if options.out is not None:
        text = yaml.safe_dump(msgspec.to_builtins(found.model), sort_keys=False)
        write_file(options.out, text.encode())
    return 0


def fit_text(found: Fit) -> str:
    """How well it fits, in two lines."""
    model = found.model
    return "\n".join(
        [
            f"prefill  {1e6 * model.token_s:.4g} us a token, {1e9 * model.pair_s:.4g} ns a pair; "
            f"median error {found.prefill_error:.1%} over {found.prefill_samples} prompts",
            f"decode   {1e3 * (model.step_s + model.decode_s):.4g} ms a step, {1e3 * model.seq_s:.4g} ms a sequence, "
            f"{1e9 * model.kv_s:.4g} ns a token of context; "
            f"median error {found.decode_error:.1%} over {found.decode_samples} answers",
        ]
    )


def read_run(path: Path) -> tuple[Seen, ...]:
    """The requests of a result that `bench --json` has saved. Raises ConfigError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=BenchResult).requests
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror or exc}") from exc
    except msgspec.MsgspecError as exc:
        raise ConfigError(f"{path}: is no result of bench ({exc})") from exc


Look = Callable[[], Callable[[], float]]
"""Begins to look at how the worker is kept from working; what it returns tells by which factor that made it slower."""


def probe_worker(
    url: str, base: EngineModel, form: PromptForm, vocabulary: int, seed: int, look: Look = lambda: lambda: 1.0
) -> list[list[Seen]]:
    """Runs against one worker: prompts one by one, then answers side by side. Raises ConfigError."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_probe(url, base, Prompts(form, _BLOCK, vocabulary), seed, look))


async def _probe(url: str, base: EngineModel, prompts: Prompts, seed: int, look: Look) -> list[list[Seen]]:
    model, longest = await _facts(url, base.max_model_len)
    alone, *together = _probes(longest, random.Random(seed))
    parts = [(1, replace(alone, requests=(request,))) for request in alone.requests]
    parts += list(zip(BATCHES, together, strict=True))
    runs = []
    for concurrency, workload in parts:
        plan = BenchPlan(model, chat=False, stream=True, concurrency=concurrency, timeout_s=300.0)
        factor = look()
        seen = await send_all(url, workload, prompts, plan)
        slower = factor()
        runs.append([uncompressed(one, 1 / slower) for one in seen])
    return runs


_BLOCK: Final = 64


def _probes(longest: int, chance: random.Random) -> Sequence[Workload]:
    """One by one: prompts of many lengths. Side by side: short and longer contexts, long answers."""
    key = iter(range(chance.randrange(1 << 40), 1 << 62))

    def request(prompt: int, output: int) -> SimRequest:
        keys = tuple(next(key) for _ in range(-(-prompt // _BLOCK)))
        return SimRequest(0.0, prompt, output, keys)

    most = max(64, longest * 3 // 4)
    lengths = [max(16, most * (n + 1) // LENGTHS) for n in range(LENGTHS)]
    chance.shuffle(lengths)
    loads = [Workload("prompts", _BLOCK, tuple(request(length, 8) for length in lengths))]
    output = max(16, min(64, longest // 8))
    for batch in BATCHES:
        contexts = [max(16, most // (8 if n % 2 else 32)) for n in range(3 * batch)]
        loads.append(Workload(f"answers {batch}", _BLOCK, tuple(request(c, output) for c in contexts)))
    return loads


async def _facts(url: str, fallback: int) -> tuple[str, int]:
    """Model name and context length of a worker. Raises ConfigError."""
    try:
        pool = HttpPool(url)
    except ValueError as exc:
        raise ConfigError(f"--url: {exc}") from exc
    try:
        _, body = await pool.fetch("GET", "/v1/models")
        entry = msgspec.json.decode(body)["data"][0]
        return str(entry["id"]), int(entry.get("max_model_len") or fallback)
    except ClientFault as exc:
        raise ConfigError(f"{url}: {exc}") from exc
    except (msgspec.MsgspecError, KeyError, IndexError, TypeError) as exc:
        raise ConfigError(f"{url}: /v1/models names no model") from exc
    finally:
        await pool.close()
