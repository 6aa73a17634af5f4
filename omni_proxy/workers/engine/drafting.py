"""Who makes drafts in an engine, and what it learns from a step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from omni_proxy.workers.engine.counters import Counters
from omni_proxy.workers.engine.head_drafts import GUESS, HeadDrafter
from omni_proxy.workers.engine.planner import Chunk, Drafts
from omni_proxy.workers.engine.sequence import Sequence as EngineSequence
from omni_proxy.workers.engine.speculation import Drafter, RowCosts
from omni_proxy.workers.engine.types import EngineConfig


class LearningDrafts(Drafts, Protocol):
    """Proposes drafts, and hears how they fared."""

    def took(self, drafts: Sequence[tuple[int, ...]], seconds: float) -> None: ...
    def checked(self, seq: EngineSequence, sequences: int, drafted: int, right: int) -> None: ...
    def forget(self, request_id: str) -> None: ...


class BurstTimes(Protocol):
    """CPU time of steps that shared a call, without and with drafts."""

    @property
    def plain_steps(self) -> int: ...
    @property
    def plain_s(self) -> float: ...
    @property
    def drafted_steps(self) -> int: ...
    @property
    def drafted_s(self) -> float: ...
    @property
    def draft_rows(self) -> int: ...


def drafter_of(config: EngineConfig, max_model_len: int) -> LearningDrafts | None:
    """The drafter that a config asks for."""
    if config.speculation == "off":
        return None
    texts = Drafter(config.speculative_tokens, max_model_len)
    return HeadDrafter(texts, config.speculative_tokens, max_model_len) if config.speculation == "head" else texts


def learn(
    drafter: LearningDrafts, counters: Counters, chunks: Sequence[Chunk], tokens: Sequence[int], seconds: float
) -> None:
    """A step gave each of `chunks` so many `tokens`: what drafts cost and how often they were right."""
    if all(chunk.count == 1 for chunk in chunks):
        drafter.took([chunk.draft for chunk in chunks], seconds)
    decoding = sum(chunk.count == 1 for chunk in chunks)
    for chunk, drawn in zip(chunks, tokens, strict=True):
        if chunk.draft:
            drafter.checked(chunk.seq, decoding, len(chunk.draft), drawn - 1)
            counters.drafted(len(chunk.draft), drawn - 1, guessed=chunk.draft[0] == GUESS)


def learn_burst(costs: RowCosts, sequences: int, took: BurstTimes) -> None:
    """What steps that shared a call have taken, drafts among them or not."""
    if took.plain_steps:
        costs.observe(sequences, 0, took.plain_s, shared=True, steps=took.plain_steps)
    if took.draft_rows:
        costs.observe(sequences, took.draft_rows, took.drafted_s, shared=True, steps=took.drafted_steps)


def count_burst(counters: Counters, fared: Sequence[tuple[int, int]], taken: int) -> None:
    """Count a sequence's drafts of a call of several steps: those after the last token that was taken are none."""
    if not any(drafted for drafted, _ in fared):
        return
    place = 0
    for drafted, right in fared:
        if place < taken and drafted:
            counters.drafted(drafted, right, guessed=False)
        place += right + 1
