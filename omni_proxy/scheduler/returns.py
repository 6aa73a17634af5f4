"""Which conversations come back with a next turn: what was seen, and what follows for those that have just ended. Pure.

A conversation is known by the last whole block of its prompt: its next turn has that block too, and more behind it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

PATIENCE_S: Final = 300.0
"""Who has not come back by then will not, as far as we count."""
MOST_KNOWN: Final = 8192
_MOST_TURNS: Final = 3
"""From so many returns on, conversations are taken to be alike."""
_MEMORY: Final = 0.995
"""What each newer conversation leaves of the weight of those before."""
_PRIOR_WEIGHT: Final = 4.0


class Conversation:
    """One whose answer has ended. `turns`: how often it had come back by then."""

    __slots__ = ("at", "key", "rid", "tenant", "tokens", "turns", "worker")

    def __init__(self, rid: str, key: int, tenant: str, turns: int, at: float) -> None:
        self.rid = rid
        self.key = key
        self.tenant = tenant
        self.turns = turns
        self.at = at
        self.worker = ""
        """Which prefill worker has computed its answer ahead; empty: none."""
        self.tokens = 0
        """How many tokens that were."""


class _Share:
    __slots__ = ("came", "ended")

    def __init__(self) -> None:
        self.came = 0.0
        self.ended = 0.0

    def count(self, came: bool) -> None:
        self.came = self.came * _MEMORY + came
        self.ended = self.ended * _MEMORY + 1.0


class Returns:
    """Conversations that may come back, and the share of those before that did."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, Conversation] = OrderedDict()
        self._all = _Share()
        self._classes: dict[tuple[str, int], _Share] = {}

    def __len__(self) -> int:
        return len(self._known)

    def ended(self, conversation: Conversation) -> list[Conversation]:
        """An answer has ended; returns the conversations that are given up to make room."""
        gone = []
        before = self._known.pop(conversation.key, None)
        if before is not None:  # the same prompt again, which is no next turn
            gone.append(before)
        self._known[conversation.key] = conversation
        if len(self._known) > MOST_KNOWN:
            gone.append(self._known.popitem(last=False)[1])
        return gone

    def came(self, keys: Sequence[int]) -> Conversation | None:
        """The conversation whose next turn a prompt with these blocks is, taken out and counted; None: a new one."""
        known = self._known
        if not known:
            return None
        for place in range(len(keys) - 1, -1, -1):
            key = keys[place]
            if key in known and key != keys[-1]:
                found = known.pop(key)
                self._count(found, True)
                return found
        return None

    def forget(self, now: float) -> list[Conversation]:
        """Take out and count those that have not come back in time."""
        gone = []
        while self._known:
            oldest = next(iter(self._known.values()))
            if now - oldest.at < PATIENCE_S:
                break
            del self._known[oldest.key]
            self._count(oldest, False)
            gone.append(oldest)
        return gone

    def likely(self, tenant: str, turns: int) -> float:
        """The probability that such a conversation comes back: its class's share, drawn to that of all."""
        whole = (self._all.came + 0.5 * _PRIOR_WEIGHT) / (self._all.ended + _PRIOR_WEIGHT)
        share = self._classes.get((tenant, min(turns, _MOST_TURNS)))
        if share is None:
            return whole
        return (share.came + whole * _PRIOR_WEIGHT) / (share.ended + _PRIOR_WEIGHT)

    def _count(self, conversation: Conversation, came: bool) -> None:
        self._all.count(came)
        name = (conversation.tenant, min(conversation.turns, _MOST_TURNS))
        share = self._classes.get(name)
        if share is None:
            if len(self._classes) >= MOST_KNOWN:
                return
            share = self._classes[name] = _Share()
        share.count(came)
