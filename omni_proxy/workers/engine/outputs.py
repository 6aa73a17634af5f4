"""What the engine says of a sequence after a step."""

from __future__ import annotations

from omni_proxy.workers.engine.sampler import Drawn
from omni_proxy.workers.engine.sequence import Sequence
from omni_proxy.workers.engine.types import FinishReason, Handoff, Output


def output_of(
    seq: Sequence,
    drawn: tuple[Drawn, ...],
    reason: FinishReason | None = None,
    handoff: Handoff | None = None,
    error: str | None = None,
) -> Output:
    """The tokens that were drawn and, when it has ended, why."""
    logprobs = [one.logprob for one in drawn if one.logprob is not None]
    return Output(
        seq.request_id,
        tuple([one.token_id for one in drawn]),
        tuple(logprobs) or None,
        reason,
        seq.cached_tokens,
        handoff,
        error,
        tuple(seq.scores) if seq.request.prompt_logprobs is not None and seq.num_generated == 1 else None,
    )


def say(exc: BaseException) -> str:
    """Why a request has failed."""
    return f"{type(exc).__name__}: {exc}"
