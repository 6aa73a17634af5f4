"""Who generates: the engine in this process, and transformers' own `generate`. One thread each."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from queue import Queue
from threading import Event
from typing import Protocol

import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine.models import Subject
from omni_proxy.workers.engine.engine import Engine
from omni_proxy.workers.engine.types import EngineConfig, EngineRequest, Output, SamplingParams

Prompts = list[list[int]]


@dataclass(frozen=True)
class Spent:
    """Seconds of one call: on the clock, and of all cores."""

    wall_s: float
    cpu_s: float


class Contestant(Protocol):
    def generate(self, prompts: Prompts, tokens: int) -> list[list[int]]:
        """Greedy, exactly `tokens` for each prompt, all prompts in one batch."""
        ...


def timed(contestant: Contestant, prompts: Prompts, tokens: int) -> Spent:
    cpu, wall = time.process_time(), time.perf_counter()
    contestant.generate(prompts, tokens)
    return Spent(time.perf_counter() - wall, time.process_time() - cpu)


class Ours:
    """The embedded engine; prompts are never found in its cache."""

    def __init__(
        self,
        folder: Path,
        speculation: str = "off",
        dtype: str = "float32",
        quantization: str | None = None,
        draft_model: str | None = None,
        temperature: float = 0.0,
    ) -> None:
        config = EngineConfig(
            str(folder),
            speculation=speculation,
            draft_model=draft_model,
            dtype=dtype,
            quantization=quantization,
            threads=1,
            prefix_caching=False,
        )
        self._engine = Engine(config)
        self._engine.start()
        self._temperature = temperature
        self._count = 0
        self.gaps: list[float] = []
        """Seconds a token between the outputs of the last call."""

    def generate(self, prompts: Prompts, tokens: int) -> list[list[int]]:
        done = Event()
        sampling = SamplingParams(tokens, temperature=self._temperature, seed=0, ignore_eos=True)
        found: dict[str, list[int]] = {}
        seen: list[tuple[float, int]] = []
        running = len(prompts)

        def take(output: Output) -> None:  # in the engine's thread, which waits for nobody
            nonlocal running
            seen.append((time.perf_counter(), len(output.token_ids)))
            found[output.request_id] += output.token_ids
            running -= output.finish_reason is not None
            if not running:
                done.set()

        for prompt in prompts:
            self._count += 1
            found[str(self._count)] = []
            self._engine.submit(EngineRequest(str(self._count), tuple(prompt), sampling), take)
        done.wait()
        self.gaps = [(after - before) / tokens for (before, _), (after, tokens) in pairwise(seen)]
        return list(found.values())

    def ranks(self, prompt: list[int], answer: list[int]) -> list[int]:
        """Of each token of an answer: how many are at least as likely there."""
        done: Queue[Output] = Queue()
        self._count += 1
        asked = EngineRequest(str(self._count), (*prompt, *answer), SamplingParams(1), prompt_logprobs=0)
        self._engine.submit(asked, done.put)
        told = done.get().prompt_logprobs
        assert told is not None
        return [one.rank or 0 for one in told[-len(answer) :]]

    def drafts(self) -> tuple[int, int]:
        """Tokens drafted since the start, and how many were right."""
        stats = self._engine.stats()
        return stats.spec_draft_tokens, stats.spec_accepted_tokens

    def stop(self) -> None:
        self._engine.stop()


class Theirs:
    """transformers, with its cache and the experts' implementation that it chooses itself (grouped_mm)."""

    def __init__(self, subject: Subject, dtype: torch.dtype) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(subject.folder, dtype=dtype).eval()

    @torch.inference_mode()
    def generate(self, prompts: Prompts, tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        return [[int(t) for t in row] for row in out[:, ids.shape[1] :]]
