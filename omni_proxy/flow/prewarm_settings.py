"""What an operator may spend on computing ahead. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrewarmSettings:
    """How much may be spent. Seconds and tokens as named."""

    share: float = 0.2
    """Of each prefill worker's time."""
    tokens_per_s: float | None = None
    """Computed ahead over all workers; None: no bound but the share."""
    max_tokens: int = 4096
    """Most tokens that one of them may have to compute: so long the real work that comes meanwhile may be held up."""
    wait_s: float = 60.0
    """So long it may wait for its worker to be idle."""
