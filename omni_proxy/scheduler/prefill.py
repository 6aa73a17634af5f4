"""Which waiting prompt goes to which prefill worker, and which waits for one that is better. Pure.

The queue is walked in the order of the config. Each prompt is given, in thought, the worker that is best for it: what
the worker has to do before is counted, what was planned before in this walk, and which blocks it will have by then. If
that worker can take the prompt now, it gets it. Otherwise its place is kept for this walk, and nothing behind may take
it. So a prompt waits for the worker that holds its prefix exactly when waiting is better than computing anew, and
nothing is decided before it must be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Final

from omni_proxy.apc.homes import Homes
from omni_proxy.apc.index import PrefixIndex
from omni_proxy.lifecycle.enums import PREFILL_LEG
from omni_proxy.lifecycle.request import Request
from omni_proxy.messages import Placement
from omni_proxy.scheduler.alone import LOOKED_AT, AlonePlan
from omni_proxy.scheduler.backlog import LEAD_S
from omni_proxy.scheduler.foreseen import KEPT_S, Foreseen
from omni_proxy.scheduler.instants import sooner
from omni_proxy.scheduler.ledger import Ledger
from omni_proxy.scheduler.lineup import Lineup
from omni_proxy.scheduler.load import WorkerLoad
from omni_proxy.scheduler.others import two_choices
from omni_proxy.scheduler.pairs import Pairs
from omni_proxy.scheduler.queue import WaitingQueue
from omni_proxy.scheduler.turns import Turns

WALK_REQUESTS: Final = 64
"""So many requests at the head of the queue are looked at in one walk."""
MATCHES: Final = 16
"""So many of them are looked up again in one walk."""
MOST_BEHIND: Final = 20.0
"""A second of a worker's time delays as many prompts as wait for it, but counts for no more than this."""
LEAST_WEIGHT: Final = 0.1
"""A worker of less weight is taken for ten times as slow, not for useless."""
_NEAR_S: Final = 0.002
_NEAR_SHARE: Final = 0.05
"""A prompt that nobody holds goes to the home of its session if that is worse than the best by no more than this."""
_SHOWN: Final = 4


class Choice:
    """A worker for a prompt: when it could begin, when it should end, and what it should find cached."""

    __slots__ = ("cached", "finish", "home", "scores", "start", "uncached", "worker")

    def __init__(
        self, worker: WorkerLoad, start: float, uncached: int, cached: int, scores: list[float], home: bool
    ) -> None:
        self.worker = worker
        self.start = start
        self.finish = start + worker.backlog.cost.seconds(uncached, cached)
        self.uncached = uncached
        self.cached = cached
        self.scores = scores
        """What was compared: for each candidate, in order, an instant."""
        self.home = home


Grant = Callable[[Request, Choice, Placement, float], bool]


class PrefillPlan:
    """Walks the prefill queue. Whom a prompt may go to and how a grant is booked is the planner's business."""

    def __init__(
        self,
        ledger: Ledger,
        queue: WaitingQueue,
        index: PrefixIndex,
        homes: Homes | None,
        lineup: Lineup,
        pairs: Pairs,
        alone: AlonePlan,
        grant: Grant,
    ) -> None:
        self._ledger = ledger
        self._queue = queue
        self._index = index
        self._homes = homes
        self._lineup = lineup
        self._pairs = pairs
        self._alone = alone
        self._grant = grant
        self._foreseen = Foreseen()
        self._turns = Turns(ledger)
        self.configure(lineup, frozenset())
        self.wake_at: float | None = None
        """When a worker opens, or is to be thought about again, though nothing else happens; None: never."""

    def configure(self, lineup: Lineup, without: frozenset[str]) -> None:
        """Use these settings from now on."""
        self._lineup = lineup
        self._keeps_places = "places" not in without
        self._foresees = "foreseen" not in without
        self._has_homes = "homes" not in without
        self._sends_ahead = "ahead" not in without
        self._most_behind = MOST_BEHIND if "depth" not in without else 0.0

    # --------------------------------------------------------------------- one prompt

    def place_at_once(self, request: Request, now: float) -> bool:
        """Grant a prompt that nobody waits before, if the best worker for it can take it now."""
        able = self._pairs.able(request, now)
        if not able:
            return False
        self._foreseen.begin_walk(now)
        for worker in able:
            worker.backlog.booked_until = worker.backlog.free_at(now)
        choice = self.best(request, able, 0.0, now)
        self._turns.begin_walk()
        if is_open(choice.worker, now, LEAD_S) and self._take(request, choice, able, now):
            return True
        self.wake_at = self._next_opening(now)
        return False

    def soonest(self, request: Request, now: float) -> float:
        """The instant at which a prefill worker could have computed a prompt that came now and went first."""
        able = self._pairs.able(request, now)
        for worker in able:
            worker.backlog.booked_until = worker.backlog.free_at(now)
        return self.best(request, able, 0.0, now).finish if able else inf

    def best(self, request: Request, able: Sequence[WorkerLoad], behind: float, now: float) -> Choice:
        """The best worker for a prompt: where it is computed early and with little work.

        A second of work counts `1 + behind` times: it delays this prompt, and as many as wait behind it.
        """
        prompt = request.prompt_tokens
        cached = request.cached
        if request.block_keys:
            cached = self._foreseen.add_to(cached, request.block_keys)
        counts = 1.0 + behind
        best, best_score, best_cached = able[0], inf, 0
        scores: list[float] = []
        extra = self._pairs.extra_s(request, able, now)
        for place, worker in enumerate(able):
            backlog = worker.backlog
            have = min(cached.get(worker.name, 0), prompt - 1) if cached else 0
            uncached, (a, b, c) = prompt - have, backlog.cost.weights
            score = backlog.booked_until + counts * (a + uncached * (b + c * (have + 0.5 * uncached)))
            if extra is not None:
                score += extra[place]
            if worker.weight != 1.0:
                score = now + (score - now) / max(worker.weight, LEAST_WEIGHT)
            scores.append(score)
            if score < best_score:
                best, best_score, best_cached = worker, score, have
        home = False
        if not best_cached:
            limit = best_score + _NEAR_S + _NEAR_SHARE * (best_score - now)
            near = [able[place] for place, score in enumerate(scores) if score <= limit]
            if len(near) > 1:
                best, home = self._cold(request, able, near)
        return Choice(best, best.backlog.booked_until, prompt - best_cached, best_cached, scores, home)

    def _cold(
        self, request: Request, able: Sequence[WorkerLoad], near: Sequence[WorkerLoad]
    ) -> tuple[WorkerLoad, bool]:
        """Of workers that are about as good, for a prompt that they do not hold: its session's home, or the next.

        A prompt of no session goes to the one that was used least recently.
        """
        if self._homes is not None and self._has_homes and request.spec.session:
            names = {worker.name: worker for worker in near}
            ring = tuple([worker.name for worker in able])
            for name in self._homes.order(request.spec.session, ring):
                if name in names:
                    return names[name], True
        if self._ledger.gateways:
            return two_choices(near, self._ledger.chance), False
        longest_ago = near[0]
        for worker in near:
            if worker.last_granted < longest_ago.last_granted:
                longest_ago = worker
        return longest_ago, False

    def _take(self, request: Request, choice: Choice, able: Sequence[WorkerLoad], now: float) -> bool:
        """Grant a prompt to the worker chosen; False where that has no room after all."""
        if not has_room(choice.worker, choice.uncached, request.prompt_tokens):
            return False
        if self._turns.waits(request, choice.worker, choice.finish - choice.start, now):
            return False
        if not self._grant(request, choice, _placement(choice, able, now), now):
            return False
        if self._foresees:
            self._foreseen.granted(choice.worker.name, request.block_keys, choice.finish)
        self._lineup.took(request, choice.uncached, choice.finish - choice.start, now)
        return True

    # ------------------------------------------------------------------------ the walk

    def walk(self, now: float) -> Iterator[Request]:
        """Grant what can be granted; yields each request after its leases are booked."""
        self._foreseen.begin_walk(now)
        self._turns.begin_walk()
        opened, spare_s = self._survey(now), self._alone.spare_s(now)
        if opened or spare_s > 0.0:
            yield from self._walk(now, opened, spare_s)
        self.wake_at = self._next_opening(now)
        if self._queue.waits and self._alone.again_s < inf:
            self.wake_at = sooner(self.wake_at, now + self._alone.again_s)

    def _survey(self, now: float) -> int:
        """Note for each worker when it is free and whether it is open; returns how many are."""
        opened = 0
        depth = self._depth()
        for worker in self._ledger:
            if worker.prefills:
                backlog = worker.backlog
                backlog.booked_until = backlog.free_at(now)
                backlog.reserved = not is_open(worker, now, backlog.lead_s(depth))
                if not backlog.reserved:
                    opened += 1
        return opened

    def _walk(self, now: float, opened: int, spare_s: float) -> Iterator[Request]:
        """`opened`: so many workers may take a prompt; `spare_s`: so long it may take where it goes to a D instead."""
        matches, depth, looked_at = MATCHES, self._depth(), LOOKED_AT if spare_s > 0.0 else 0
        behind = self.behind()
        for request in self._lineup.head(self._queue, WALK_REQUESTS, now):
            able = self._pairs.able(request, now)
            if not able:
                continue
            if request.block_keys and matches and now - request.matched_at > KEPT_S / 2:
                request.match(self._index.match(request.block_keys), now)
                matches -= 1
            choice = self.best(request, able, behind, now)
            if looked_at and self._takes_s(request, choice) <= spare_s:
                looked_at -= 1
                if self._alone.place(request, choice.finish, behind, now):
                    self._lineup.took_elsewhere(request.spec.tenant, request.prompt_tokens - request.best_cached)
                    self._queue.remove(request)
                    yield request
                    continue
            backlog = choice.worker.backlog
            granted = not backlog.reserved and self._take(request, choice, able, now)
            if granted:
                self._queue.remove(request)
                yield request
            elif not self._keeps_places:
                continue
            elif self._foresees:
                self._foreseen.plan(choice.worker.name, request.block_keys)
            backlog.booked_until = max(backlog.booked_until, choice.finish)
            if not backlog.reserved and not (granted and is_open(choice.worker, now, backlog.lead_s(depth))):
                backlog.reserved = True
                opened -= 1
            if opened <= 0 and not looked_at:
                return

    def _takes_s(self, request: Request, choice: Choice) -> float:
        """What a prompt adds to a pass where most of it is cached."""
        return choice.worker.backlog.cost.added_s(request.prompt_tokens - request.best_cached, request.best_cached)

    def _depth(self) -> float:
        """As how many prompts for each prefill worker what is sent ahead is measured."""
        return self._waiting() if self._sends_ahead else 0.0

    def behind(self) -> float:
        """How many prompts a second of a worker's time delays, as far as it counts."""
        return min(self._waiting(), self._most_behind)

    def _waiting(self) -> float:
        """How many prompts wait for each prefill worker."""
        return (len(self._queue.waits) + self._ledger.others_waiting) / max(1, self._ledger.prefill_count)

    def _next_opening(self, now: float) -> float | None:
        """The first instant at which a worker that is closed now opens, or an answer is worth another thought."""
        first, check, another = self._turns.wake_at, inf, False
        depth = self._depth()
        for worker in self._ledger:
            if not worker.prefills or worker.seqs + worker.other_seqs >= worker.max_seqs:
                continue
            at = worker.backlog.opens_at(now, worker.backlog.lead_s(depth))
            if at is None:
                continue
            if at > now:
                first = min(first, at)
            elif worker.usable(now):
                another = True
        if another:  # whoever waits for a worker that is late may go there
            for worker in self._ledger:
                at = worker.backlog.next_check(now) if worker.prefills else None
                if at is not None:
                    check = min(check, at)
        first = min(first, check)
        return first if first < inf else None


def is_open(worker: WorkerLoad, now: float, lead_s: float) -> bool:
    """Can it take a prompt now, as far as time and sequences go? `lead_s`: how much work may be sent ahead."""
    if not worker.takes_work or worker.seqs + worker.other_seqs >= worker.max_seqs:
        return False
    at = worker.backlog.opens_at(now, lead_s)
    return at is not None and at <= now


def has_room(worker: WorkerLoad, uncached: int, prompt_tokens: int) -> bool:
    """Is there room for so much to compute, and for the KV of the whole prompt? An idle worker takes any length."""
    spec = worker.spec
    waiting = worker.prefill_tokens + worker.other_prefill_tokens
    if waiting and waiting + uncached > spec.max_batch_tokens:
        return False
    capacity = spec.kv_capacity_tokens
    kept = worker.kv_tokens + worker.other_kv_tokens
    return capacity is None or kept == 0 or kept + prompt_tokens <= capacity


def _placement(choice: Choice, able: Sequence[WorkerLoad], now: float) -> Placement:
    """The choice with its reasons: candidates by the seconds that were compared."""
    shown = sorted([(score - now, able[place].name) for place, score in enumerate(choice.scores)])[:_SHOWN]
    reason = "home of its session" if choice.home else "computed there soonest for the least work"
    candidates = tuple([(name, seconds) for seconds, name in shown])
    name, start, finish = choice.worker.name, choice.start - now, choice.finish - now
    return Placement(name, PREFILL_LEG, reason, candidates, start, finish, choice.cached)
