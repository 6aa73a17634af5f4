"""KV that is kept for another worker: who may read which blocks, and until when. Pure.

A lease begins when a prefill leg ends and ends once: pulled, released or expired. Only who names it whole (engine,
request, blocks, tokens, layout) gets its bytes, so that a stale or mistaken pull is refused instead of served.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Layout = Mapping[str, str | int]
"""What must be equal on both sides for a block's bytes to mean the same."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a puller says it wants; it must match a lease in every field."""

    engine_id: str
    request_id: str
    block_ids: tuple[int, ...]
    num_tokens: int
    prompt_digest: str
    """Identity of the first `num_tokens` prompt tokens."""
    layout: Layout


@dataclass(frozen=True, slots=True)
class Lease:
    """Blocks kept under a request's id. `serial` tells leases of one id apart."""

    request_id: str
    serial: int
    block_ids: tuple[int, ...]
    num_tokens: int
    prompt_digest: str
    expires_at: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a claim is not served, in words for the client."""

    reason: str


class LeaseBook:
    """The leases of one engine. Times are those of one monotonic clock."""

    def __init__(self, engine_id: str, layout: Layout, lease_s: float, grace_s: float) -> None:
        self._engine_id = engine_id
        self._layout = dict(layout)
        self._lease_s = lease_s
        self._grace_s = grace_s
        """A lease being read lives at least this long after each read."""
        self._leases: dict[str, Lease] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._leases

    def grant(self, request_id: str, block_ids: tuple[int, ...], num_tokens: int, digest: str, now: float) -> Lease:
        """Begin a lease. The id must not have one."""
        assert request_id not in self._leases
        self._serial += 1
        lease = Lease(request_id, self._serial, block_ids, num_tokens, digest, now + self._lease_s)
        self._leases[request_id] = lease
        return lease

    def open(self, claim: Claim, now: float) -> Lease | Refusal:
        """The lease that `claim` names, kept alive for reading; or why not."""
        if claim.engine_id != self._engine_id:
            return Refusal(f"this is engine {self._engine_id}, not {claim.engine_id}")
        for name, mine in self._layout.items():
            theirs = claim.layout.get(name)
            if theirs != mine:
                return Refusal(f"KV layouts differ: {name} is {mine} here and {theirs} there")
        lease = self._live(claim.request_id, now)
        if lease is None:
            return Refusal(f"no KV is kept for request {claim.request_id} (never, or no longer)")
        if claim.block_ids != lease.block_ids:
            return Refusal(f"request {claim.request_id} does not have these blocks")
        if claim.num_tokens != lease.num_tokens:
            return Refusal(f"request {claim.request_id} has KV of {lease.num_tokens} tokens, not {claim.num_tokens}")
        if claim.prompt_digest != lease.prompt_digest:
            return Refusal(f"request {claim.request_id} had another prompt or cache salt")
        return self._renew(lease, now)

    def read(self, request_id: str, serial: int, now: float) -> Lease | Refusal:
        """The lease that was opened as `serial`, if it is still the same; kept alive."""
        lease = self._live(request_id, now)
        if lease is None or lease.serial != serial:
            return Refusal(f"the lease of request {request_id} has ended")
        return self._renew(lease, now)

    def touch(self, request_id: str, now: float) -> None:
        """Keep a lease alive that is being read, if there is one."""
        lease = self._live(request_id, now)
        if lease is not None:
            self._renew(lease, now)

    def close(self, request_id: str, serial: int | None = None) -> bool:
        """End a lease early, that of `serial` only if given; False if there is none."""
        lease = self._leases.get(request_id)
        if lease is None or serial not in (None, lease.serial):
            return False
        del self._leases[request_id]
        return True

    def expire(self, now: float) -> list[str]:
        """End the leases whose time is over; returns their ids."""
        over = [rid for rid, lease in self._leases.items() if lease.expires_at <= now]
        for request_id in over:
            del self._leases[request_id]
        return over

    def next_expiry(self) -> float | None:
        return min((lease.expires_at for lease in self._leases.values()), default=None)

    def _live(self, request_id: str, now: float) -> Lease | None:
        lease = self._leases.get(request_id)
        return lease if lease is not None and lease.expires_at > now else None

    def _renew(self, lease: Lease, now: float) -> Lease:
        until = max(lease.expires_at, now + self._grace_s)
        renewed = Lease(
            lease.request_id,
            lease.serial,
            lease.block_ids,
            lease.num_tokens,
            lease.prompt_digest,
            until,
        )
        self._leases[lease.request_id] = renewed
        return renewed
