"""Who may come in: bounds on the waiting queue, known models, prompts that fit. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, inf

from omni_proxy.errors import ErrorCode, Refusal
from omni_proxy.lifecycle.request import Request
from omni_proxy.scheduler.load import WorkerLoad
from omni_proxy.scheduler.pools import Pools
from omni_proxy.scheduler.queue import WaitingQueue

_NOBODY_ALONE = (
    "This needs a worker that does prefill and decode by itself (several answers or prompts in one request, 'echo', "
    "'prompt_logprobs', an endpoint that makes no text, or one whose KV cannot be handed over): this model has none."
)


@dataclass(frozen=True, slots=True)
class Admission:
    """Bounds of what may wait. A request that could start at once is never refused for the queue's sake."""

    max_waiting_requests: int = 4096
    max_waiting_tokens: int = 16_000_000

    def refuse_arrival(self, request: Request, pools: Pools, queues: Sequence[WaitingQueue]) -> Refusal | None:
        """The reason why a request may not come in, or None.

        The bounds count here only for a request that could not start at once anyway, because others of its model
        wait: it need not be tokenised to be refused.
        """
        model = request.model
        pool = pools.of(model)
        if pool is None:
            return Refusal(ErrorCode.MODEL_NOT_FOUND, f"The model {model!r} does not exist.")
        if request.alone and not pool.can_alone:
            return Refusal(ErrorCode.INVALID_VALUE, _NOBODY_ALONE)
        for queue in queues:
            if queue.head((model,)) is not None:
                waiting, tokens = sum(map(len, queues)), sum(q.tokens for q in queues)
                return self._refuse(waiting, tokens, request.prompt_tokens)
        return None

    def refuse_wait(self, request: Request, queues: Sequence[WaitingQueue]) -> Refusal | None:
        """The reason why a request that has just lined up, and found no room, may not stay; or None."""
        others = sum(map(len, queues)) - 1
        tokens = sum(q.tokens for q in queues) - request.prompt_tokens
        return self._refuse(others, tokens, request.prompt_tokens)

    def refuse_late(self, request: Request, first_at: float) -> Refusal | None:
        """The reason why a request that names a target cannot meet it, even if its turn was next; or None.

        `first_at`: the instant at which its first token could come then.
        """
        target = request.spec.ttft_target_s
        if target is None or first_at <= request.arrived_at + target:
            return None
        detail = f"The first token cannot come within {target:g} s of the request, as its target asks."
        return Refusal(ErrorCode.QUEUE_FULL, detail)

    def _refuse(self, waiting: int, waiting_tokens: int, prompt_tokens: int) -> Refusal | None:
        if waiting >= self.max_waiting_requests:
            return Refusal(ErrorCode.QUEUE_FULL, f"{waiting} requests are waiting already.")
        if waiting and waiting_tokens + prompt_tokens > self.max_waiting_tokens:
            detail = f"{waiting_tokens} prompt tokens are waiting already."
            return Refusal(ErrorCode.QUEUE_FULL, detail)
        return None

    def refuse_length(self, request: Request, pools: Pools) -> Refusal | None:
        """The reason why a prompt of known length cannot be served by any worker, or None."""
        pool = pools.of(request.model)
        if pool is None or not pool.decode:
            return None
        longest = min(_longest(pool.prefill), _longest(pool.decode))
        tokens = request.prompt_tokens
        if tokens < longest:
            return None
        detail = f"The prompt has {tokens} tokens; the model's context is {longest:.0f}, one of them for the answer."
        return Refusal(ErrorCode.CONTEXT_LENGTH_EXCEEDED, detail)


def retry_after_s(drain_s: float) -> float:
    """Seconds after which to come back: when half of what waits by now should be gone, between 1 s and 2 min."""
    return min(120.0, max(1.0, float(ceil(drain_s / 2))))


def _longest(workers: Iterable[WorkerLoad]) -> float:
    """The longest context on one side; infinite where somebody does not say, or where nobody is needed."""
    return max((inf if w.spec.max_model_len is None else w.spec.max_model_len for w in workers), default=inf)
