"""What the next step computes: continuous batching over paged blocks. Pure.

Decoding sequences come first, then prompts begun, then waiting requests, best (priority, arrival) first, all within
one token budget. A waiting request is admitted when its whole prompt has blocks, so a begun prompt always ends. When a
decoding sequence needs a block and none is free, the sequence admitted last gives all of its own back and waits again.
Requests wait for memory, they never die of it. Knows nothing of tensors, sockets or clocks.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Final, Protocol

from omni_proxy.workers.engine.blocks import BlockPool, CacheListener, Key
from omni_proxy.workers.engine.sequence import Phase, Sequence


@dataclass(slots=True)
class Chunk:
    """Tokens `start .. start + count` of one sequence, computed in one step.

    Nobody changes it; one that is frozen takes seven times as long to make, for every sequence in every step.
    """

    seq: Sequence
    start: int
    count: int
    samples: bool
    """The chunk reaches the last token: a new one is drawn."""
    draft: tuple[int, ...] = ()
    """Tokens that may follow: computed in the same step, kept as far as they are what would have been drawn."""

    @property
    def rows(self) -> int:
        return self.count + len(self.draft)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. Chunks of a single row come first."""

    chunks: tuple[Chunk, ...] = ()
    pulls: tuple[Sequence, ...] = ()
    """Decode legs that have just got blocks and now wait for their KV."""
    admitted: tuple[Sequence, ...] = ()
    preempted: tuple[Sequence, ...] = ()
    steps: int = 1
    """So often, at most, the chunks are computed, each time with what was drawn before; if more than once, they are
    single rows, and drafts are found in between, of `draft_rows` in each step."""
    draft_rows: int = 0


MOST_SCORED: Final = 256
"""Prompt tokens scored in a step: each needs a row of logits."""


def _chunk(seq: Sequence, budget: int) -> Chunk:
    count = min(seq.pending, budget, MOST_SCORED if seq.wants_scores else budget)
    return Chunk(seq, seq.start, count, count == seq.pending)


def _waiting_order(seq: Sequence) -> tuple[int, int]:
    return (seq.request.priority, seq.arrival)


def _running_order(seq: Sequence) -> tuple[int, int]:
    return (seq.request.priority, seq.admitted)


class Drafts(Protocol):
    """Guesses what a decoding sequence says next."""

    def propose(self, seq: Sequence, sequences: int, most: int) -> tuple[int, ...]:
        """At most `most` tokens, in a step that decodes `sequences`."""
        ...

    def reach(self, seq: Sequence, steps: int) -> int:
        """Tokens that a sequence may get from so many steps that share a call, drafts among them."""
        ...


class Steps(Protocol):
    """Says how many steps one call takes."""

    def steps(self, sequences: list[Sequence]) -> int:
        """For a batch that only decodes and nobody waits for."""
        ...


class Planner:
    """Owns the sequences from `add` to `remove`, and moves blocks between them and the pool.

    Lower `priority` goes first. Between `plan` and the `advance` of each of its chunks nothing else may be planned.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        drafter: Drafts | None = None,
        bursts: Steps | None = None,
    ) -> None:
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs {max_num_seqs} must lie in 1..{max_num_batched_tokens} (max_num_batched_tokens)"
            )
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_tokens = max_num_batched_tokens
        self._drafter = drafter
        self._bursts = bursts
        self._live: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        """In order of (priority, admission); pulling sequences are not in it."""
        self._num_pulling = 0
        self._arrivals = 0
        self._admissions = 0

    # -- readings

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks, pulling ones included."""
        return len(self._running) + self._num_pulling

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def get(self, request_id: str) -> Sequence | None:
        return self._live.get(request_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._live.values()))

    # -- arrivals and ends

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. The caller has made sure that it fits the pool when alone."""
        assert seq.request_id not in self._live
        assert seq.phase is Phase.WAITING
        self._arrivals += 1
        seq.arrival = self._arrivals
        self._live[seq.request_id] = seq
        insort(self._waiting, seq, key=_waiting_order)

    def remove(self, request_id: str, pin_prompt: bool = False) -> Sequence | None:
        """End a sequence in whatever phase it is; its blocks are freed, those of the prompt pinned if asked."""
        seq = self._live.pop(request_id, None)
        if seq is None:
            return None
        self._leave(seq)
        kept = seq.blocks_for(seq.prompt_len) if pin_prompt else 0
        if pin_prompt:
            self._pool.pin(request_id, seq.blocks[:kept])
        self._pool.free(seq.blocks[kept:])
        seq.blocks = seq.blocks[:kept]
        seq.phase = Phase.FINISHED
        return seq

    # -- pulls

    def pull_finished(self, request_id: str) -> None:
        """All KV of the pulled tokens lies in the sequence's blocks: it joins the batch."""
        seq = self._end_pull(request_id)
        seq.kv_len = max(seq.kv_len, seq.pulled_tokens)
        seq.cached_tokens = seq.start
        self._publish(seq)

    def pull_failed(self, request_id: str) -> None:
        """Compute the prompt here instead, into the blocks that waited for the KV."""
        self._end_pull(request_id)

    # -- steps

    def plan(self) -> Plan:
        """Choose the next step's chunks; allocates, admits and preempts as needed."""
        preempted: list[Sequence] = []
        decodes, budget = self._plan_decodes(self._max_tokens, preempted)
        prompts, budget = self._plan_prompts(budget)
        admitted = [] if preempted else self._admit_waiting(budget)
        for seq in admitted:
            if seq.phase is Phase.RUNNING and budget > 0:
                prompts.append(_chunk(seq, budget))
                budget -= prompts[-1].count
        alone = not (prompts or admitted or preempted or self._waiting or self._num_pulling)
        steps = self._steps(self._bursts, decodes) if alone and decodes and self._bursts is not None else 1
        if self._drafter is not None and steps == 1:
            decodes = self._add_drafts(self._drafter, decodes, budget)
        chunks = sorted((*decodes, *prompts), key=lambda chunk: chunk.rows != 1)
        pulls = tuple(seq for seq in admitted if seq.phase is Phase.PULLING)
        return Plan(tuple(chunks), pulls, tuple(admitted), tuple(preempted), steps, budget if steps > 1 else 0)

    def advance(self, chunk: Chunk, token: int | None) -> None:
        """The chunk has been computed: its KV is valid, and `token` was drawn if it samples."""
        seq = chunk.seq
        seq.kv_len = max(seq.kv_len, chunk.start + chunk.count)
        self._publish(seq)
        if token is not None:
            seq.tokens.append(token)

    def confirm(self, seq: Sequence, token: int) -> None:
        """The last token was drafted, and so its KV is valid; `token` was drawn after it."""
        seq.kv_len = len(seq.tokens)
        self._publish(seq)
        seq.tokens.append(token)

    def check(self) -> None:
        """Assert that sequences, phases and blocks agree."""
        self._pool.check(seq.blocks for seq in self._live.values())
        phases = [seq.phase for seq in self._live.values()]
        assert phases.count(Phase.WAITING) == len(self._waiting)
        assert phases.count(Phase.RUNNING) == len(self._running)
        assert phases.count(Phase.PULLING) == self._num_pulling
        assert Phase.FINISHED not in phases
        assert self.num_running <= self._max_num_seqs
        for seq in self._live.values():
            assert (seq.phase is Phase.WAITING) == (not seq.blocks), seq.request_id
            assert seq.kv_len <= len(seq.blocks) * seq.block_size

    # -- inside a step

    def _plan_decodes(self, budget: int, preempted: list[Sequence]) -> tuple[list[Chunk], int]:
        """One token for each decoding sequence, best first; a victim is never one that is planned already."""
        chunks: list[Chunk] = []
        for seq in list(self._running):
            if seq.phase is not Phase.RUNNING or seq.pending != 1 or budget == 0:
                continue
            if self._grow(seq, preempted):
                chunks.append(Chunk(seq, seq.start, 1, samples=True))
                budget -= 1
        return chunks, budget

    def _add_drafts(self, drafter: Drafts, decodes: list[Chunk], budget: int) -> list[Chunk]:
        """Drafts for what decodes, of the budget that is left and in blocks that nobody needs."""
        chunks = []
        for chunk in decodes:
            # A structure's mask, and penalties for what was said, are known for the next token only.
            request = chunk.seq.request
            free = request.guide is None and not request.sampling.counts_tokens
            draft = drafter.propose(chunk.seq, len(decodes), budget) if free else ()
            budget -= len(draft)
            if draft and self._spare_blocks(chunk.seq, len(draft)):
                chunks.append(replace(chunk, draft=draft))
            else:
                chunks.append(chunk)
        return chunks

    def _steps(self, bursts: Steps, decodes: list[Chunk]) -> int:
        """Steps for what decodes, as far as blocks that nobody needs reach; drafts among them take what is left."""
        sequences = [chunk.seq for chunk in decodes]
        steps = bursts.steps(sequences)
        if steps == 1 or not all(self._spare_blocks(seq, steps - 1) for seq in sequences):
            return 1
        if self._drafter is not None:
            for seq in sequences:
                self._spare_blocks(seq, self._drafter.reach(seq, steps) - 1)
        return steps

    def _spare_blocks(self, seq: Sequence, more: int) -> bool:
        """Give `seq` blocks for `more` tokens than it has, if others are left one each."""
        missing = seq.blocks_for(len(seq.tokens) + more) - len(seq.blocks)
        if missing <= 0:
            return True
        if missing + len(self._running) > self._pool.num_free:
            return False
        seq.blocks.extend(self._pool.try_allocate(missing) or ())
        return True

    def _plan_prompts(self, budget: int) -> tuple[list[Chunk], int]:
        chunks: list[Chunk] = []
        for seq in self._running:
            if seq.pending > 1 and budget > 0:
                chunks.append(_chunk(seq, budget))
                budget -= chunks[-1].count
        return chunks, budget

    def _grow(self, seq: Sequence, preempted: list[Sequence]) -> bool:
        """Give `seq` blocks for all of its tokens, at others' cost if need be; False if it lost its own."""
        missing = seq.blocks_for(len(seq.tokens)) - len(seq.blocks)
        if missing <= 0:
            return True
        while (blocks := self._pool.try_allocate(missing)) is None:
            victim = self._running[-1]
            self._preempt(victim)
            preempted.append(victim)
            if victim is seq:
                return False
        seq.blocks.extend(blocks)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._leave(seq)
        self._pool.free(seq.blocks)
        seq.blocks = []
        seq.kv_len = seq.published = 0
        seq.phase = Phase.WAITING
        insort(self._waiting, seq, key=_waiting_order)

    def _admit_waiting(self, budget: int) -> list[Sequence]:
        """Admit in order until one does not fit: none overtakes, so none starves."""
        admitted: list[Sequence] = []
        while self._waiting and self.num_running < self._max_num_seqs:
            seq = self._waiting[0]
            if (budget <= 0 and not seq.wants_pull) or not self._admit(seq):
                break
            if seq.phase is Phase.RUNNING:
                budget -= seq.pending
            admitted.append(seq)
        return admitted

    def _admit(self, seq: Sequence) -> bool:
        """Take blocks for all tokens, as many as possible from the cache, leaving one to each runner."""
        held = [] if seq.wants_scores else self._pool.acquire_prefix(seq.keys(len(seq.tokens)))
        missing = seq.blocks_for(len(seq.tokens)) - len(held)
        spare = len(self._running)
        fresh = self._pool.try_allocate(missing) if missing + spare <= self._pool.num_free else None
        if fresh is None:
            self._pool.free(held)
            return False
        seq.blocks = held + fresh
        seq.kv_len = len(held) * seq.block_size
        seq.published = len(held)
        seq.admissions += 1
        if seq.admissions == 1:
            seq.cached_tokens = seq.start
        del self._waiting[0]
        self._admissions += 1
        seq.admitted = self._admissions
        self._enter(seq)
        return True

    def _enter(self, seq: Sequence) -> None:
        if seq.wants_pull:
            seq.phase = Phase.PULLING
            self._num_pulling += 1
        else:
            seq.phase = Phase.RUNNING
            insort(self._running, seq, key=_running_order)

    def _end_pull(self, request_id: str) -> Sequence:
        seq = self._live[request_id]
        assert seq.phase is Phase.PULLING
        self._num_pulling -= 1
        seq.pulled = True
        self._enter(seq)
        return seq

    def _leave(self, seq: Sequence) -> None:
        match seq.phase:
            case Phase.WAITING:
                self._waiting.remove(seq)
            case Phase.PULLING:
                self._num_pulling -= 1
            case Phase.RUNNING:
                self._running.remove(seq)
            case Phase.FINISHED:
                raise AssertionError(f"{seq.request_id} has ended already")

    def _publish(self, seq: Sequence) -> None:
        """Offer the blocks filled since the last time to the prefix cache."""
        full = seq.kv_len // seq.block_size
        if full <= seq.published:
            return
        keys = seq.keys(full * seq.block_size)
        new = [i for i in range(seq.published, full) if self._pool.publish(seq.blocks[i], keys[i])]
        seq.published = full
        if new and self._pool.listener is not None:
            _tell_stored(self._pool.listener, seq, keys, new)


def _tell_stored(listener: CacheListener, seq: Sequence, keys: Seq[Key], new: list[int]) -> None:
    """Report new blocks, those that follow one another together."""
    size, salt = seq.block_size, seq.request.cache_salt
    begin = new[0]
    for at, following in zip(new, [*new[1:], -1], strict=True):
        if following != at + 1:
            parent = keys[begin - 1] if begin else None
            tokens = seq.tokens[begin * size : (at + 1) * size]
            listener.stored(parent, keys[begin : at + 1], tokens, salt)
            begin = following
