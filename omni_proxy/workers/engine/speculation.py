"""Drafts of the next tokens, from what the sequence has said before; and how long they should be. Pure.

The text itself is the draft model (prompt lookup, Saxena 2023): where the last tokens occurred before, what followed
then is likely to follow now. A draft is checked in one step of several rows: a row that is right gives its token for
less than a step of its own, one that is wrong costs its share of the step for nothing. So a draft is as long as its
last token is likely to be worth its row, and on text that never repeats there is soon none.

Draws are counted by seed and place, so a checked token is the one that would have been drawn without a draft.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from statistics import median
from typing import Final

from omni_proxy.workers.engine.sequence import Sequence

GRAM: Final = 3
"""Tokens that must occur again."""
HOPE: Final = 0.7
"""Share of right tokens that a sequence begins with."""
_LEARN: Final = 0.25
_LATEST: Final = 9
_FIRST_DRAFT: Final = 4
"""Length of a sequence's first: long enough to show that drafts pay where a step of its own costs much."""
_FIRST_PAUSE: Final = 16
_PROBE_TOKENS: Final = 20
"""So many tokens pass, at least, for each that a draft between pauses costs."""
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

    Medians of the latest: a step that took long because the machine was elsewhere says nothing.
    """

    def __init__(self) -> None:
        self._single: dict[int, deque[float]] = {}
        """Seconds of steps of so many sequences without drafts, each a call of its own."""
        self._shared: dict[int, deque[float]] = {}
        """The same where several shared a call."""
        self._row: dict[int, deque[float]] = {}
        """Seconds that each row of drafts added."""

    def observe(self, sequences: int, draft_rows: int, seconds: float, shared: bool = False) -> None:
        """A step that only decodes has taken `seconds`; `shared`: with others in one call."""
        single = self._single.setdefault(sequences, deque(maxlen=_LATEST))
        if shared:
            self._shared.setdefault(sequences, deque(maxlen=_LATEST)).append(seconds)
        elif draft_rows == 0:
            single.append(seconds)
        elif single:
            rows = self._row.setdefault(sequences, deque(maxlen=_LATEST))
            rows.append((seconds - median(single)) / draft_rows)

    def share(self, sequences: int) -> float:
        """Cost of a row more, in tokens that its time would give without drafts."""
        plain, row = self._plain(sequences), self._row.get(sequences)
        if not plain or not row:
            return 0.3
        return min(1.0, max(0.05, median(row) * sequences / plain))

    def overhead(self, sequences: int) -> float:
        """Cost of a call of its own, which a step with drafts takes, in tokens as above."""
        plain, single = self._plain(sequences), self._single.get(sequences)
        return max(0.0, median(single) / plain - 1.0) if plain and single else 0.0

    def _plain(self, sequences: int) -> float:
        """Seconds of a step as it is without drafts; 0: not known."""
        seen = self._shared.get(sequences) or self._single.get(sequences)
        return max(1e-9, median(seen)) if seen else 0.0


def gain(rate: float, length: int, share: float) -> float:
    """Tokens that a draft is likely to give, less those that its time would give without it."""
    return sum(rate**n for n in range(1, length + 1)) - length * share


@dataclass(slots=True)
class _Luck:
    """How drafts of one sequence have fared."""

    index: GramIndex
    rate: float = HOPE
    tried: bool = False
    pause: int = 0
    """Length of the last pause; 0: there was none since a success."""
    resumes_at: int = 0
    """Length of the sequence at which the next draft may be made."""


class Drafter:
    """Makes drafts for all sequences of an engine."""

    def __init__(self, longest: int, max_model_len: int) -> None:
        self.costs: Final = RowCosts()
        self._longest = longest
        self._max_model_len = max_model_len
        self._lucks: dict[str, _Luck] = {}

    def propose(self, seq: Sequence, sequences: int, most: int) -> tuple[int, ...]:
        """Tokens that may follow; `sequences` are in the step, `most` rows are to be had."""
        left = min(
            self._longest,
            most,
            seq.request.sampling.max_tokens - seq.num_generated - 1,
            self._max_model_len - len(seq.tokens) - 1,
        )
        if left < 1:
            return ()
        luck = self._lucks.get(seq.request_id)
        if luck is None:
            luck = self._lucks[seq.request_id] = _Luck(GramIndex())
        if len(seq.tokens) < luck.resumes_at:
            return ()
        length = self._length(luck, self.costs.share(sequences)) if luck.tried else min(_FIRST_DRAFT, self._longest)
        length = min(left, length)
        return luck.index.continuation(seq.tokens, length)

    def checked(self, seq: Sequence, sequences: int, drafted: int, right: int) -> None:
        """A draft of `drafted` tokens, in a step of `sequences`, had its first `right` ones right.

        While drafts do not pay there are pauses, each twice as long as the last, with one token tried between them.
        """
        luck = self._lucks.get(seq.request_id)
        if luck is None:
            return
        for _ in range(right):
            luck.rate += _LEARN * (1.0 - luck.rate)
        if right < drafted:
            luck.rate -= _LEARN * luck.rate
        share, overhead = self.costs.share(sequences), self.costs.overhead(sequences)
        luck.tried = True
        if right == drafted or gain(luck.rate, self._length(luck, share), share) > overhead:
            luck.pause = 0
        else:
            shortest = max(_FIRST_PAUSE, int(_PROBE_TOKENS * (overhead + share)))
            luck.pause = min(max(_LONGEST_PAUSE, shortest), max(shortest, 2 * luck.pause))
            luck.resumes_at = len(seq.tokens) + luck.pause

    def rest(self, seq: Sequence) -> int:
        """So many tokens go by before a draft is made again; 0: it may be at any time."""
        luck = self._lucks.get(seq.request_id)
        return 0 if luck is None else max(0, luck.resumes_at - len(seq.tokens))

    def took(self, drafts: Seq[tuple[int, ...]], seconds: float, shared: bool = False) -> None:
        """A step that only decodes, with these drafts, has taken so long; `shared`: with others in one call."""
        self.costs.observe(len(drafts), sum(map(len, drafts)), seconds, shared)

    def rate(self, request_id: str) -> float:
        """The share of a sequence's drafted tokens that has been right of late."""
        luck = self._lucks.get(request_id)
        return HOPE if luck is None else luck.rate

    def forget(self, request_id: str) -> None:
        """A sequence has ended."""
        self._lucks.pop(request_id, None)

    def _length(self, luck: _Luck, share: float) -> int:
        """The last token's chance to be right, and all before it, is worth its row; one is tried in any case."""
        length, chance = 1, luck.rate * luck.rate
        while length < self._longest and chance >= share:
            length += 1
            chance *= luck.rate
        return length
