"""Who may come in: bounds on the waiting queue, known models, prompts that fit. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from omni_proxy.errors import ErrorCode, Refusal
from omni_proxy.lifecycle.request import Request
from omni_proxy.scheduler.pools import Pools
from omni_proxy.scheduler.queue import WaitingQueue


class Admission(Struct, frozen=True):
    """Bounds of what may wait. A request that could start at once is never refused for the queue's sake."""

    max_waiting_requests: int = 4096
    max_waiting_tokens: int = 16_000_000

    def refuse_arrival(self, request: Request, pools: Pools, queues: Iterable[WaitingQueue]) -> Refusal | None:
        """The reason why a request may not come in, or None."""
        if pools.of(request.spec.model) is None:
            return Refusal(ErrorCode.MODEL_NOT_FOUND, f"The model {request.spec.model!r} does not exist.")
        waiting = sum(len(q) for q in queues)
        if waiting >= self.max_waiting_requests:
            return Refusal(ErrorCode.QUEUE_FULL, f"{waiting} requests are waiting already.", 1.0)
        tokens = sum(q.tokens for q in queues)
        if waiting and tokens + request.prompt_tokens > self.max_waiting_tokens:
            return Refusal(ErrorCode.QUEUE_FULL, f"{tokens} prompt tokens are waiting already.", 1.0)
        return None

    def refuse_length(self, request: Request, pools: Pools) -> Refusal | None:
        """The reason why a prompt of known length cannot be served by any worker, or None."""
        pool = pools.of(request.spec.model)
        if pool is None or not pool.decode:
            return None
        limits = [w.spec.max_model_len for w in (*pool.prefill, *pool.decode)]
        longest = None if None in limits else max(limit for limit in limits if limit is not None)
        if longest is None or request.prompt_tokens < longest:
            return None
        detail = f"The prompt has {request.prompt_tokens} tokens; the model's context is {longest}, one of them for the answer."
        return Refusal(ErrorCode.CONTEXT_LENGTH_EXCEEDED, detail)
