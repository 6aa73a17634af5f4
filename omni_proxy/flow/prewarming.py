"""Speculative prefill: what a conversation's next turn will begin with is computed while its worker idles. Pure.

    DecodeDone ─► Foresee ··· Tokenized ─► candidate ─► Prewarm(lease) ··· PrefillDone(lease)
                  (the edge renders prompt + answer)        └─► Abort(lease), as soon as real work goes to that worker

Leases of this kind are on no ledger: no decision about a real request counts them, and `review`, the last step of every
event, ends those whose worker has got real work in it. What was computed enters the picture of the caches when it is
there, never before. docs/prewarm.md shows what it gains and costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from omni_proxy.apc.index import CacheLearner, PrefixIndex
from omni_proxy.flow.prewarm_settings import PrewarmSettings
from omni_proxy.lifecycle.request import Request
from omni_proxy.messages import (
    Abort,
    Effect,
    Foresee,
    Forget,
    Lease,
    Leg,
    Mode,
    Prewarm,
    StartDecode,
    StartPrefill,
    Tokenized,
    Usage,
)
from omni_proxy.scheduler.allowance import Allowance
from omni_proxy.scheduler.ledger import Ledger
from omni_proxy.scheduler.load import WorkerLoad
from omni_proxy.scheduler.returns import Conversation, Returns

MOST_CANDIDATES: Final = 256
MOST_WORKERS: Final = 4096
LEAST_TOKENS: Final = 16
"""Less than a block is not worth a request."""
_RATE_WEIGHT: Final = 0.1
"""Of the newest gap in the mean time between two prompts of a worker."""


@dataclass(slots=True)
class PrewarmCounts:
    """What became of it, since the beginning."""

    sent: int = 0
    finished: int = 0
    cancelled: int = 0
    """Real work came, or the worker went."""
    failed: int = 0
    sent_tokens: int = 0
    """Tokens to compute in all that were sent."""
    used_tokens: int = 0
    """Of them, those that the next turn found where it was computed."""
    wasted_tokens: int = 0
    """Of them, those that were cancelled, or that no turn found."""
    returned: int = 0
    """Conversations that came back."""
    given_up: int = 0
    """And those that did not in time."""


class _Candidate:
    """What a next turn will begin with. `tokens` and `keys` are known once the edge has rendered it."""

    __slots__ = ("conversation", "keys", "model", "tokens", "worker")

    def __init__(self, conversation: Conversation, model: str, worker: str) -> None:
        self.conversation = conversation
        self.model = model
        self.worker = worker
        """The prefill worker that holds the prompt."""
        self.tokens = 0
        self.keys: tuple[int, ...] = ()


class _Running:
    __slots__ = ("candidate", "uncached")

    def __init__(self, candidate: _Candidate, uncached: int) -> None:
        self.candidate = candidate
        self.uncached = uncached


class Prewarming:
    """All that is foreseen, waits for an idle worker, or is computed ahead."""

    def __init__(
        self, settings: PrewarmSettings, ledger: Ledger, index: PrefixIndex, learner: CacheLearner | None
    ) -> None:
        self.counts: Final = PrewarmCounts()
        self._ledger = ledger
        self._index = index
        self._learner = learner
        self._returns = Returns()
        self._turns: dict[str, int] = {}
        """By live request: how often its conversation has come back."""
        self._expected: dict[str, _Candidate] = {}
        """The edge was asked to render these."""
        self._waiting: dict[str, dict[str, _Candidate]] = {}
        """By worker, then by request, the youngest last."""
        self._running: dict[str, tuple[Lease, _Running]] = {}
        """By worker: one at a time."""
        self._found: dict[str, Conversation] = {}
        """By request: a next turn that was computed ahead somewhere, until it is seen where it goes."""
        self._rates: dict[str, tuple[float, float]] = {}
        """By worker: when it got its last real prompt, and the mean time between two of them."""
        self._shares: dict[str, Allowance] = {}
        self._tokens: Allowance | None = None
        self._wake_at: float | None = None
        self.configure(settings)

    def configure(self, settings: PrewarmSettings) -> None:
        """Use these settings from now on."""
        self.settings = settings
        self._shares.clear()
        rate = settings.tokens_per_s
        self._tokens = None if rate is None else Allowance(rate, 0.0)

    # ------------------------------------------------------------------ what happens

    def came(self, request: Request, effects: list[Effect]) -> None:
        """A prompt has been read: is it the next turn of a conversation?"""
        conversation = self._returns.came(request.block_keys)
        if conversation is None:
            return
        self.counts.returned += 1
        self._turns[request.rid] = conversation.turns + 1
        if conversation.worker:
            self._found[request.rid] = conversation
        else:
            self._drop(conversation, effects)

    def ended(self, request: Request, now: float, effects: list[Effect]) -> None:
        """An answer was relayed whole: have its next turn's beginning rendered, where that may pay."""
        turns = self._turns.pop(request.rid, 0)
        keys = request.block_keys
        if not keys or request.resumes or request.mode not in (Mode.SEQUENTIAL, Mode.PARALLEL):
            return
        conversation = Conversation(request.rid, keys[-1], request.spec.tenant, turns, now)
        for gone in self._returns.ended(conversation):  # asked again, or no room for more
            self.counts.wasted_tokens += gone.tokens
            self._drop(gone, effects)
        worker = next((p.worker for p in reversed(request.placements) if p.leg is Leg.PREFILL), None)
        if worker is None or len(self._expected) >= MOST_CANDIDATES:
            return
        self._expected[request.rid] = _Candidate(conversation, request.model, worker)
        effects.append(Foresee(request.rid))

    def closed(self, rid: str) -> None:
        """A request has ended, in whatever way."""
        self._turns.pop(rid, None)
        found = self._found.pop(rid, None)
        if found is not None:  # it went nowhere
            self.counts.wasted_tokens += found.tokens

    def foreseen(self, event: Tokenized, effects: list[Effect]) -> None:
        """The edge has rendered it, or could not."""
        candidate = self._expected.pop(event.rid, None)
        if candidate is None:
            return
        waiting = self._waiting.setdefault(candidate.worker, {})
        if event.prompt_tokens is None or len(waiting) >= MOST_CANDIDATES:
            effects.append(Forget(event.rid))
            return
        candidate.tokens, candidate.keys = event.prompt_tokens, event.block_keys
        waiting[event.rid] = candidate

    def finished(self, lease: Lease, usage: Usage, now: float) -> None:
        """A worker has computed it."""
        running = self._take(lease)
        if running is None:
            return
        candidate, conversation = running.candidate, running.candidate.conversation
        self.counts.finished += 1
        conversation.worker, conversation.tokens = lease.worker, running.uncached
        if self._learner is not None:
            self._learner.granted(lease, candidate.keys, now)
            self._learner.answered(lease, None, usage.cached_tokens, now)

    def failed(self, lease: Lease) -> None:
        """It was not computed; the worker is blamed for real work only."""
        running = self._take(lease)
        if running is not None:
            self.counts.failed += 1
            self.counts.wasted_tokens += running.uncached

    def front_lost(self, prefix: str) -> None:
        """Whoever would have sent these is gone."""
        effects: list[Effect] = []
        for rid in [rid for rid in self._expected if rid.startswith(prefix)]:
            del self._expected[rid]
        for waiting in self._waiting.values():
            for rid in [rid for rid in waiting if rid.startswith(prefix)]:
                del waiting[rid]
        for worker, (lease, _) in list(self._running.items()):
            if lease.rid.startswith(prefix):
                self._cancel(worker, effects)

    def end(self, effects: list[Effect]) -> None:
        """Nothing is computed ahead any more."""
        for worker in list(self._running):
            self._cancel(worker, effects)
        gone = [*self._expected, *[rid for waiting in self._waiting.values() for rid in waiting]]
        effects.extend([Forget(rid) for rid in gone])

    # ------------------------------------------------------------ after every event

    def review(self, now: float, effects: list[Effect], busy: bool) -> None:
        """End what is in the way of real work, and begin what is in nobody's. `busy`: prompts wait for a worker."""
        for effect in list(effects):
            if type(effect) is StartPrefill or (type(effect) is StartDecode and effect.peer is None):
                self._real(effect.lease, now)
        for worker in list(self._running):
            load = self._ledger.get(worker)
            if load is None or not load.usable(now) or _works(load) or busy:
                self._cancel(worker, effects)
                if load is not None:
                    load.backlog.disturbed()
        for gone in self._returns.forget(now):
            self.counts.given_up += 1
            self.counts.wasted_tokens += gone.tokens
            self._drop(gone, effects)
        self._wake_at = None
        if not busy:
            for worker in list(self._waiting):
                self._begin(worker, now, effects)

    def next_wakeup(self) -> float | None:
        """When there is an allowance again for what waits, or None."""
        return self._wake_at

    def leases(self) -> list[Lease]:
        """What is computed ahead now."""
        return [lease for lease, _ in self._running.values()]

    def check(self) -> None:
        """Raise AssertionError where real work has company."""
        for worker, (lease, _) in self._running.items():
            load = self._ledger.get(worker)
            assert load is not None, f"{lease} on a worker that is no member"
            assert not _works(load), f"{lease} beside real work"
        counts = self.counts
        ended = counts.finished + counts.cancelled + counts.failed
        assert counts.sent == ended + len(self._running), "sent, but neither ended nor running"
        assert counts.used_tokens + counts.wasted_tokens <= counts.sent_tokens, "more tokens ended than were sent"

    def _begin(self, worker: str, now: float, effects: list[Effect]) -> None:
        """Send what waits for this worker, if it is idle: the youngest that pays."""
        waiting, load = self._waiting[worker], self._ledger.get(worker)
        if load is None or not load.prefills:
            for rid in list(waiting):
                effects.append(Forget(rid))
            waiting.clear()
        while waiting and next(iter(waiting.values())).conversation.at < now - self.settings.wait_s:
            effects.append(Forget(self._oldest(waiting)))
        if not waiting:
            del self._waiting[worker]
            return
        assert load is not None
        if worker in self._running or not load.usable(now) or _works(load) or not self._may_spend(worker, now):
            return
        while waiting:
            rid, candidate = waiting.popitem()
            uncached = self._pays(candidate, load)
            if uncached is not None:
                self._send(rid, candidate, load, uncached, now, effects)
                return
            effects.append(Forget(rid))

    def _pays(self, candidate: _Candidate, load: WorkerLoad) -> int | None:
        """The tokens that are left to compute; None where it is not worth it.

        What it saves the next turn, if that comes, against what it costs a real prompt that comes meanwhile: as many
        of them as come in that time, each held up by half of it.
        """
        have = min(self._index.match(candidate.keys).get(load.name, 0), candidate.tokens - 1)
        uncached = candidate.tokens - have
        capacity = load.spec.kv_capacity_tokens
        if not LEAST_TOKENS <= uncached <= self.settings.max_tokens:
            return None
        if capacity is not None and load.kv_tokens + candidate.tokens > capacity:
            return None
        cost = load.backlog.cost
        cost_s = cost.seconds(uncached, have)
        conversation = candidate.conversation
        gain_s = self._returns.likely(conversation.tenant, conversation.turns) * (cost_s - cost.weights[0])
        gap_s = self._rates.get(load.name, (0.0, 60.0))[1]
        return uncached if gain_s > cost_s * cost_s / (2 * gap_s) else None

    def _may_spend(self, worker: str, now: float) -> bool:
        share = self._shares.get(worker)
        if share is None:
            share = self._shares[worker] = Allowance(self.settings.share, now)
        buckets = [share] if self._tokens is None else [share, self._tokens]
        for bucket in buckets:
            if not bucket.has(now):
                at = bucket.back_at()
                self._wake_at = at if self._wake_at is None else min(self._wake_at, at)
                return False
        return True

    def _send(
        self, rid: str, candidate: _Candidate, load: WorkerLoad, uncached: int, now: float, effects: list[Effect]
    ) -> None:
        self._shares[load.name].spend(load.backlog.cost.seconds(uncached, candidate.tokens - uncached))
        if self._tokens is not None:
            self._tokens.spend(uncached)
        lease = Lease(rid, 0, load.name, Leg.PREWARM)
        self._running[load.name] = (lease, _Running(candidate, uncached))
        self.counts.sent += 1
        self.counts.sent_tokens += uncached
        effects.append(Prewarm(lease))

    # ------------------------------------------------------------------- bookkeeping

    def _real(self, lease: Lease, now: float) -> None:
        """A real prompt goes to a worker: note how often that happens, and whether it finds what was computed."""
        if len(self._rates) > MOST_WORKERS:  # of names that are gone
            self._rates.clear()
            self._shares.clear()
        last, gap_s = self._rates.get(lease.worker, (now, 60.0))
        self._rates[lease.worker] = (now, gap_s + _RATE_WEIGHT * (now - last - gap_s))
        found = self._found.pop(lease.rid, None)
        if found is None:
            return
        if found.worker == lease.worker:
            self.counts.used_tokens += found.tokens
        else:
            self.counts.wasted_tokens += found.tokens

    def _cancel(self, worker: str, effects: list[Effect]) -> None:
        lease, running = self._running.pop(worker)
        self.counts.cancelled += 1
        self.counts.wasted_tokens += running.uncached
        effects.insert(0, Abort(lease))  # before the work for which it makes room

    def _drop(self, conversation: Conversation, effects: list[Effect]) -> None:
        """Nobody will need it any more, or real work does it now."""
        rid = conversation.rid
        if self._expected.pop(rid, None) is not None:
            effects.append(Forget(rid))
        for waiting in self._waiting.values():
            if waiting.pop(rid, None) is not None:
                effects.append(Forget(rid))
        for worker, (lease, _) in list(self._running.items()):
            if lease.rid == rid:
                self._cancel(worker, effects)

    def _take(self, lease: Lease) -> _Running | None:
        held = self._running.get(lease.worker)
        if held is None or held[0] != lease:
            return None
        del self._running[lease.worker]
        return held[1]

    def _oldest(self, waiting: dict[str, _Candidate]) -> str:
        rid = next(iter(waiting))
        del waiting[rid]
        return rid


def _works(load: WorkerLoad) -> bool:
    """Does it compute for anybody?"""
    return load.seqs > 0 or load.other_seqs > 0
