"""Prefill and decode of one checkpoint, ours beside theirs, in turns; the least time of each counts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from benchmarks.engine.contestants import Contestant, Ours, Prompts, Spent, Theirs, timed
from benchmarks.engine.models import Subject
from benchmarks.engine.report import Line
from omni_kernels.bench.timing import Machine, least

PROMPT = 64
DECODED = 48
PREFILL = 512


def prompts_of(subject: Subject, count: int, length: int, seed: int = 0) -> Prompts:
    chance = random.Random(seed)
    return [[chance.randrange(2, subject.vocab) for _ in range(length)] for _ in range(count)]


def measure(subject: Subject, turns: int) -> Iterator[Line]:
    """Lines of the table; the limit is measured in between."""
    ours = Ours(subject)
    is_demo = "demo" in subject.name
    try:
        both: dict[str, Contestant] = {"ours": ours, "transformers": Theirs(subject)}
        for batch, want in ((1, 8.0), (8, 20.0)) if is_demo else ((1, 2.0), (8, 3.0)):
            yield _decode(subject, both, batch, turns, want)
        if not is_demo:
            yield _bound(subject, ours, turns)
        yield _prefill(subject, both, turns, 2.0 if is_demo else None)
    finally:
        ours.stop()


def _decode(subject: Subject, both: Mapping[str, Contestant], batch: int, turns: int, want: float) -> Line:
    prompts = prompts_of(subject, batch, PROMPT)
    spent = decoding(both, prompts, turns)
    rate = {name: batch * DECODED / s.wall_s for name, s in spent.items()}
    return _line(f"{subject.name}: decode, batch {batch}", rate, spent, want)


def _prefill(subject: Subject, both: Mapping[str, Contestant], turns: int, want: float | None) -> Line:
    prompts = prompts_of(subject, 1, PREFILL)
    spent = in_turns(both, prompts, 1, 2 * turns)
    rate = {name: PREFILL / s.wall_s for name, s in spent.items()}
    return _line(f"{subject.name}: prefill of {PREFILL}", rate, spent, want)


def decoding(contestants: Mapping[str, Contestant], prompts: Prompts, turns: int) -> dict[str, Spent]:
    """Time of `DECODED` tokens after the first."""
    first = in_turns(contestants, prompts, 1, turns)
    whole = in_turns(contestants, prompts, DECODED + 1, turns)
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


def _line(what: str, rate: Mapping[str, float], spent: Mapping[str, Spent], want: float | None) -> Line:
    ratio = spent["transformers"].cpu_s / spent["ours"].cpu_s
    return Line(what, "tok/s", rate["ours"], rate["transformers"], ratio, want)


def _bound(subject: Subject, ours: Ours, turns: int) -> Line:
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
    what = f"{subject.name}: decode, batch 1, of the bandwidth bound"
    return Line(what, "tok/s", 1 / step_s, bound, 1 / step_s / bound, 0.75)
