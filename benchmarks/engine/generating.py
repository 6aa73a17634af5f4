"""Prefill and decode of one checkpoint, ours beside theirs, in turns; the least time of each counts.

Each in float32 and in bfloat16, ours with weights (and rows) of 8 bits as well; beside all is the quicker of theirs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Final

import torch

from benchmarks.engine.contestants import Contestant, Ours, Prompts, Spent, Theirs, timed
from benchmarks.engine.models import Subject
from benchmarks.engine.report import Line
from omni_kernels.bench.timing import Machine, least

PROMPT = 64
DECODED = 48
PREFILL = 512
OURS: Final[dict[str, tuple[str, str | None]]] = {
    "": ("float32", None),
    ", bfloat16": ("bfloat16", None),
    ", bfloat16, int8": ("bfloat16", "int8"),
    ", bfloat16, w8a8": ("bfloat16", "w8a8"),
}
"""How our lines are named, and what they are of."""


def prompts_of(subject: Subject, count: int, length: int, seed: int = 0) -> Prompts:
    chance = random.Random(seed)
    return [[chance.randrange(2, subject.vocab) for _ in range(length)] for _ in range(count)]


def measure(subject: Subject, turns: int) -> Iterator[Line]:
    """Lines of the table; the limit is measured in between."""
    ours = {label: Ours(subject.folder, dtype=dtype, quantization=kind) for label, (dtype, kind) in OURS.items()}
    is_demo = "demo" in subject.name
    try:
        both: dict[str, Contestant] = {
            **ours,
            "transformers, float32": Theirs(subject, torch.float32),
            "transformers, bfloat16": Theirs(subject, torch.bfloat16),
        }
        for batch, want in ((1, 8.0), (8, 20.0)) if is_demo else ((1, 2.0), (8, 3.0)):
            yield from _decode(subject, both, batch, turns, want)
        if not is_demo:
            for label, (_, quantization) in OURS.items():
                if quantization is None:
                    yield _bound(subject, ours[label], label, turns)
        yield from _prefill(subject, both, turns, 2.0 if is_demo else None)
    finally:
        for one in ours.values():
            one.stop()


def _decode(subject: Subject, both: Mapping[str, Contestant], batch: int, turns: int, want: float) -> Iterator[Line]:
    spent = decoding(both, prompts_of(subject, batch, PROMPT), turns)
    return _lines(f"{subject.name}: decode, batch {batch}", batch * DECODED, spent, want)


def _prefill(subject: Subject, both: Mapping[str, Contestant], turns: int, want: float | None) -> Iterator[Line]:
    spent = in_turns(both, prompts_of(subject, 1, PREFILL), 1, 2 * turns)
    return _lines(f"{subject.name}: prefill of {PREFILL}", PREFILL, spent, want)


def decoding(
    contestants: Mapping[str, Contestant], prompts: Prompts, turns: int, tokens: int = DECODED
) -> dict[str, Spent]:
    """Time of so many tokens after the first."""
    first = in_turns(contestants, prompts, 1, turns)
    whole = in_turns(contestants, prompts, tokens + 1, turns)
    return {
        name: Spent(whole[name].wall_s - first[name].wall_s, whole[name].cpu_s - first[name].cpu_s)
        for name in contestants
    }


def in_turns(contestants: Mapping[str, Contestant], prompts: Prompts, tokens: int, turns: int) -> dict[str, Spent]:
    """The least of each over `turns` rounds, after one that is not counted."""
    spent: dict[str, list[Spent]] = {name: [] for name in contestants}
    for turn in range(turns + 1):
        for name, one in contestants.items():
            seen = timed(one, prompts, tokens)
            if turn:
                spent[name].append(seen)
    return {name: Spent(min(s.wall_s for s in x), min(s.cpu_s for s in x)) for name, x in spent.items()}


def _lines(what: str, tokens: int, spent: Mapping[str, Spent], want: float | None) -> Iterator[Line]:
    """Ours in each type, beside the quicker of theirs."""
    theirs = min((spent[name] for name in spent if name not in OURS), key=lambda one: one.cpu_s)
    for label in OURS:
        mine = spent[label]
        ratio = theirs.cpu_s / mine.cpu_s
        yield Line(what + label, "tok/s", tokens / mine.wall_s, tokens / theirs.wall_s, ratio, want)


def _bound(subject: Subject, ours: Ours, label: str, turns: int) -> Line:
    """Batch 1 against the time that reading the active weights takes, in turns.

    Of both the least decile: a whole answer takes longer than neighbours leave a machine alone.
    """
    machine = Machine()
    read = machine.runs()["limit: read"]
    steps: list[float] = []
    reads: list[float] = []
    for _ in range(3 * turns):
        ours.generate(prompts_of(subject, 1, PROMPT), DECODED + 1)
        steps += ours.gaps
        reads += [least({"read": read}, 1)["read"] for _ in range(3)]
    step_s, read_s = (sorted(x)[len(x) // 10] for x in (steps, reads))
    times = {**dict.fromkeys(machine.runs(), 1.0), "limit: read": read_s}
    bound = machine.limits(times).read_bytes_s / subject.active_bytes
    what = f"{subject.name}: decode, batch 1, of the bandwidth bound{label}"
    return Line(what, "tok/s", 1 / step_s, bound, 1 / step_s / bound, 0.75)
