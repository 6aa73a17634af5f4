"""What can never be served is refused here, before it is queued. Pure.

Checks one request against the engine's fixed limits; what depends on the moment (memory, load) only makes it wait.
"""

from __future__ import annotations

from math import isfinite

from omni_proxy.workers.engine.types import (
    EngineConfig,
    EngineInfo,
    EngineRequest,
    InvalidRequest,
    PullFrom,
    RequestTooLong,
    SamplingParams,
)


def check_request(request: EngineRequest, info: EngineInfo) -> None:
    """Raise InvalidRequest (RequestTooLong for a prompt that cannot fit), naming the field."""
    prompt = request.prompt_token_ids
    _require(bool(request.request_id), "request_id", "must not be empty")
    _require(len(prompt) > 0, "prompt", "must have at least one token")
    if len(prompt) >= info.max_model_len:
        raise RequestTooLong(
            "prompt",
            f"has {len(prompt)} tokens, which leaves no room for a new one in the maximum of"
            f" {info.max_model_len} tokens",
        )
    known = min(prompt) >= 0 and max(prompt) < info.vocab_size
    _require(known, "prompt", f"has token ids outside 0..{info.vocab_size - 1}")
    _check_sampling(request.sampling, info)
    if request.pull is not None:
        _check_pull(request.pull, len(prompt))
    if request.join is not None:
        _require(0 < request.join.port < 65536, "bootstrap_port", f"names port {request.join.port}")
    for room in (request.room, None if request.join is None else request.join.room):
        _require(room is None or 0 <= room < 2**63, "bootstrap_room", f"must be in 0..2^63-1, got {room}")


def _check_sampling(sampling: SamplingParams, info: EngineInfo) -> None:
    _require(sampling.max_tokens >= 1, "max_tokens", "must be at least 1")
    warm = isfinite(sampling.temperature) and sampling.temperature >= 0
    _require(warm, "temperature", "must be 0 or more")
    _require(0 < sampling.top_p <= 1, "top_p", "must be above 0 and at most 1")
    _require(sampling.top_k >= 0, "top_k", "must be 0 (all tokens) or more")
    _require(0 <= sampling.min_p <= 1, "min_p", "must be in 0..1")
    penalty = sampling.repetition_penalty
    _require(isfinite(penalty) and penalty > 0, "repetition_penalty", "must be above 0")
    for name in ("presence_penalty", "frequency_penalty"):
        _require(isfinite(getattr(sampling, name)), name, "must be a number")
    known = all(0 <= t < info.vocab_size and isfinite(bias) for t, bias in sampling.logit_bias)
    _require(known, "logit_bias", f"must name ids in 0..{info.vocab_size - 1}")
    in_range = 0 <= sampling.min_tokens <= sampling.max_tokens
    _require(in_range, "min_tokens", f"must be in 0..{sampling.max_tokens} (max_tokens)")
    if sampling.logprobs is not None:
        asked = 0 <= sampling.logprobs <= info.vocab_size
        _require(asked, "logprobs", f"must be in 0..{info.vocab_size}")
    known = all(0 <= t < info.vocab_size for t in sampling.stop_token_ids)
    _require(known, "stop_token_ids", f"has ids outside 0..{info.vocab_size - 1}")
    ends = sampling.stop_token_ids | info.eos_token_ids
    drawable = sampling.min_tokens == 0 or len(ends) < info.vocab_size
    _require(drawable, "stop_token_ids", "leaves no token to draw before min_tokens")


def _check_pull(pull: PullFrom, prompt_len: int) -> None:
    fits = 1 <= pull.num_tokens <= prompt_len
    _require(
        fits,
        "kv_transfer_params",
        f"offer KV of {pull.num_tokens} tokens for a prompt of {prompt_len}",
    )
    _require(0 < pull.port < 65536, "kv_transfer_params", f"name port {pull.port}")


def _require(holds: bool, field: str, detail: str) -> None:
    if not holds:
        raise InvalidRequest(field, detail)


def check_config(config: EngineConfig) -> None:
    """Raise ValueError, naming the field, for sizes that make no engine."""
    for name in (
        "block_size",
        "kv_cache_bytes",
        "max_num_seqs",
        "max_num_batched_tokens",
        "expert_parallel",
        "speculative_tokens",
        "burst_steps",
    ):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")
    if config.expert_window_steps < 0:
        raise ValueError(f"expert_window_steps must be 0 or more, got {config.expert_window_steps}")
    for name in ("kv_lease_s", "kv_pull_timeout_s"):
        if not getattr(config, name) > 0:
            raise ValueError(f"{name} must be above 0, got {getattr(config, name)}")
    if config.max_num_seqs > config.max_num_batched_tokens:
        raise ValueError(
            f"max_num_seqs {config.max_num_seqs} exceeds max_num_batched_tokens {config.max_num_batched_tokens}"
        )
    if config.quantization is not None and config.expert_parallel > 1:
        raise ValueError("quantization is not supported with expert_parallel")
    if config.draft_model is not None and config.speculation != "head":
        raise ValueError(f"draft_model needs speculation head, got {config.speculation}")
    choices = {
        "role": ("prefill", "decode", "mixed"),
        "speculation": ("ngram", "head", "off"),
        "kv_load_failure_policy": ("fail", "recompute"),
        "dtype": ("float32", "bfloat16"),
        "quantization": (None, "int8", "w8a8"),
    }
    for name, allowed in choices.items():
        if getattr(config, name) not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}")
