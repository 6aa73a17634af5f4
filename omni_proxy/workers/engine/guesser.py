"""Runs a draft head beside the model: keeps its part of the cache right, and guesses where a plan asks for it.

```
tokens            | 0 ............................ n |     n + 1 are known, the last is not computed
model's cache     | 0 ......................... n - 1 |
hidden states     |              | at .......... n - 1 |   waiting: rows of the head that were not run yet
head's cache      | 0 .... at - 1 |
```
A row of the head at place `i` needs the model's hidden state there and token `i + 1`. Rows wait until a guess needs
them, or until others may see what they lie in: a prompt's KV that is handed over, a block that is full. Where others
may see a block already (prefix hits, pulled prompts) its rows stay as they came. What the head computes decides how
fast tokens come, never which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import omni_kernels as ops
from omni_proxy.workers.engine.attention import Places, Rows
from omni_proxy.workers.engine.draft_head import DraftHead
from omni_proxy.workers.engine.head_drafts import GUESS
from omni_proxy.workers.engine.planner import Chunk
from omni_proxy.workers.engine.sampler import Drawn
from omni_proxy.workers.engine.sequence import Sequence as EngineSequence


@dataclass(slots=True)
class _Waiting:
    """Hidden states of a sequence whose rows the head has not run, or must run again to guess."""

    at: int
    """Place of the first."""
    own_from: int
    """Places before are in blocks that others may see."""
    states: list[Tensor] = field(default_factory=list)

    @property
    def until(self) -> int:
        return self.at + sum(len(part) for part in self.states)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one sequence for the head: places `at ..`, their hidden states, and the tokens after them."""

    blocks: Sequence[int]
    at: int
    own_from: int
    states: Tensor
    tokens: Sequence[int]

    @property
    def until(self) -> int:
        return self.at + len(self.tokens)

    def part(self, first: int, stop: int) -> _Rows:
        """Rows `first .. stop` of these."""
        return replace(self, at=self.at + first, states=self.states[first:stop], tokens=self.tokens[first:stop])


class Guesser:
    """The head and, for each sequence, the hidden states that it has not read. `cache` is the head's layer."""

    def __init__(self, head: DraftHead, block_size: int, spare_slot: int) -> None:
        self._head = head
        self._size = block_size
        self._spare_slot = spare_slot
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        """Sequences that are followed."""
        return len(self._waiting)

    def forget(self, request_id: str) -> None:
        """A sequence has ended or lost its blocks."""
        self._waiting.pop(request_id, None)

    def guess(self, chunks: Sequence[Chunk], cache: Tensor) -> Sequence[Chunk]:
        """Fill in the tokens of drafts that are to be guessed."""
        wanted = [chunk for chunk in chunks if is_guess(chunk)]
        if not wanted:
            return chunks
        ready = [chunk for chunk in wanted if self._is_ready(chunk)]
        found = self._guessed(ready, cache) if ready else {}
        return [replace(chunk, draft=_filled(chunk, found)) if is_guess(chunk) else chunk for chunk in chunks]

    def follow(self, chunks: Sequence[Chunk], drawn: Sequence[Sequence[Drawn]], hidden: Tensor, cache: Tensor) -> None:
        """The chunks are computed, `hidden` has their rows: write the head's rows that others may soon look for."""
        due: list[_Rows] = []
        row = 0
        for chunk, tokens in zip(chunks, drawn, strict=True):
            valid = chunk.count + max(0, len(tokens) - 1)
            waiting = self._keep(chunk, hidden[row : row + valid])
            row += chunk.rows
            if self._is_due(chunk, waiting):
                due.append(_rows(chunk.seq, waiting, [*chunk.seq.tokens, *(one.token_id for one in tokens)]))
                waiting.at, waiting.states = waiting.until - 1, [due[-1].states[-1:]]
            waiting.states[-1] = waiting.states[-1].clone()  # not the whole step's
        if due:
            self._write(due, cache)

    def _keep(self, chunk: Chunk, states: Tensor) -> _Waiting:
        seq = chunk.seq
        waiting = self._waiting.get(seq.request_id)
        if waiting is None or waiting.until != chunk.start:
            waiting = self._waiting[seq.request_id] = _Waiting(chunk.start, seq.kv_len)
        waiting.states.append(states)
        return waiting

    def _is_due(self, chunk: Chunk, waiting: _Waiting) -> bool:
        """A prompt's rows, those that have just been computed again for their logits, and those that fill a block."""
        again = chunk.count > 1 or chunk.start < max(chunk.seq.prompt_len, waiting.own_from)
        return again or waiting.until // self._size > waiting.at // self._size

    def _is_ready(self, chunk: Chunk) -> bool:
        waiting = self._waiting.get(chunk.seq.request_id)
        return waiting is not None and bool(waiting.states) and waiting.until == chunk.start

    def _guessed(self, chunks: Sequence[Chunk], cache: Tensor) -> dict[str, tuple[int, ...]]:
        """Guess on and on; each guess is the next row's token, and the state behind it stands for a hidden state."""
        states = self._caught_up(chunks, cache)
        tokens: list[list[int]] = [[] for _ in chunks]
        live = list(range(len(chunks)))
        while True:
            best: list[int] = self._head.logits(states).argmax(-1).tolist()
            for nth, token in zip(live, best, strict=True):
                tokens[nth].append(token)
            going = [at for at, nth in enumerate(live) if len(tokens[nth]) < len(chunks[nth].draft)]
            live = [live[at] for at in going]
            if not live:
                return {chunk.seq.request_id: tuple(said) for chunk, said in zip(chunks, tokens, strict=True)}
            ahead = [_ahead(chunks[nth], tokens[nth], states[at]) for at, nth in zip(going, live, strict=True)]
            states = self._compute(ahead, cache)

    def _caught_up(self, chunks: Sequence[Chunk], cache: Tensor) -> Tensor:
        """Run the rows that wait; the state of each sequence's last."""
        rows = []
        for chunk in chunks:
            waiting = self._waiting[chunk.seq.request_id]
            rows.append(_rows(chunk.seq, waiting, chunk.seq.tokens))
            waiting.at, waiting.states = waiting.until, []
        before = [one.part(0, len(one.tokens) - 1) for one in rows if len(one.tokens) > 1]
        if before:
            self._write(before, cache)
        return self._compute([one.part(len(one.tokens) - 1, len(one.tokens)) for one in rows], cache)

    def _write(self, rows: Sequence[_Rows], cache: Tensor) -> None:
        self._head.write(*_joined(rows), cache, self._places(rows))

    def _compute(self, rows: Sequence[_Rows], cache: Tensor) -> Tensor:
        """One row of each sequence."""
        blocks, keys = [one.blocks for one in rows], [one.until for one in rows]
        batch = ops.attention_batch([1] * len(rows), keys, blocks, self._size, self._head.dtype)
        return self._head(*_joined(rows), cache, Rows(self._places(rows), batch))

    def _places(self, rows: Sequence[_Rows]) -> Places:
        places = [place for one in rows for place in range(one.at, one.until)]
        slots = [slot for one in rows for slot in self._slots(one)]
        return self._head.places(torch.tensor(places), torch.tensor(slots))

    def _slots(self, rows: _Rows) -> Iterator[int]:
        for place in range(rows.at, rows.until):
            own = place >= rows.own_from
            yield rows.blocks[place // self._size] * self._size + place % self._size if own else self._spare_slot


def is_guess(chunk: Chunk) -> bool:
    """The head is to make this chunk's draft."""
    return chunk.draft[:1] == (GUESS,)


def _filled(chunk: Chunk, found: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Anything is a draft of a sequence that the head does not know yet: its rows are planned."""
    return found.get(chunk.seq.request_id, (chunk.seq.tokens[-1],) * len(chunk.draft))


def _rows(seq: EngineSequence, waiting: _Waiting, said: Sequence[int]) -> _Rows:
    tokens = said[waiting.at + 1 : waiting.until + 1]
    return _Rows(seq.blocks, waiting.at, waiting.own_from, torch.cat(waiting.states), tokens)


def _ahead(chunk: Chunk, guesses: Sequence[int], state: Tensor) -> _Rows:
    """The row whose token is the last guess."""
    return _Rows(chunk.seq.blocks, chunk.start + len(guesses) - 1, 0, state.unsqueeze(0), guesses[-1:])


def _joined(rows: Sequence[_Rows]) -> tuple[Tensor, Tensor]:
    """Hidden states and tokens of all."""
    return torch.cat([one.states for one in rows]), torch.tensor([token for one in rows for token in one.tokens])
