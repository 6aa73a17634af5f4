"""Workloads: requests with their instants, lengths and prefix blocks. Pure.

Prompts are known by length and block keys only, as public traces tell them; two prompts share a prefix as far as their
keys are equal. Readers of trace files are in `traces.py`, generated workloads in `synthetic.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Final

from omni_proxy.apc.keys import UNIT_TOKENS
from omni_proxy.messages import RequestSpec

_MODEL_NAME: Final = "simulated"


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request of a workload."""

    arrival_s: float
    """Seconds since the workload's beginning; for a later turn of a session, since the end of the turn before."""
    prompt_tokens: int
    output_tokens: int
    block_keys: tuple[int, ...] = ()
    """One key for each *begun* block of the prompt; the last block may be partly filled."""
    after: int | None = None
    """Index of the request whose end this one waits for."""
    priority: int = 0
    tenant: str = ""

    def full_blocks(self, block_tokens: int) -> tuple[int, ...]:
        """Keys of the blocks that the prompt fills, which are those that an engine can share."""
        return self.block_keys[: self.prompt_tokens // block_tokens]

    def unit_keys(self, block_tokens: int) -> tuple[int, ...]:
        """The keys that a gateway's tokenizer would bring: one for each unit of `apc.keys`.

        A block's key stands for all units in it; an index that counts in blocks of this size reads the last of them.
        """
        units = block_tokens // UNIT_TOKENS
        return tuple(chain.from_iterable(repeat(key, units) for key in self.full_blocks(block_tokens)))

    def spec(self, rid: str) -> RequestSpec:
        """What the core hears of it when it comes under this id."""
        return RequestSpec(
            _MODEL_NAME,
            "/v1/chat/completions",
            self.prompt_tokens,
            max_tokens=self.output_tokens,
            stream=True,
            priority=self.priority,
            tokenize=True,
            external_id=rid,
            tenant=self.tenant,
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival."""

    name: str
    block_tokens: int
    """Tokens in a block of `block_keys`; a multiple of the unit in which the gateway counts prefixes."""
    requests: tuple[SimRequest, ...]

    @property
    def span_s(self) -> float:
        """From the first to the last arrival whose instant is fixed."""
        fixed = [r.arrival_s for r in self.requests if r.after is None]
        return fixed[-1] - fixed[0] if fixed else 0.0

    def head(self, count: int | None) -> Workload:
        """The first `count` requests; None takes all."""
        return self if count is None else replace(self, requests=self.requests[:count])

    def stretched(self, factor: float) -> Workload:
        """The same requests with arrivals times `factor`. What people take to think between turns stays."""
        moved = tuple(r if r.after is not None else replace(r, arrival_s=r.arrival_s * factor) for r in self.requests)
        return replace(self, requests=moved)
