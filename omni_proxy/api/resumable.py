"""Which calls can be continued by another pair from their tokens, and what their fields become then. Pure.

Whatever makes the next token depend on more than the tokens before it is refused here: such a stream ends with an
error when it breaks, as all do without `resume`. docs/resume.md says the same in words.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw

from omni_proxy.api.shapes import COUNT, MESSAGES_OF_TEXT, STOPS
from omni_proxy.call import CHAT, COMPLETIONS, Call, Fields, encode_fields

_NEUTRAL: Final[dict[str, tuple[bytes, ...]]] = {
    "frequency_penalty": (b"0", b"0.0"),
    "presence_penalty": (b"0", b"0.0"),
    "response_format": (b'{"type":"text"}', b'{"type": "text"}'),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "thinking_token_budget": (),
    "logits_processors": (b"[]",),
    "logprobs": (b"false",),
    "top_logprobs": (b"0",),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "suffix": (b'""',),
    "functions": (b"[]",),
    "modalities": (b'["text"]',),
    "audio": (),
    "mm_processor_kwargs": (b"{}",),
}
"""Fields that make the next token depend on more than the tokens before it, with the values that do not (and null)."""
_CHAT_ONLY: Final = frozenset(
    {
        "messages",
        "prompt_token_ids",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "chat_template",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
        "documents",
        "reasoning_effort",
        "include_reasoning",
        "response_format",
        "logprobs",
        "top_logprobs",
        "max_completion_tokens",
        "modalities",
        "functions",
        "function_call",
    }
)
"""What has done its work when the messages were rendered, or is neutral by the table above."""
_REPLACED: Final = frozenset({"prompt", "max_tokens", "min_tokens", "stream_options", "return_token_ids", "echo", "n"})


class ResumeRule:
    """For which models streams are continued: all, none, or those that are named."""

    __slots__ = ("_models", "_on")

    def __init__(self, on: bool = False, models: frozenset[str] = frozenset()) -> None:
        self._on = on
        self._models = models

    def covers(self, call: Call) -> bool:
        """May this call's stream be continued when its worker dies?"""
        return (self._on or call.model in self._models) and why_not(call) is None


def why_not(call: Call) -> str | None:
    """The field for which a call's stream cannot be continued; None: it can."""
    if not call.stream or call.path not in (CHAT, COMPLETIONS):
        return "stream"
    if call.whole:
        return call.whole_because
    for name, neutral in _NEUTRAL.items():
        value = bytes(call.fields.get(name, b"null"))
        if value != b"null" and value not in neutral:
            return name
    if _asks(call.fields, "tools", (b"null", b"[]")) and _asks(call.fields, "tool_choice", (b'"none"',), absent=True):
        return "tools"
    if b"continuous_usage_stats" in bytes(call.fields.get("stream_options", b"")):
        return "stream_options"
    return None if call.path == COMPLETIONS or is_text(call) else "messages"


def _asks(fields: Fields, name: str, no: tuple[bytes, ...], absent: bool = False) -> bool:
    return bytes(fields[name]) not in no if name in fields else absent


def is_text(call: Call) -> bool:
    """Are all messages text? The placeholders of images mean nothing without them."""
    try:
        messages = MESSAGES_OF_TEXT.decode(call.fields["messages"])
    except msgspec.MsgspecError:
        return False
    parts = [part for message in messages if isinstance(message.content, list) for part in message.content]
    return all(isinstance(part, str) or part.type == "text" for part in parts)


def stops_of(call: Call) -> tuple[str, ...]:
    """The call's stop strings."""
    stops = STOPS.decode(call.fields.get("stop", Raw(b"null")))
    return (stops,) if isinstance(stops, str) else tuple(stops or ())


def includes_stop(call: Call) -> bool:
    """Does the client want to see the stop string?"""
    return bytes(call.fields.get("include_stop_str_in_output", b"")) == b"true"


def _least(call: Call) -> int:
    try:
        return COUNT.decode(call.fields.get("min_tokens", Raw(b"0")))
    except msgspec.MsgspecError:
        return 0


def continuation(call: Call, prompt: list[int], made: int, max_tokens: int | None) -> Call:
    """The call for the rest of an answer. `prompt`: token ids, at the end the `made` ones of the answer so far."""
    kept = call.fields if call.path == COMPLETIONS else {k: v for k, v in call.fields.items() if k not in _CHAT_ONLY}
    fields = {k: v for k, v in kept.items() if k not in _REPLACED}
    fields["prompt"] = Raw(msgspec.json.encode(prompt))
    fields["max_tokens"] = Raw(b"null" if max_tokens is None else b"%d" % max_tokens)
    if (least := _least(call) - made) > 0:
        fields["min_tokens"] = Raw(b"%d" % least)
    fields["stream_options"] = Raw(b'{"include_usage":true}')
    fields["return_token_ids"] = Raw(b"true")
    rest = call.copy()
    rest.path = COMPLETIONS
    rest.put(fields, encode_fields(fields))
    rest.max_tokens, rest.wants_usage, rest.token_ids = max_tokens, True, b""
    return rest
