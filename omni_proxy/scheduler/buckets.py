"""Workers that are preferred for prompts of some length, and when others take these prompts all the same. Pure.

Long prompts hold up short ones that are computed behind them, and need memory that short ones leave idle. Where an
operator keeps workers for each, a prompt stays with its own until another would serve it sooner by `overflow_s`.
"""

from __future__ import annotations

from collections.abc import Sequence

from omni_proxy.scheduler.load import WorkerLoad
from omni_proxy.scheduler.settings import LengthBucket


class Buckets:
    """Ranges of prompt length with their workers, in order of length."""

    def __init__(self, buckets: Sequence[LengthBucket], overflow_s: float) -> None:
        self._buckets = tuple((bucket.up_to_tokens, frozenset(bucket.workers)) for bucket in buckets)
        self._overflow_s = overflow_s

    def away_s(self, prompt_tokens: int, workers: Sequence[WorkerLoad]) -> list[float] | None:
        """How much later each worker is taken to be for a prompt of this length; None: all alike.

        All are alike, too, where none of them is preferred: the bucket is about other workers, or its own are gone.
        """
        for up_to, preferred in self._buckets:
            if up_to is None or prompt_tokens <= up_to:
                away = [0.0 if _configured(worker) in preferred else self._overflow_s for worker in workers]
                return away if 0.0 in away and any(away) else None
        return None


def _configured(worker: WorkerLoad) -> str:
    """The name in the config: behind it a data-parallel rank has its own."""
    return worker.name.partition("@")[0]
