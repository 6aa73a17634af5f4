"""One member as the scheduler sees it: its description, whether it may be used, and what it holds for us. Pure.

Who counts is the ledger; what is learned of its speed is in `backlog` and `decoding`.
"""

from __future__ import annotations

from math import inf
from typing import Final, Protocol

from omni_proxy.messages import Role, WorkerSpec
from omni_proxy.scheduler.backlog import Backlog
from omni_proxy.scheduler.cost import DecodeCost, PrefillCost
from omni_proxy.scheduler.decoding import Decoding
from omni_proxy.scheduler.targets import StepLimits

LEAST_WEIGHT: Final = 1e-6
"""Discovery may bring any number; loads are divided by it."""


class WorkerView(Protocol):
    """What a policy may read of a worker."""

    @property
    def spec(self) -> WorkerSpec: ...
    @property
    def weight(self) -> float: ...
    @property
    def prefill_tokens(self) -> int: ...
    @property
    def kv_tokens(self) -> int: ...
    @property
    def seqs(self) -> int: ...
    @property
    def last_granted(self) -> int: ...


class WorkerLoad:
    """One member: its description, whether it may be used, and what it holds for us."""

    __slots__ = (
        "backlog",
        "decoding",
        "draining",
        "ejected_until",
        "ejections",
        "fail_times",
        "kv_tokens",
        "last_granted",
        "max_seqs",
        "name",
        "other_kv_tokens",
        "other_prefill_tokens",
        "other_seqs",
        "prefill_tokens",
        "prefills",
        "reason",
        "role",
        "seen",
        "seqs",
        "share",
        "shared",
        "spec",
        "step_limits",
        "stranded_tokens",
        "turns_to",
        "up",
        "weight",
    )

    def __init__(self, spec: WorkerSpec, prefill: PrefillCost | None = None, decode: DecodeCost | None = None) -> None:
        self.backlog = Backlog(prefill)
        self.decoding = Decoding(decode)
        self.step_limits = StepLimits()
        """What was promised to the answers that it makes."""
        self.role = spec.role
        """What it does now; a mixed worker may have been given one of the two sides."""
        self.turns_to: Role | None = None
        """The side on which it will stand once it has ended what it has; nothing new until then."""
        self.share = 1.0
        """How much of its weight and of its sequences it gets now; below 1 while it starts slowly."""
        self.describe(spec)
        self.up = False
        self.seen = False
        """Has it been up before?"""
        self.draining = False
        self.reason = "not seen yet"
        self.prefill_tokens = 0
        """Prompt tokens that we wait for it to compute."""
        self.kv_tokens = 0
        """Tokens of KV cache that it holds for us: decoding, or kept for a pull."""
        self.stranded_tokens = 0
        """Those of them that nobody will pull and that it keeps until its lease on them ends."""
        self.seqs = 0
        self.other_seqs = 0
        """What other gateways were last known to hold there; the ledger's own counts are without it."""
        self.other_prefill_tokens = 0
        self.other_kv_tokens = 0
        self.shared = False
        """Do they hold anything?"""
        self.last_granted = 0
        self.fail_times: list[float] = []
        self.ejected_until = 0.0
        self.ejections = 0
        """How often its failures have taken it out."""

    def describe(self, spec: WorkerSpec) -> None:
        """Take over a description."""
        self.spec = spec
        self.name = spec.name
        if spec.role is not Role.MIXED:
            self.role, self.turns_to = spec.role, None
        self.prefills = self.role is Role.PREFILL
        self.set_share(self.share, spec.max_seqs)

    def set_share(self, share: float, max_seqs: int) -> None:
        """Set what it gets now. A weight that is no positive number counts as the least."""
        self.share = share
        self.max_seqs = max_seqs
        weight = self.spec.weight * share
        self.weight = weight if LEAST_WEIGHT <= weight < inf else LEAST_WEIGHT

    @property
    def takes_work(self) -> bool:
        """Is it up, and neither draining nor on its way to another side?"""
        return self.up and not self.draining and self.turns_to is None

    def usable(self, now: float) -> bool:
        """May it get new work? An ejected worker may not, unless every other is ejected too."""
        return self.takes_work and now >= self.ejected_until
