"""One cache's stream of events: what to believe of it when messages are lost, doubled or begin anew. Pure.

Messages are numbered from 0. What follows on the last one is applied. A gap asks for a replay and holds what comes
meanwhile; what the replay cannot fill means that removals may have been missed, so the cache counts as empty and is
learned anew. A number that goes back, or a new connection, means another publisher: empty, then a replay from 0. A
message that clears the cache ends any replay, as nothing before it matters.

    live    … 7 8     11 12           17 …
    replay          9 10 11 12 |              numbers that were applied already are skipped on either road

Holds no socket and no clock: who feeds it also asks for the replay (`wants`) and says when that has ended.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from omni_proxy.apc.translate import TooManyBlocks, Translator
from omni_proxy.apc.wire import Cleared, Removed, Stored, WireError, clears, read_batch
from omni_proxy.messages import BlocksRemoved, BlocksStored, CacheCleared

Change = BlocksStored | BlocksRemoved | CacheCleared

MAX_HELD_BYTES: Final = 64 << 20
MAX_HELD: Final = 10_000
"""Messages kept during a replay: as many as publishers keep for one."""


class FeedCounts(Struct):
    """What happened to a feed; all only rise."""

    batches: int = 0
    gaps: int = 0
    lost: int = 0
    """Gaps that no replay could fill."""
    restarts: int = 0
    malformed: int = 0
    """Messages or events that make no sense."""
    overflows: int = 0
    """More blocks than are followed, or more messages than are held."""


class FeedReading(Struct, frozen=True):
    """What there is to tell of one feed."""

    worker: str
    rank: int
    connected: bool
    counts: FeedCounts
    unknown_parents: int
    """Blocks behind blocks that are not known."""
    lag_s: float | None = None
    """How long the last message was on its way, by two wall clocks; None where messages do not say when."""


class Feed:
    """The state of one publisher's stream."""

    def __init__(self, worker: str, rank: int, translator: Translator | None = None) -> None:
        self.worker = worker
        self.rank = rank
        self.counts = FeedCounts()
        self.translator = Translator() if translator is None else translator
        self.sent_at: float | None = None
        """When the last message that was applied was sent, by the publisher's wall clock."""
        self.last: int | None = None
        """Number of the last message that was applied."""
        self.wants: int | None = None
        """A replay from this number on is wanted, or under way."""
        self._live = -1
        """Number of the last message that came on the live road."""
        self._held: list[tuple[int, bytes]] = []
        self._held_bytes = 0

    # ------------------------------------------------------------------- what comes

    def hear(self, number: int, payload: bytes) -> list[Change]:
        """A message came on the live road; returns what it changes."""
        if number <= self._live:
            changes = self.restarted()
            self._live = number
            return [*changes, *self._first(number, payload)]
        self._live = number
        if self.wants is None and self.last is not None:
            if number <= self.last:
                return []  # the replay was ahead of the live road
            if number == self.last + 1:
                return self._apply(number, payload)
        if clears(payload) and (self.last is None or number > self.last):
            return self._begin_anew(number, payload)
        if self.wants is not None:
            return self._hold(number, payload)
        if self.last is None:
            return self._first(number, payload)
        self.counts.gaps += 1
        self.wants = self.last + 1
        return self._hold(number, payload)

    def replayed(self, number: int, payload: bytes) -> list[Change]:
        """A message of the replay came."""
        if self.wants is None or (self.last is not None and number <= self.last):
            return []
        changes = self._bridge(number)
        return [*changes, *self._apply(number, payload)]

    def replay_ended(self) -> list[Change]:
        """The replay is over, has failed, or cannot be had; what was held is applied now."""
        held, self._held, self._held_bytes, self.wants = self._held, [], 0, None
        changes: list[Change] = []
        for number, payload in held:
            if self.last is None or number > self.last:
                changes += self._bridge(number)
                changes += self._apply(number, payload)
        return changes

    def check(self) -> None:
        """Ask whether something was missed that no later message has shown yet."""
        if self.wants is None:
            self.wants = 0 if self.last is None else self.last + 1

    def restarted(self) -> list[Change]:
        """There is a new publisher, or a new connection to it: nothing that was heard before can be relied on."""
        self.counts.restarts += 1
        self.last, self._live, self.wants = None, -1, 0
        self._held, self._held_bytes = [], 0
        return self._forget()

    # ----------------------------------------------------------------------- inside

    def _first(self, number: int, payload: bytes) -> list[Change]:
        if number == 0:
            self.wants = None
            return self._apply(number, payload)
        self.wants = 0
        return self._hold(number, payload)

    def _begin_anew(self, number: int, payload: bytes) -> list[Change]:
        """The cache was emptied: what came before, and may take long to be read, does not matter any more."""
        self._held, self._held_bytes, self.wants = [], 0, None
        changes = self._forget()
        return [*changes, *self._apply(number, payload)]

    def _hold(self, number: int, payload: bytes) -> list[Change]:
        self._held.append((number, payload))
        self._held_bytes += len(payload)
        if len(self._held) <= MAX_HELD and self._held_bytes <= MAX_HELD_BYTES:
            return []
        self.counts.overflows += 1
        return self.replay_ended()

    def _bridge(self, number: int) -> list[Change]:
        """Before applying `number`: is there a hole in front of it?"""
        if number == (0 if self.last is None else self.last + 1):
            return []
        self.counts.lost += 1
        return self._forget()

    def _forget(self) -> list[Change]:
        known = len(self.translator) > 0
        self.translator.clear()
        return [CacheCleared(self.worker, self.rank)] if known else []

    def _apply(self, number: int, payload: bytes) -> list[Change]:
        self.last = number
        self.counts.batches += 1
        try:
            batch = read_batch(payload)
        except WireError:
            self.counts.malformed += 1
            return self._forget()  # whatever it said is lost
        self.counts.malformed += batch.malformed
        self.sent_at = batch.sent_at
        changes: list[Change] = []
        for event in batch.events:
            match event:
                case Cleared():
                    changes += self._forget()
                case Removed():
                    keys = self.translator.removed(event)
                    if keys:
                        changes.append(BlocksRemoved(self.worker, self.rank, keys, event.tier))
                case _:
                    changes += self._stored(event)
        return changes

    def _stored(self, event: Stored) -> list[Change]:
        try:
            keys = self.translator.stored(event)
        except TooManyBlocks:
            self.counts.overflows += 1
            return self._forget()
        if not keys:
            return []
        size = self.translator.holder_block_tokens
        return [BlocksStored(self.worker, self.rank, size, keys, event.tier)]
