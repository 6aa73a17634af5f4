"""What rounding does to answers: at how many places of float32's own answers another type would say the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from benchmarks.engine.contestants import Ours, Prompts
from benchmarks.engine.generating import OURS
from benchmarks.engine.models import Subject
from benchmarks.engine.report import Line
from omni_proxy.workers.engine.text import ModelTokenizer

ANSWER: Final = 64
_ASKED: Final = (
    "fox",
    "bear",
    "girl",
    "boy",
    "bee",
    "dog",
    "bird",
    "king",
    "sea",
    "moon",
    "boat",
    "spoon",
    "house",
    "tree",
)


def measure(subject: Subject) -> Iterator[Line]:
    """Each of ours beside float32."""
    tokenizer = ModelTokenizer.load(subject.folder)
    prompts = [_chat(tokenizer, f"Tell me a story about a {what}.") for what in _ASKED]
    answers = _answers(subject, prompts)
    for label, (dtype, quantization) in OURS.items():
        if label:
            other = Ours(subject.folder, dtype=dtype, quantization=quantization)
            yield _line(label.removeprefix(", "), other, prompts, answers)


def _answers(subject: Subject, prompts: Prompts) -> Prompts:
    exact = Ours(subject.folder)
    try:
        return exact.generate(prompts, ANSWER)
    finally:
        exact.stop()


def _line(label: str, ours: Ours, prompts: Prompts, answers: Prompts) -> Line:
    try:
        ranks = [rank for pair in zip(prompts, answers, strict=True) for rank in ours.ranks(*pair)]
    finally:
        ours.stop()
    share = sum(rank == 1 for rank in ranks) / len(ranks)
    return Line(f"tokens of float32's {len(ranks)} that {label} says as well", "share", share)


def _chat(tokenizer: ModelTokenizer, text: str) -> list[int]:
    return tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", False)
