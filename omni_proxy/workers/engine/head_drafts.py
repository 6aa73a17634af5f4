"""Drafts that the model's own head makes, and how long they should be. Pure.

Only their number is decided here, before a step; `guesser.py` fills the tokens in. Where the text itself offers a
draft (`speculation.py`) that is worth more, it is taken: it costs no run of the head. What it is worth is learned also
while it is not taken, from what was said instead.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Final

from omni_proxy.workers.engine.sequence import Sequence
from omni_proxy.workers.engine.speculation import HOPE, Drafter, RowCosts, gain

GUESS: Final = -1
"""Stands in a draft for a token that the head is to guess."""
_LEARN: Final = 0.15
_PROBE: Final = 0.5
"""As `_LEARN`, after a pause: what was learned before it is old."""
_REMEMBER: Final = 0.25
_FIRST_PAUSE: Final = 16
_LONGEST_PAUSE: Final = 256
_INHERITED_PAUSE: Final = 64
_PLAIN_STEPS: Final = 3
"""Steps without drafts that tell what drafts cost; again after so many with drafts:"""
_TRUSTED: Final = 64


@dataclass(slots=True)
class _Luck:
    """How the head's drafts of one sequence have fared."""

    rate: float
    """Chance of a guess to be right if the one before was."""
    pause: int = 0
    resumes_at: int = 0
    """Length of the sequence at which the next draft may be made."""
    tries: int = 0
    guessed: bool = False
    """The last draft was the head's."""
    untaken: tuple[int, tuple[int, ...]] = (0, ())
    """Length of the sequence, and what the text offered then but was not taken."""


class HeadDrafter:
    """Decides for all sequences of an engine who makes a draft, and how long it is."""

    def __init__(self, texts: Drafter, longest: int, max_model_len: int) -> None:
        self.costs: Final = GuessCosts(texts.costs)
        self._texts = texts
        self._longest = longest
        self._max_model_len = max_model_len
        self._lucks: dict[str, _Luck] = {}
        self._usual = HOPE
        """The rate that a sequence begins with: it is the head's more than the sequence's."""
        self._usual_pause = 0
        """A pause that it begins with. Half of it for the next, so that short ones bring the head back as well."""

    def propose(self, seq: Sequence, sequences: int, most: int) -> tuple[int, ...]:
        """Tokens that may follow, or as many `GUESS`es; `sequences` are in the step, `most` rows are to be had."""
        luck = self._lucks.get(seq.request_id) or self._begin(seq)
        self._look_back(luck, seq, sequences)
        luck.guessed = False
        if not self.costs.known(sequences) or seq.num_generated == 0:
            return ()
        text = self._texts.propose(seq, sequences, most)
        length = min(self._length(luck, seq, sequences), most)
        rate, share = self._texts.rate(seq.request_id), self._texts.costs.share(sequences)
        if text and gain(rate, len(text), share) >= gain(luck.rate, length, self.costs.share(sequences)):
            return text
        luck.untaken = (len(seq.tokens), text)
        luck.guessed = length > 0
        return (GUESS,) * length

    def _begin(self, seq: Sequence) -> _Luck:
        pause = min(self._usual_pause, _INHERITED_PAUSE)
        self._usual_pause //= 2
        luck = self._lucks[seq.request_id] = _Luck(self._usual, pause, len(seq.tokens) + pause)
        return luck

    def checked(self, seq: Sequence, sequences: int, drafted: int, right: int) -> None:
        """The draft proposed last, of `drafted` tokens, had its first `right` ones right.

        The first of a sequence, and those after a pause, say most. While drafts do not pay there are pauses, each twice
        as long as the last, with one guess between them.
        """
        luck = self._lucks.get(seq.request_id)
        if luck is None or not luck.guessed:
            return self._texts.checked(seq, sequences, drafted, right)
        learn = _PROBE if luck.pause else max(_LEARN, 1.0 / (luck.tries + 2))
        luck.tries += 1
        for _ in range(right):
            luck.rate += learn * (1.0 - luck.rate)
        if right < drafted:
            luck.rate -= learn * luck.rate
        if luck.rate > self.costs.share(sequences):
            luck.pause = 0
        else:
            luck.pause = min(_LONGEST_PAUSE, max(_FIRST_PAUSE, 2 * luck.pause))
            luck.resumes_at = len(seq.tokens) + luck.pause

    def reach(self, seq: Sequence, steps: int) -> int:
        """See `Drafter.reach`; beside a head no step shares its call."""
        return steps

    def took(self, drafts: Seq[tuple[int, ...]], seconds: float) -> None:
        """A step that only decodes, with these drafts, has taken so long."""
        guessed = any(draft[:1] == (GUESS,) for draft in drafts)
        self.costs.observe(len(drafts), sum(map(len, drafts)), seconds, guessed)

    def forget(self, request_id: str) -> None:
        """A sequence has ended."""
        luck = self._lucks.pop(request_id, None)
        if luck is not None:
            self._usual += _REMEMBER * (luck.rate - self._usual)
            if luck.tries:
                self._usual_pause = luck.pause
        self._texts.forget(request_id)

    def _look_back(self, luck: _Luck, seq: Sequence, sequences: int) -> None:
        """What the text offered and was not taken: was it what came?"""
        (at, offered), luck.untaken = luck.untaken, (0, ())
        came = seq.tokens[at : at + len(offered)]
        if offered and came:
            right = next(
                (n for n, pair in enumerate(zip(offered, came, strict=False)) if pair[0] != pair[1]), len(came)
            )
            self._texts.checked(seq, sequences, len(came), right)

    def _length(self, luck: _Luck, seq: Sequence, sequences: int) -> int:
        """Guesses that are worth their rows and their runs of the head; one, now and then, where none seems to be."""
        if len(seq.tokens) < luck.resumes_at:
            return 0
        left = min(
            self._longest,
            seq.request.sampling.max_tokens - seq.num_generated - 1,
            self._max_model_len - len(seq.tokens) - 1,
        )
        length, chance, share = 1, luck.rate * luck.rate, self.costs.share(sequences)
        while length < left and chance >= share:
            length += 1
            chance *= luck.rate
        return max(0, min(left, length))


class GuessCosts:
    """Costs of the head's drafts beside those of texts' drafts: a row of the first includes the runs of the head."""

    def __init__(self, texts: RowCosts) -> None:
        self._texts = texts
        self._guesses = RowCosts()
        self._plain: dict[int, int] = {}
        self._drafted: dict[int, int] = {}
        """Steps of so many sequences, without drafts and since then with some."""

    def observe(self, sequences: int, draft_rows: int, seconds: float, guessed: bool = False) -> None:
        """A step that only decodes has taken `seconds`; `guessed`: drafts were the head's, some at least."""
        if draft_rows == 0:
            self._plain[sequences] = self._plain.get(sequences, 0) + 1
            self._texts.observe(sequences, 0, seconds)
            self._guesses.observe(sequences, 0, seconds)
            return
        (self._guesses if guessed else self._texts).observe(sequences, draft_rows, seconds)
        self._drafted[sequences] = self._drafted.get(sequences, 0) + 1
        if self._drafted[sequences] >= _TRUSTED:
            self._drafted[sequences], self._plain[sequences] = 0, _PLAIN_STEPS - 1

    def known(self, sequences: int) -> bool:
        """It was seen lately what a step without drafts takes."""
        return self._plain.get(sequences, 0) >= _PLAIN_STEPS

    def share(self, sequences: int) -> float:
        """See `RowCosts.share`, of a row that the head guesses."""
        return self._guesses.share(sequences)
