"""Decoding with drafts beside decoding without: the same tokens, in less time where text repeats."""

from __future__ import annotations

from benchmarks.engine.contestants import Ours, Prompts
from benchmarks.engine.generating import in_turns
from benchmarks.engine.models import Subject
from benchmarks.engine.report import Line
from omni_proxy.workers.engine.text import ModelTokenizer

TOKENS = 160


def measure(subject: Subject, turns: int) -> list[Line]:
    """Texts that repeat, that are asked to be repeated, and that never repeat."""
    tokenizer = ModelTokenizer.load(subject.folder)
    story = "the fox ran over the hill and met a bear who liked honey. "
    texts = {
        "repeated text": (tokenizer.encode(story * 12, False), 1.3),
        "a free story": (_chat(tokenizer, "Tell me a story about a fox."), 0.95),
        "a list of what things are for": (_chat(tokenizer, "What is a spoon for?"), 0.95),
    }
    engines = {"off": Ours(subject, "off"), "ngram": Ours(subject, "ngram")}
    try:
        return [_compare(name, engines, [tokens], want, turns) for name, (tokens, want) in texts.items()]
    finally:
        for engine in engines.values():
            engine.stop()


def _chat(tokenizer: ModelTokenizer, text: str) -> list[int]:
    return tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", False)


def _compare(name: str, engines: dict[str, Ours], prompts: Prompts, want: float, turns: int) -> Line:
    said = {key: engine.generate(prompts, TOKENS) for key, engine in engines.items()}
    if said["off"] != said["ngram"]:
        raise AssertionError(f"{name}: drafts have changed the tokens")
    spent = in_turns(engines, prompts, TOKENS, 3 * turns)
    rate = {key: TOKENS / one.wall_s for key, one in spent.items()}
    return Line(
        f"drafts on, {name}", "tok/s", rate["ngram"], rate["off"], spent["off"].cpu_s / spent["ngram"].cpu_s, want
    )
