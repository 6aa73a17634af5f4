"""Drafts of the next tokens, from what the sequence has said before; and how long they should be. Pure.

The text itself is the draft model (prompt lookup, Saxena 2023): where the last tokens occurred before, what followed
then is likely to follow now. A draft is checked in one step of several rows: a row that is right gives its token for
less than a step of its own, one that is wrong costs its share of the step for nothing. So a draft is as long as its
last token is likely to be worth its row, and on text that never repeats there is soon none.

Draws are counted by seed and place, so a checked token is the one that would have been drawn without a draft.

Where steps share a call, the call drafts by itself (`drafts.h` of `omni_kernels`): to the bit as is said here.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from omni_proxy.workers.engine.sequence import Sequence

GRAM: Final = 3
"""Tokens that must occur again."""
HOPE: Final = 0.7
"""Share of right tokens that a sequence begins with."""
_LEARN: Final = 0.25
_LATEST: Final = 9
_FIRST_PAUSE: Final = 16
_LONGEST_PAUSE: Final = 128


class GramIndex:
    """Where each run of `GRAM` tokens of one sequence occurred last, followed by something."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._known = GRAM
        """Runs that end before this place are in the index."""

    def continuation(self, tokens: Seq[int], count: int) -> tuple[int, ...]:
        """What followed the last tokens before, up to `count` tokens; a loop is followed round and round."""
        for end in range(self._known, len(tokens)):
            self._after[tuple(tokens[end - GRAM : end])] = end
        self._known = max(self._known, len(tokens))
        start = self._after.get(tuple(tokens[-GRAM:])) if len(tokens) >= GRAM else None
        if start is None:
            return ()
        period = len(tokens) - start
        return tuple(tokens[start + at % period] for at in range(count))


class RowCosts:
    """What a row more costs beside what a step gives, learned from the steps. Seconds in, a share out.

    Medians of the latest: a step that took long because the machine was elsewhere says nothing. Steps that share a call
    are shorter than those with calls of their own; a row more is the same to both.
    """

    def __init__(self) -> None:
        self._plain: dict[tuple[int, bool], deque[float]] = {}
        """Seconds of steps of so many sequences without drafts, by whether they shared a call."""
        self._row: dict[int, deque[float]] = {}
        """Seconds that each row of drafts added."""
        self._shares: dict[tuple[int, bool], float] = {}
        """Known until the next step is seen: a median is dear beside a short step."""

    def observe(self, sequences: int, draft_rows: int, seconds: float, shared: bool = False, steps: int = 1) -> None:
        """Steps that only decode have taken `seconds`, `draft_rows` drafted rows in all."""
        self._shares.clear()
        if draft_rows == 0:
            self._plain.setdefault((sequences, shared), deque(maxlen=_LATEST)).append(seconds / steps)
        elif plain := self._plain_s(sequences, shared):
            rows = self._row.setdefault(sequences, deque(maxlen=_LATEST))
            rows.append((seconds - steps * plain) / draft_rows)

    def share(self, sequences: int, shared: bool = False) -> float:
        """Cost of a row more, in tokens that its time would give without drafts."""
        key = sequences, shared
        if key not in self._shares:
            plain, row = self._plain_s(*key), self._row.get(sequences)
            known = plain and row
            self._shares[key] = min(1.0, max(0.05, median(row) * sequences / plain)) if row and known else 0.3
        return self._shares[key]

    def _plain_s(self, sequences: int, shared: bool) -> float:
        """Seconds of a step as it is without drafts; 0: not known."""
        seen = self._plain.get((sequences, shared))
        return max(1e-9, median(seen)) if seen else 0.0


def gain(rate: float, length: int, share: float) -> float:
    """Tokens that a draft is likely to give, less those that its time would give without it."""
    total, chance = 0.0, 1.0
    for _ in range(length):
        chance *= rate
        total += chance
    return total - length * share


@dataclass(frozen=True, slots=True)
class Policy:
    """How drafts of a batch are made."""

    longest: int
    share: float = 0.3
    """What a row more costs, in tokens."""
    gram: int = GRAM
    learn: float = _LEARN
    first_pause: int = _FIRST_PAUSE
    longest_pause: int = _LONGEST_PAUSE


@dataclass(slots=True)
class Luck:
    """How drafts of one sequence have fared."""

    rate: float = HOPE
    pause: int = 0
    """Length of the last pause; 0: drafts pay."""
    resumes_at: int = 0
    """Length of the sequence at which the next draft may be made."""
    index: GramIndex = field(default_factory=GramIndex)
    text: array[int] = field(default_factory=lambda: array("i"))
    """The sequence's tokens as calls of several steps want them."""

    def propose(self, policy: Policy, tokens: Seq[int], most: int) -> tuple[int, ...]:
        """At most `most` tokens that may follow."""
        left = min(policy.longest, most)
        if left < 1 or len(tokens) < self.resumes_at:
            return ()
        return self.index.continuation(tokens, min(left, self._length(policy)))

    def learn(self, policy: Policy, length: int, drafted: int, right: int) -> None:
        """A draft of `drafted` tokens after `length` had its first `right` ones right.

        While drafts do not pay there are pauses with one token tried between them: each twice as long as the last where
        that was wrong, half as long where it was right.
        """
        for _ in range(right):
            self.rate += policy.learn * (1.0 - self.rate)
        if right < drafted:
            self.rate -= policy.learn * self.rate
        if gain(self.rate, self._length(policy), policy.share) > 0.0:
            self.pause = 0
        elif right == drafted:
            self.pause //= 2
        else:
            self.pause = min(policy.longest_pause, max(policy.first_pause, 2 * self.pause))
        self.resumes_at = length + self.pause

    def _length(self, policy: Policy) -> int:
        """The last token's chance to be right, and all before it, is worth its row; one is tried in any case."""
        length, chance = 1, self.rate * self.rate
        while length < policy.longest and chance >= policy.share:
            length += 1
            chance *= self.rate
        return length


class Drafter:
    """Makes drafts for all sequences of an engine."""

    def __init__(self, longest: int, max_model_len: int) -> None:
        self.costs: Final = RowCosts()
        self._longest = longest
        self._max_model_len = max_model_len
        self._lucks: dict[str, Luck] = {}

    def propose(self, seq: Sequence, sequences: int, most: int) -> tuple[int, ...]:
        """Tokens that may follow; `sequences` are in the step, `most` rows are to be had."""
        left = min(most, self.room(seq) - 1)
        return self.luck(seq).propose(self.policy(sequences), seq.tokens, left) if left > 0 else ()

    def checked(self, seq: Sequence, sequences: int, drafted: int, right: int) -> None:
        """A draft of `drafted` tokens, in a step of `sequences`, had its first `right` ones right."""
        luck = self._lucks.get(seq.request_id)
        if luck is not None:
            luck.learn(self.policy(sequences), len(seq.tokens), drafted, right)

    def policy(self, sequences: int, shared: bool = False) -> Policy:
        """For steps of so many sequences, that share a call or do not."""
        return Policy(self._longest, self.costs.share(sequences, shared))

    def luck(self, seq: Sequence) -> Luck:
        """That of a sequence, from its first draft on."""
        luck = self._lucks.get(seq.request_id)
        if luck is None:
            luck = self._lucks[seq.request_id] = Luck()
        return luck

    def room(self, seq: Sequence) -> int:
        """Tokens that a sequence may still get."""
        return min(seq.request.sampling.max_tokens - seq.num_generated, self._max_model_len - len(seq.tokens))

    def reach(self, seq: Sequence, steps: int) -> int:
        """Tokens that so many steps may give."""
        return min(self.room(seq), steps if self.rests(seq, steps) else steps * (1 + self._longest))

    def rests(self, seq: Sequence, steps: int) -> bool:
        """No draft is made in so many steps."""
        return len(seq.tokens) + steps <= self.luck(seq).resumes_at

    def took(self, drafts: Seq[tuple[int, ...]], seconds: float) -> None:
        """A step that only decodes, with these drafts, has taken so long."""
        self.costs.observe(len(drafts), sum(map(len, drafts)), seconds)

    def rate(self, request_id: str) -> float:
        """The share of a sequence's drafted tokens that has been right of late."""
        luck = self._lucks.get(request_id)
        return HOPE if luck is None else luck.rate

    def forget(self, request_id: str) -> None:
        """A sequence has ended."""
        self._lucks.pop(request_id, None)
