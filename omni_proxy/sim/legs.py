"""The legs at work in a simulated world: by lease, those whose KV is held, those that wait for a push. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from omni_proxy.messages import Lease
from omni_proxy.sim.job import Job
from omni_proxy.sim.workload import SimRequest


@dataclass(slots=True, eq=False)
class SimLeg:
    """A lease at work: its job, and for D the leg of the P that holds the KV."""

    lease: Lease
    job: Job
    engine: int
    source: SimLeg | None = None
    prefilled: bool = False
    shown: bool = False
    """The gateway has heard its first token."""
    lost: bool = False
    """Its worker died, and its KV with it."""


class Legs:
    """Makes legs and remembers them until they end."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._serial = 0
        self._at_work: dict[Lease, SimLeg] = {}
        self._held: dict[str, SimLeg] = {}
        """By request: the P leg whose KV may be pulled."""
        self._pushing: dict[str, SimLeg] = {}
        """By request: the D leg of parallel mode that waits for P."""
        self._shown: dict[str, int] = {}
        """By request: tokens of its answer that were shown before its worker died; the next one goes on from them."""

    def __contains__(self, leg: SimLeg) -> bool:
        return self._at_work.get(leg.lease) is leg

    # ------------------------------------------------------------------------ made

    def prefill(self, lease: Lease, request: SimRequest, engine: int) -> tuple[SimLeg, SimLeg | None]:
        """A P leg, and the one before it whose KV nobody will ask for any more."""
        before = self._held.get(lease.rid)
        leg = self._held[lease.rid] = self._new(lease, request, engine, keep_kv=True)
        return leg, before

    def decode(self, lease: Lease, request: SimRequest, engine: int, pull: bool) -> SimLeg | None:
        """A D leg, or one that does both; None where it should pull and nobody holds the KV."""
        source = self._held.get(lease.rid) if pull else None
        if pull and source is None:
            return None
        leg = self._new(lease, request, engine, pull=pull)
        leg.source = source
        return leg

    def ahead(self, lease: Lease, request: SimRequest, engine: int) -> SimLeg:
        """A prompt that is computed before anybody asks for it."""
        return self._new(lease, request, engine, keep_kv=True)

    def _new(self, lease: Lease, request: SimRequest, engine: int, keep_kv: bool = False, pull: bool = False) -> SimLeg:
        self._serial += 1
        keys, shown = request.full_blocks(self._block_tokens), self._shown.get(lease.rid, 0)
        prompt, output = request.prompt_tokens + shown, request.output_tokens - shown
        job = Job(lease.rid, self._serial, prompt, output, keys, keep_kv, pull)
        leg = SimLeg(lease, job, engine)
        job.tag = leg
        self._at_work[lease] = leg
        return leg

    # ----------------------------------------------------------------------- ended

    def done(self, leg: SimLeg) -> None:
        """It has told its result; what P holds stays held."""
        self._at_work.pop(leg.lease, None)

    def aborted(self, lease: Lease) -> SimLeg | None:
        """Forget a leg, and what it holds."""
        leg = self._at_work.pop(lease, None)
        if leg is not None and self._held.get(lease.rid) is leg:
            del self._held[lease.rid]
        return leg

    def pulled(self, leg: SimLeg, source: SimLeg) -> None:
        """P's KV is at D."""
        if self._held.get(leg.lease.rid) is source:
            del self._held[leg.lease.rid]

    def closed(self, rid: str) -> SimLeg | None:
        """A request has ended; returns the P leg whose KV is still held."""
        self._pushing.pop(rid, None)
        self._shown.pop(rid, None)
        return self._held.pop(rid, None)

    # ---------------------------------------------------------------------- pushed

    def waits_for_push(self, leg: SimLeg) -> None:
        """D is there before P has computed the prompt."""
        self._pushing[leg.lease.rid] = leg

    def waiting_for(self, leg: SimLeg) -> SimLeg | None:
        """The D leg that waits for this P leg; it waits no longer."""
        return self._pushing.pop(leg.lease.rid, None)

    # ------------------------------------------------------------------------ lost

    def lost_with(self, engine: int) -> list[SimLeg]:
        """A worker died: its legs at work, in order, which are forgotten; what it holds is gone."""
        lost = [leg for leg in self._at_work.values() if leg.engine == engine]
        for leg in lost:
            del self._at_work[leg.lease]
        held = [leg for leg in self._held.values() if leg.engine == engine]
        for leg in held:
            del self._held[leg.lease.rid]
        for leg in (*lost, *held):
            leg.lost = True
        return lost

    def goes_on(self, leg: SimLeg) -> int:
        """An answer broke and is continued elsewhere; returns its tokens so far."""
        shown = self._shown.get(leg.lease.rid, 0) + leg.job.generated
        self._shown[leg.lease.rid] = shown
        return shown

    def tokens_before(self, rid: str) -> int:
        """Tokens of an answer that other workers made."""
        return self._shown.get(rid, 0)
