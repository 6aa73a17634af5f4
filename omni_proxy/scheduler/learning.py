"""What the scheduler learns from what happens: costs, handoffs, lengths of answers. Pure.

It is told of every prompt that was computed and of every answer, by their leases while these are still out.
"""

from __future__ import annotations

from typing import Final

from omni_proxy.lifecycle.request import Request
from omni_proxy.messages import Lease
from omni_proxy.scheduler.ledger import Ledger
from omni_proxy.scheduler.lengths import Lengths

_SMOOTHING: Final = 0.05
_LONGEST_HANDOFF_S: Final = 10.0
_THINKING: Final = "\0thinking"


class Learning:
    """Takes observations to the models of their workers."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lengths = Lengths()
        self.handoff_s = 0.05
        """From P's answer to the first token, as it was lately."""

    def computed(self, request: Request, lease: Lease, cached_tokens: int | None, now: float) -> None:
        """A worker has computed a prompt."""
        self._ledger.holder(lease).backlog.computed(lease, request.prompt_tokens, cached_tokens, now)

    def answering(self, request: Request, lease: Lease, now: float) -> None:
        """The first token of an answer has come."""
        if request.prefill_done_at is not None:
            took_s = min(now - request.prefill_done_at, _LONGEST_HANDOFF_S)
            self.handoff_s += (took_s - self.handoff_s) * _SMOOTHING
        kv_tokens = request.prompt_tokens + self.answer_tokens(request) // 2
        self._ledger.holder(lease).decoding.begun(lease, kv_tokens, now)

    def answered(self, request: Request, lease: Lease, now: float) -> None:
        """An answer has ended by itself."""
        made = request.completion_tokens
        if made is not None:
            made -= request.resumed_tokens  # others made those
        self._ledger.holder(lease).decoding.ended(lease, made, now)
        if request.completion_tokens is not None:
            self._lengths.ended(_kind(request), request.completion_tokens)

    def dropped(self, lease: Lease, now: float) -> None:
        """A leg ended otherwise."""
        worker = self._ledger.holder(lease)
        worker.backlog.dropped(lease, now)
        worker.decoding.ended(lease, None, now)

    def answer_tokens(self, request: Request) -> int:
        """How long an answer should get."""
        return self._lengths.expected(_kind(request), request.spec.max_tokens)

    def kv_tokens(self, request: Request) -> int:
        """KV that the answer will need: prompt and expected output, in tokens."""
        return request.prompt_tokens + self.answer_tokens(request)


def _kind(request: Request) -> str:
    """Answers that are alike in length: those of one model, with thoughts before them or without."""
    spec = request.spec
    return spec.model + _THINKING if spec.thinking else spec.model
