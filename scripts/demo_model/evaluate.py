"""Examine a demo checkpoint: does it answer right, domain by domain, on conversations it has never seen?

    python -m scripts.demo_model.evaluate DIR [--count 40] [--json FILE]

The checkpoint is read by transformers, so that what is measured is what any engine would serve. Answers are greedy.
An answer counts if it ends by itself and contains every expected word; a story also has to keep to the names it began
with.
"""

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.demo_model import corpus, words
from scripts.demo_model.corpus import Conversation, Exchange, Message

HELD_OUT: Final = "held-out"
SAMPLES: Final = (
    "Hello",
    "Who are you?",
    "Tell me a story about a fox",
    "What is a spoon for?",
    "What is 7 + 5?",
    "What is the capital of France?",
    "Write a haiku",
    "Tom has a red ball. Mia has a blue cup. Who has the cup?",
)


@dataclass(frozen=True, slots=True)
class Item:
    """What has been said so far, and the exchange to be examined."""

    before: list[Message]
    exchange: Exchange


def items(count: int) -> list[Item]:
    """`count` examination items of every domain, each the last exchange of its conversation."""
    found: dict[str, list[Item]] = defaultdict(list)
    for conversation in islice(corpus.conversations(HELD_OUT), 100 * count):
        at = len(conversation.exchanges) - 1
        exchange = conversation.exchanges[at]
        if exchange.expect and len(found[exchange.domain]) < count:
            found[exchange.domain].append(Item(before(conversation, at), exchange))
    return [item for domain in sorted(found) for item in found[domain]]


def before(conversation: Conversation, at: int) -> list[Message]:
    cut = Conversation(conversation.system, conversation.exchanges[: at + 1])
    return cut.messages()[:-1]


def right(exchange: Exchange, answer: str) -> bool:
    """All expected words are there, and a story stays with the names that it introduces."""
    told = answer.lower()
    if not all(re.search(rf"(?<!\w){re.escape(word.lower())}(?!\w)", told) for word in exchange.expect):
        return False
    return exchange.domain != "story" or names_bound(answer)


def names_bound(story: str) -> bool:
    """Two people, not one twice, and every listed name is one of those that the first three sentences introduce."""
    if re.search(r"\b([A-Z]\w+) and \1\b", story):
        return False
    sentences = re.split(r"(?<=[.!?])\s", story)
    used = [set(re.findall(r"[A-Z][a-z]+", s)) & _NAMES for s in sentences]
    introduced = set().union(*used[:3])
    return len(introduced) <= 2 and set().union(*used) <= introduced


_NAMES: Final = frozenset(words.NAMES_HE + words.NAMES_SHE)


class Student:
    """A checkpoint that answers, several conversations at a time."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        load: Any = AutoModelForCausalLM
        self.model: Any = load.from_pretrained(folder, dtype=torch.float32)
        self.model.eval()
        self.end = self.tokenizer.eos_token

    @torch.inference_mode()
    def answer(self, asked: list[list[Message]], limit: int = 256, **how: Any) -> list[str]:
        """Answers in order; one that did not end by itself comes back with `…` at its end."""
        texts = [self.tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for m in asked]
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        answers = [""] * len(texts)
        for start in range(0, len(order), 32):
            batch = order[start : start + 32]
            inputs = self.tokenizer([texts[i] for i in batch], return_tensors="pt", padding=True)
            inputs.pop("token_type_ids", None)
            how = {"do_sample": False, "temperature": None, "top_p": None} | how
            out = self.model.generate(**inputs, max_new_tokens=limit, **how)
            said = self.tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :])
            for i, text in zip(batch, said, strict=True):
                body, end, _ = text.partition(self.end)
                answers[i] = body if end else body + "…"
        return answers

    @torch.inference_mode()
    def bits_per_char(self, conversations: Iterator[Conversation]) -> float:
        """Of the assistants' text, given all that stands before it."""
        nats, chars = 0.0, 0
        for conversation in conversations:
            messages = conversation.messages()
            for at in (i for i, m in enumerate(messages) if m["role"] == "assistant"):
                nats += self.surprise(messages[:at], messages[at]["content"])
                chars += len(messages[at]["content"])
        return nats / chars / 0.6931

    def surprise(self, said: list[Message], answer: str) -> float:
        prompt = self.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        head = self.tokenizer(prompt)["input_ids"]
        ids = torch.tensor([head + self.tokenizer(answer + self.end)["input_ids"]])
        logits = self.model(ids).logits[0, len(head) - 1 : -1]
        return float(F.cross_entropy(logits, ids[0, len(head) :], reduction="sum"))


def examine(folder: Path, count: int, text_count: int = 60) -> dict[str, Any]:
    """Accuracy of every domain, bits a character, and sample answers."""
    student = Student(folder)
    asked = items(count)
    answers = student.answer([item.before for item in asked])
    marks: dict[str, list[bool]] = defaultdict(list)
    wrong: dict[str, list[list[str]]] = defaultdict(list)
    for item, answer in zip(asked, answers, strict=True):
        ok = right(item.exchange, answer) and not answer.endswith("…")
        marks[item.exchange.domain].append(ok)
        if not ok:
            wrong[item.exchange.domain].append([item.before[-1]["content"], answer, item.exchange.assistant])
    said = student.answer([[{"role": "user", "content": text}] for text in SAMPLES])
    return {
        "accuracy": {domain: sum(m) / len(m) for domain, m in sorted(marks.items())},
        "count": {domain: len(m) for domain, m in sorted(marks.items())},
        "bits_per_char": student.bits_per_char(islice(corpus.conversations(HELD_OUT + "/text"), text_count)),
        "samples": dict(zip(SAMPLES, said, strict=True)),
        "wrong": {domain: texts[:5] for domain, texts in wrong.items()},
    }


def table(result: dict[str, Any]) -> str:
    lines = ["| domain | right | of |", "|---|---|---|"]
    lines += [f"| {d} | {share:.0%} | {result['count'][d]} |" for d, share in result["accuracy"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=40, help="items a domain")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    result = examine(args.folder, args.count)
    print(table(result))
    print(f"\nbits/char {result['bits_per_char']:.4f}\n")
    for asked, answer in result["samples"].items():
        print(f"> {asked}\n{answer}\n")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
