"""Several gateways before the same workers: what the others hold counts beside what is ours. Pure.

The ledger's own counts stay exact and ours alone. What others were last known to hold is written beside them, whole
each time, and is forgotten as a whole: whoever hears nothing of the others any more schedules as if it was alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

from omni_proxy.messages import OthersHeard, WorkerShare
from omni_proxy.scheduler.ledger import Ledger
from omni_proxy.scheduler.load import WorkerLoad


def hear(ledger: Ledger, event: OthersHeard, now: float) -> None:
    """Take over what the others hold on each worker."""
    ledger.gateways = event.gateways
    ledger.place = event.place
    ledger.turn_s = event.turn_s
    ledger.others_waiting = event.waiting
    named = {share.worker: share for share in event.loads}
    for worker in ledger:
        share = named.get(worker.name)
        if share is not None:
            _set(worker, share.seqs, share.prefill_tokens, share.kv_tokens, share.busy_s, now)
        elif worker.shared:
            _set(worker, 0, 0, 0, 0.0, now)
    for name, for_s in event.distrusted:
        ledger.distrust(name, now + for_s)


def _set(worker: WorkerLoad, seqs: int, prefill_tokens: int, kv_tokens: int, busy_s: float, now: float) -> None:
    worker.shared = seqs > 0 or kv_tokens > 0 or busy_s > 0
    worker.other_seqs = seqs
    worker.other_prefill_tokens = prefill_tokens
    worker.other_kv_tokens = kv_tokens
    worker.backlog.others(busy_s if worker.prefills else 0.0, now, prefill_tokens > 0)
    worker.decoding.others(seqs, kv_tokens, now)


def own_shares(workers: Iterable[WorkerLoad], now: float) -> list[WorkerShare]:
    """What this gateway has put on each worker, as others should hear it; idle workers are left out."""
    return [
        WorkerShare(w.name, w.seqs, w.prefill_tokens, w.kv_tokens, w.backlog.own_s(now))
        for w in workers
        if w.seqs or w.kv_tokens
    ]


def differ(a: Sequence[WorkerShare], b: Sequence[WorkerShare]) -> bool:
    """Does one say anything that does not follow from the other as time passes?"""
    return len(a) != len(b) or any(_held(x) != _held(y) for x, y in zip(a, b, strict=True))


def _held(share: WorkerShare) -> tuple[str, int, int, int]:
    return share.worker, share.seqs, share.prefill_tokens, share.kv_tokens


def added(reports: Iterable[Iterable[WorkerShare]]) -> tuple[WorkerShare, ...]:
    """What several gateways hold, together, by worker."""
    total: dict[str, WorkerShare] = {}
    for shares in reports:
        for share in shares:
            old = total.get(share.worker)
            total[share.worker] = share if old is None else _sum(old, share)
    return tuple([total[name] for name in sorted(total)])


def _sum(a: WorkerShare, b: WorkerShare) -> WorkerShare:
    return WorkerShare(
        a.worker,
        a.seqs + b.seqs,
        a.prefill_tokens + b.prefill_tokens,
        a.kv_tokens + b.kv_tokens,
        a.busy_s + b.busy_s,
    )


def two_choices(near: Sequence[WorkerLoad], chance: Random) -> WorkerLoad:
    """Of workers that are about as good, the better of two taken by chance.

    Gateways with the same view would all take the same one before they hear of each other.
    """
    first = near[chance.randrange(len(near))]
    second = near[chance.randrange(len(near))]
    return second if second.backlog.booked_until < first.backlog.booked_until else first
