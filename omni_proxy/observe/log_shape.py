"""The fields of a JSON line of the access log, in their order. A module of its own: structs do not compile."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType


class Refused(Struct):
    """A request that the core never heard of: it was refused, or answered by the gateway itself."""

    time: float
    id: str
    client: str
    request: str
    status: int
    bytes: int
    error: str | None
    outcome: str


class Line(Struct):
    """A request that has ended. Seconds are rounded to microseconds; stages that were skipped are absent."""

    time: float
    id: str
    client: str
    request: str
    status: int
    bytes: int
    error: str | None
    outcome: str | None
    model: str
    mode: str | None
    stream: bool
    workers: list[str]
    prompt_tokens: int
    cached_tokens: int | None
    predicted_tokens: int | None
    generated_tokens: int | None
    resumes: int
    ttft_s: float | None
    encode_s: float | UnsetType = UNSET
    """Before it arrived: not a part of the others."""
    e2e_s: float | UnsetType = UNSET
    received_s: float | UnsetType = UNSET
    tokenizing_s: float | UnsetType = UNSET
    apc_matching_s: float | UnsetType = UNSET
    prefill_waiting_s: float | UnsetType = UNSET
    prefill_scheduled_s: float | UnsetType = UNSET
    prefill_running_s: float | UnsetType = UNSET
    decode_waiting_s: float | UnsetType = UNSET
    decode_scheduled_s: float | UnsetType = UNSET
    decode_running_s: float | UnsetType = UNSET
