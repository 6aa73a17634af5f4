"""Decoding with drafts beside decoding without: the same tokens, in less time where drafts are right."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.engine.contestants import Ours, Prompts
from benchmarks.engine.generating import decoding
from benchmarks.engine.headed import SHAPES, constructed
from benchmarks.engine.models import Subject
from benchmarks.engine.report import Line
from omni_proxy.workers.engine.text import ModelTokenizer

TOKENS = 160
SHARE: Final = 0.003
"""What layers add in the constructed models, of what random ones would."""


def measure(subject: Subject, turns: int) -> list[Line]:
    """Texts that repeat, that are asked to be repeated, and that never repeat."""
    tokenizer = ModelTokenizer.load(subject.folder)
    story = "the fox ran over the hill and met a bear who liked honey. "
    texts = {
        "repeated text": (tokenizer.encode(story * 12, False), 1.3),
        "a free story": (_chat(tokenizer, "Tell me a story about a fox."), 0.95),
        "a list of what things are for": (_chat(tokenizer, "What is a spoon for?"), 0.95),
    }
    engines = {"off": Ours(subject.folder, "off"), "ngram": Ours(subject.folder, "ngram")}
    try:
        return [_compare(name, engines, [tokens], want, turns) for name, (tokens, want) in texts.items()]
    finally:
        for engine in engines.values():
            engine.stop()


def measure_heads(scratch: Path, turns: int) -> Iterator[Line]:
    """Greedy, where these heads are mostly right; and sampled evenly, where nothing is. See `headed.py`."""
    for number, name in enumerate(SHAPES):
        folder = scratch / f"headed-{number}"
        headed = constructed(folder, name, SHARE)
        for how, temperature, batches, want in (("greedy", 0.0, (1, 4), 1.3), ("sampled", 1.0, (1,), 0.95)):
            engines = {
                "off": Ours(folder, "off", temperature=temperature),
                "head": Ours(folder, "head", draft_model=headed.draft_model, temperature=temperature),
            }
            try:
                for batch in batches:
                    chance = random.Random(batch)
                    prompts = [[chance.randrange(2, headed.vocab) for _ in range(40)] for _ in range(batch)]
                    wanted = want if batch == 1 else 0.95
                    yield _compare(f"{headed.name}, {how}, batch {batch}", engines, prompts, wanted, turns)
            finally:
                for engine in engines.values():
                    engine.stop()


def _chat(tokenizer: ModelTokenizer, text: str) -> list[int]:
    return tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", False)


def _compare(name: str, engines: dict[str, Ours], prompts: Prompts, want: float, turns: int) -> Line:
    plain, drafting = engines
    said = {key: engine.generate(prompts, TOKENS) for key, engine in engines.items()}
    if said[plain] != said[drafting]:
        raise AssertionError(f"{name}: drafts have changed the tokens")
    before = engines[drafting].drafts()
    spent = decoding(engines, prompts, 3 * turns, TOKENS)
    drafted, right = (after - was for after, was in zip(engines[drafting].drafts(), before, strict=True))
    rate = {key: len(prompts) * TOKENS / one.wall_s for key, one in spent.items()}
    luck = "" if drafting == "ngram" else f", {right / max(1, drafted):.0%} right"
    ratio = spent[plain].cpu_s / spent[drafting].cpu_s
    return Line(f"drafts on, {name}{luck}", "tok/s", rate[drafting], rate[plain], ratio, want)
