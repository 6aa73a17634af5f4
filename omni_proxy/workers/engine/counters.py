"""The engine's own counts, and one reading of everything as `EngineStats`. Pure.

Written by the engine's thread only; a reading from another thread may be one step behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from omni_proxy.workers.engine.blocks import BlockPool
from omni_proxy.workers.engine.planner import Chunk, Plan, Planner
from omni_proxy.workers.engine.types import EngineInfo, EngineStats, FinishReason


@dataclass(slots=True)
class Counters:
    """All of them only rise."""

    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    prompt_tokens_pulled: int = 0
    pull_queries: int = 0
    """Prompt tokens whose KV was asked of another worker."""
    generation_tokens: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens found in it."""
    preemptions: int = 0
    spec_drafts: int = 0
    spec_draft_tokens: int = 0
    spec_accepted_tokens: int = 0
    spec_accepted_places: list[int] = field(default_factory=list)
    """Of the accepted tokens, those at each place of their draft."""
    spec_guessed_tokens: int = 0
    spec_guessed_accepted: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {r.value: 0 for r in FinishReason})

    def planned(self, plan: Plan) -> None:
        """Count what a plan decided. A preempted sequence's second look-up is not one of the prompt."""
        self.preemptions += len(plan.preempted)
        self.pull_queries += sum(max(0, seq.pulled_tokens - seq.kv_len) for seq in plan.pulls)
        for seq in plan.admitted:
            if seq.admissions == 1:
                self.prefix_queries += seq.prompt_len
                self.prefix_hits += seq.cached_tokens
                self.prompt_tokens_cached += seq.cached_tokens

    def drafted(self, tokens: int, right: int, guessed: bool) -> None:
        """Count a draft that was checked; `guessed`: the model's head has made it."""
        self.spec_drafts += 1
        self.spec_draft_tokens += tokens
        self.spec_accepted_tokens += right
        self.spec_accepted_places += [0] * (tokens - len(self.spec_accepted_places))
        for place in range(right):
            self.spec_accepted_places[place] += 1
        if guessed:
            self.spec_guessed_tokens += tokens
            self.spec_guessed_accepted += right

    def computed(self, chunk: Chunk, drew: int) -> None:
        """Count the chunk's prompt tokens, and the tokens that were drawn after it."""
        stop = min(chunk.start + chunk.count, chunk.seq.prompt_len)
        self.prompt_tokens_computed += max(0, stop - chunk.start)
        self.generation_tokens += drew

    def pulled(self, tokens: int) -> None:
        """Count the prompt tokens that a pull spared this engine to compute."""
        self.prompt_tokens_pulled += tokens

    def ended(self, reason: FinishReason) -> None:
        self.finished[reason.value] += 1


class TransferCounts(Protocol):
    """What the handoff's threads have counted."""

    @property
    def bytes_sent(self) -> int: ...
    @property
    def bytes_received(self) -> int: ...
    @property
    def completed(self) -> int: ...
    @property
    def failed(self) -> int: ...
    @property
    def leases_expired(self) -> int: ...
    @property
    def pushes(self) -> int: ...
    @property
    def push_hidden_s(self) -> float: ...
    @property
    def push_exposed_s(self) -> float: ...


def read_stats(
    info: EngineInfo,
    counters: Counters,
    planner: Planner,
    pool: BlockPool,
    transfers: TransferCounts,
    expert_tokens: tuple[tuple[int, ...], ...],
    expert_imbalance: tuple[float, ...] = (),
    experts_copied: int = 0,
) -> EngineStats:
    """One reading of all gauges and counters."""
    return EngineStats(
        running=planner.num_running,
        waiting=planner.num_waiting,
        blocks_total=info.num_blocks,
        blocks_used=pool.num_used,
        blocks_leased=pool.num_pinned,
        block_size=info.block_size,
        block_bytes=info.block_bytes,
        prompt_tokens_computed=counters.prompt_tokens_computed,
        prompt_tokens_cached=counters.prompt_tokens_cached,
        prompt_tokens_pulled=counters.prompt_tokens_pulled,
        generation_tokens=counters.generation_tokens,
        prefix_queries=counters.prefix_queries,
        prefix_hits=counters.prefix_hits,
        preemptions=counters.preemptions,
        pull_queries=counters.pull_queries,
        spec_drafts=counters.spec_drafts,
        spec_draft_tokens=counters.spec_draft_tokens,
        spec_accepted_tokens=counters.spec_accepted_tokens,
        spec_accepted_places=tuple(counters.spec_accepted_places),
        spec_guessed_tokens=counters.spec_guessed_tokens,
        spec_guessed_accepted=counters.spec_guessed_accepted,
        kv_bytes_sent=transfers.bytes_sent,
        kv_bytes_received=transfers.bytes_received,
        kv_transfers=transfers.completed,
        kv_transfer_failures=transfers.failed,
        kv_leases_expired=transfers.leases_expired,
        kv_pushes=transfers.pushes,
        kv_push_hidden_s=transfers.push_hidden_s,
        kv_push_exposed_s=transfers.push_exposed_s,
        requests_finished=dict(counters.finished),
        expert_tokens=expert_tokens,
        expert_imbalance=expert_imbalance,
        experts_copied=experts_copied,
    )
