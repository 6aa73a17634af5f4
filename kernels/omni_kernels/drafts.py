"""What a burst needs to draft by itself, and what it tells; see `Decoder.burst`. The caller says how drafts are."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class DraftPolicy(Protocol):
    """How drafts of a batch are made: the last `gram` tokens are looked for, and what followed them is tried."""

    @property
    def gram(self) -> int: ...
    @property
    def longest(self) -> int:
        """Tokens of a draft."""
        ...

    @property
    def first_pause(self) -> int: ...
    @property
    def longest_pause(self) -> int: ...
    @property
    def learn(self) -> float:
        """How much of a rate one token changes."""
        ...

    @property
    def share(self) -> float:
        """What a row more costs, in tokens."""
        ...


class DraftLuck(Protocol):
    """What one sequence has said, and how its drafts have fared; a burst changes all but the text."""

    text: array[int]
    """int32, the token of the next row last."""
    rate: float
    pause: int
    resumes_at: int


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts of a burst."""

    policy: DraftPolicy
    lucks: Sequence[DraftLuck]
    """Of each sequence."""
    rows: int
    """Of drafts in one step."""
    limit_s: float
    """CPU time that the steps may take together; one is always made."""


@dataclass(frozen=True, slots=True)
class Burst:
    """What a burst tells."""

    tokens: list[list[int]]
    """That each sequence has drawn."""
    fared: list[list[tuple[int, int]]]
    """For each sequence and step: tokens drafted, and how many of them were right."""
    plain_steps: int
    plain_s: float
    """CPU time of the steps without drafts, and of those with some."""
    drafted_steps: int
    drafted_s: float
    draft_rows: int
