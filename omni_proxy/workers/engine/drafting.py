"""Who makes drafts in an engine, and what it learns from a step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from omni_proxy.workers.engine.counters import Counters
from omni_proxy.workers.engine.head_drafts import GUESS, HeadDrafter
from omni_proxy.workers.engine.planner import Chunk, Drafts
from omni_proxy.workers.engine.sequence import Sequence as EngineSequence
from omni_proxy.workers.engine.speculation import Drafter
from omni_proxy.workers.engine.types import EngineConfig


class LearningDrafts(Drafts, Protocol):
    """Proposes drafts, and hears how they fared."""

    def took(self, drafts: Sequence[tuple[int, ...]], seconds: float, shared: bool = False) -> None: ...
    def checked(self, seq: EngineSequence, sequences: int, drafted: int, right: int) -> None: ...
    def forget(self, request_id: str) -> None: ...


def drafter_of(config: EngineConfig, max_model_len: int) -> LearningDrafts | None:
    """The drafter that a config asks for."""
    if config.speculation == "off":
        return None
    texts = Drafter(config.speculative_tokens, max_model_len)
    return HeadDrafter(texts, config.speculative_tokens, max_model_len) if config.speculation == "head" else texts


def learn(
    drafter: LearningDrafts,
    counters: Counters,
    chunks: Sequence[Chunk],
    tokens: Sequence[int],
    steps: int,
    seconds: float,
) -> None:
    """A call, `steps` steps of `chunks`, gave each so many `tokens`: what drafts cost and how often they were right."""
    if all(chunk.count == 1 for chunk in chunks):
        drafter.took([chunk.draft for chunk in chunks], seconds / steps, steps > 1)
    decoding = sum(chunk.count == 1 for chunk in chunks)
    for chunk, drawn in zip(chunks, tokens, strict=True):
        if chunk.draft:
            drafter.checked(chunk.seq, decoding, len(chunk.draft), drawn - 1)
            counters.drafted(len(chunk.draft), drawn - 1, guessed=chunk.draft[0] == GUESS)
