"""The prompts that one worker has to compute for us: when it will be free, and what each of them teaches. Pure.

A worker computes prompts one after another, or several in one pass; either way it is busy from the first grant until
the last answer. The time between two answers is what the prompt between them took:

    grant A    grant B           A answers        B answers
      ├──────────┼────────────────────┤                ┊
      └──── since                     └──── since ─────┤      B took this, though it was granted long before
"""

from __future__ import annotations

from typing import Final

from omni_proxy.messages import Lease
from omni_proxy.scheduler.cost import PrefillCost, pairs

_SAME_PASS_S: Final = 0.0005
"""Answers that come within this after another come from one pass with it."""
LEAD_S: Final = 0.02
"""A worker gets its next prompt so long before it should be free: it must not idle, and what is sent is decided."""
MOST_OVERHEADS: Final = 64.0
"""Work for so many times the fixed cost of a prompt is sent ahead at most."""
_LATE: Final = 1.5
_CHECK_AGAIN_S: Final = 0.05


class _Prompt:
    __slots__ = ("begin", "cached", "cost_s", "uncached")

    def __init__(self, uncached: int, cached: int, cost_s: float, begin: float) -> None:
        self.begin = begin
        """Not before: what other gateways had there when it was sent is computed first."""
        self.uncached = uncached
        self.cached = cached
        self.cost_s = cost_s


class Backlog:
    """Granted prompts of one worker with their predicted cost. Instants in seconds, monotonic."""

    __slots__ = (
        "_alone",
        "_clean",
        "_left_at",
        "_others_until",
        "_pairs",
        "_pass_until",
        "_pending_s",
        "_prompts",
        "_tokens",
        "_waiting_prompts",
        "booked_until",
        "cost",
        "reserved",
        "since",
        "total_s",
    )

    def __init__(self, peers: PrefillCost | None = None) -> None:
        self.cost = PrefillCost(peers)
        self._prompts: dict[Lease, _Prompt] = {}
        self.booked_until = 0.0
        """Within one walk of the planner: when it is free after what was planned before."""
        self.reserved = False
        """Within one walk: its next place is promised, or there is none."""
        self.total_s = 0.0
        """Predicted cost of all that is granted."""
        self.since = 0.0
        """The instant at which the first of them could be begun."""
        self._clean = True
        """Nothing but prompts that were answered has kept the worker busy since then."""
        self._waiting_prompts = 0
        """Of the observation that is not complete yet, because more answers of the same pass may come."""
        self._tokens = 0
        self._pairs = 0.0
        self._pending_s = 0.0
        self._pass_until = 0.0
        """An answer after this instant is of another pass."""
        self._alone = True
        """Were others last known to have nothing there?"""
        self._left_at = 0.0
        """When the last of them was heard to have nothing there any more."""
        self._others_until = 0.0
        """The instant at which it should be done with what other gateways have there."""

    def __len__(self) -> int:
        return len(self._prompts)

    def others(self, busy_s: float, now: float, present: bool = True) -> None:
        """Other gateways have so much work there. What is observed while they are present teaches nothing."""
        self._others_until = now + busy_s if busy_s > 0 else min(now, self._others_until)
        if not present and not self._alone:
            self._left_at = now
            self.since = max(self.since, min(now, self._first_begin()))  # by now at the latest it began with ours
        self._alone = not present
        if present:
            self._clean = False

    def own_s(self, now: float) -> float:
        """How long it needs for what is granted from here, in seconds."""
        if not self._prompts:
            return 0.0
        first_s = self._first_s()
        end = self._first_begin() + first_s
        left_s = min(first_s, end - now) if now <= end else now - end
        return left_s + self.total_s - first_s

    # ----------------------------------------------------------------------- changes

    def granted(self, lease: Lease, uncached: int, cached: int, now: float) -> float:
        """A prompt is on its way; returns the instant at which it should be computed."""
        free = self.free_at(now)
        if not self._prompts:
            self.since = now
            self._clean = self._alone
            self.total_s = 0.0
        cost_s = self.cost.seconds(uncached, cached)
        self._prompts[lease] = _Prompt(uncached, cached, cost_s, 0.0 if self._alone else free)
        self.total_s += cost_s
        return free + cost_s

    def computed(self, lease: Lease, prompt_tokens: int, cached_tokens: int | None, now: float) -> None:
        """A prompt was computed; what the worker found cached of it counts, where it says so.

        The worker counts tokens where we may have estimated them. What is learned must fit what is predicted: so it is
        its share that counts, of as many tokens as were granted.
        """
        prompt = self._prompts.pop(lease, None)
        if prompt is None:
            return
        self.total_s = self.total_s - prompt.cost_s if self._prompts else 0.0
        granted, cached = prompt.uncached + prompt.cached, prompt.cached
        if cached_tokens is not None:
            cached = cached_tokens * granted // max(1, prompt_tokens)
        uncached = max(1, granted - cached)
        took_s = now - self.since
        if now > self._pass_until or not self._waiting_prompts:
            self._learn()
            self._pending_s = 0.0
            self._pass_until = now + _SAME_PASS_S
        self._pending_s += took_s
        self._waiting_prompts += 1
        self._tokens += uncached
        self._pairs += pairs(uncached, cached)
        if not self._clean:
            self._forget_pending()
        self._clean = self._alone
        self.since = now

    def dropped(self, lease: Lease, now: float) -> None:
        """A prompt was not computed, or nobody knows how far: what follows it teaches nothing."""
        prompt = self._prompts.pop(lease, None)
        if prompt is not None:
            self.total_s = self.total_s - prompt.cost_s if self._prompts else 0.0
            self._clean = False

    def disturbed(self) -> None:
        """It may have been at something that nobody counts: what is under way teaches nothing."""
        self._clean = False

    def _learn(self) -> None:
        if self._waiting_prompts:
            self.cost.observe(self._waiting_prompts, self._tokens, self._pairs, self._pending_s)
        self._forget_pending()

    def _forget_pending(self) -> None:
        self._waiting_prompts = self._tokens = 0
        self._pairs = 0.0

    # --------------------------------------------------------------------- questions

    def free_at(self, now: float) -> float:
        """The instant at which all that is granted should be computed.

        What is overdue is taken to need as long again as it is overdue by now.
        """
        if not self._alone:
            return max(now, self._others_until) + self.own_s(now)
        if not self._prompts:
            return now
        first_end = self.since + self._first_s()
        end = self.since + self.total_s
        if now <= first_end:
            return end
        return end + 2.0 * (now - first_end)

    def opens_at(self, now: float, lead_s: float) -> float | None:
        """The instant from which it may get one more prompt, at or before `now` if at once; None: after an answer.

        `lead_s`: how much work may be sent ahead. A worker whose answer is late by half gets nothing until it comes.
        """
        if not self._prompts:
            return now if self._alone else max(now, self._others_until - lead_s)
        first_s = self._first_s()
        if self.total_s - first_s > lead_s or now - self._first_begin() > _LATE * first_s + _CHECK_AGAIN_S:
            return None
        return self.since + self.total_s - lead_s if self._alone else self.free_at(now) - lead_s

    def opened_at(self, now: float) -> float:
        """For an open worker: the instant from which it has been open, or has had nothing to do."""
        if self._prompts:
            return min(now, self.free_at(now) - LEAD_S)
        return min(now, max(self.since, self._left_at, self._others_until - LEAD_S))

    def lead_s(self, depth: float) -> float:
        """How much work to send ahead when so many prompts wait for each worker.

        Prompts that are sent together share a pass and its fixed cost. That costs the first of them time, which is
        worth it when many wait.
        """
        return max(LEAD_S, min(depth, MOST_OVERHEADS) * self.cost.weights[0])

    def overdue_s(self, now: float) -> float:
        """For how long an answer has been missing; 0 when none is."""
        return max(0.0, now - self._first_begin() - self._first_s()) if self._prompts else 0.0

    def next_check(self, now: float) -> float | None:
        """The instant at which to think again about an answer that is missing."""
        overdue = self.overdue_s(now)
        return now + max(_CHECK_AGAIN_S, overdue) if overdue > 0 else None

    def _first_begin(self) -> float:
        for prompt in self._prompts.values():
            return max(self.since, prompt.begin)
        return self.since

    def _first_s(self) -> float:
        for prompt in self._prompts.values():
            return prompt.cost_s
        return 0.0
