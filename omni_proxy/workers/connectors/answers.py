"""What P's answer means to all connectors. Compiled: every request pays for it."""

from __future__ import annotations

from typing import Final

import msgspec

from omni_proxy.json_fields import Value, count_of, json_of, pick
from omni_proxy.messages import Usage

_TOP: Final[tuple[str, ...]] = ("usage", "kv_transfer_params")
_USAGE: Final[tuple[str, ...]] = (
    "prompt_tokens",
    "prompt_tokens_details",
    "input_tokens",
    "input_tokens_details",
    "cache_read_input_tokens",
)
"""In the words of chat and completions, and of responses and messages."""
_DETAILS: Final[tuple[str, ...]] = ("cached_tokens",)


class PrefillAnswer:
    """What P's answer leaves for D. `handoff` None: P gave nothing that D could use."""

    __slots__ = ("handoff", "usage")

    def __init__(self, handoff: bytes | None, usage: Usage) -> None:
        self.handoff: Final = handoff
        self.usage: Final = usage


class GarbageAnswer(Exception):
    """A worker's answer is not what its protocol promises."""


def read_usage_and_params(body: bytes) -> tuple[Usage, bytes | None]:
    """Usage and `kv_transfer_params` (as JSON; None where there are none) of P's answer. Raises GarbageAnswer."""
    try:
        usage, params = pick(body, _TOP)
        return _read_usage(usage), json_of(params)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise GarbageAnswer(f"not the JSON of an answer ({exc})") from exc


def _read_usage(usage: Value) -> Usage:
    raw = json_of(usage)
    if raw is None:
        return Usage()
    prompt, prompt_details, input_tokens, input_details, cache_read = pick(raw, _USAGE)
    details = json_of(input_details if prompt_details is None else prompt_details)
    # Absent details mean that nothing was cached; P's one token is not part of the answer.
    cached = cache_read if details is None else pick(details, _DETAILS)[0]
    return Usage(count_of(input_tokens if prompt is None else prompt), None, count_of(cached) or 0)
