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

    Medians of the latest: a step that took long because the machine was elsewhere says nothing.
    """

    def __init__(self) -> None:
        self._plain: dict[int, deque[float]] = {}
        """Seconds of steps of so many sequences without drafts."""
        self._row: dict[int, deque[float]] = {}
        """Seconds that each row of drafts added."""

    def observe(self, sequences: int, draft_rows: int, seconds: float) -> None:
        """A step that only decodes has taken `seconds`."""
        plain = self._plain.setdefault(sequences, deque(maxlen=_LATEST))
        if draft_rows == 0:
            plain.append(seconds)
        elif plain:
            rows = self._row.setdefault(sequences, deque(maxlen=_LATEST))
            rows.append((seconds - median(plain)) / draft_rows)

    def share(self, sequences: int) -> float:
        """Cost of a row more, in tokens that its time would give without drafts."""
        plain, row = self._plain.get(sequences), self._row.get(sequences)
        if not plain or not row:
            return 0.3
        return min(1.0, max(0.05, median(row) * sequences / max(1e-9, median(plain))))


@dataclass(slots=True)
class _Luck:
    """How drafts of one sequence have fared."""

    index: GramIndex
    rate: float = HOPE
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
        length = min(left, self._length(luck, self.costs.share(sequences)))
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
        if right:
            luck.pause = 0
        elif luck.rate < self.costs.share(sequences):
            luck.pause = min(_LONGEST_PAUSE, max(_FIRST_PAUSE, 2 * luck.pause))
            luck.resumes_at = len(seq.tokens) + luck.pause

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

    def _length(self, luck: _Luck, share: float) -> int:
        """The last token's chance to be right, and all before it, is worth its row; one is tried in any case."""
        length, chance = 1, luck.rate * luck.rate
        while length < self._longest and chance >= share:
            length += 1
            chance *= luck.rate
        return length
