"""Request bodies: parsed once, checked as far as the gateway relies on them, edited without loss.

A body is split into its top-level fields, each kept as the bytes that the client sent. So unknown fields, key order,
and large integers reach the worker unchanged, and an edit touches nothing but its own key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Raw

from omni_proxy.call_errors import NOT_JSON, invalid_json, wrong_field
from omni_proxy.call_shapes import Chat, Completion, Fields, MediaItem, Message, Messages, OneStep, Responses, Shared
from omni_proxy.calls import Call, fields_at
from omni_proxy.errors import ErrorCode, Rejected
from omni_proxy.internals import NESTS, internal_in_form, without_nested
from omni_proxy.multipart import BadForm, model_in_form

__all__ = ["Call", "Fields", "MediaItem"]

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
GENERATING: Final = frozenset({CHAT, COMPLETIONS, RESPONSES, MESSAGES})
"""Endpoints that make an answer token by token: their prompt can be computed by one worker and the rest by another."""

TOKENIZE: Final = frozenset({"/tokenize", "/detokenize"})
MULTIPART: Final = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
"""Bodies that are forms with a file; nothing of them is read but the model's name."""
ONE_STEP: Final = MULTIPART | TOKENIZE | {
    "/v1/embeddings",
    "/v1/rerank",
    "/rerank",
    "/v2/rerank",
    "/v1/score",
    "/score",
    "/v1/classify",
    "/classify",
    "/pooling",
    "/v1/audio/speech",
    "/v1/messages/count_tokens",
}  # fmt: skip
"""Endpoints that one worker answers by itself. What is in neither set is not passed on (engines guard `/v1` only)."""
HOT_PATHS: Final = GENERATING | ONE_STEP

INTERNAL_FIELDS: Final = frozenset(
    {
        "kv_transfer_params",
        "ec_transfer_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "disagg_prefill_dp_rank",
        "routed_dp_rank",
        "data_parallel_rank",
        "rid",
    }
)
"""Fields with which workers talk about KV, and by which they know a request: never taken from a client."""


THINKING_FIELDS: Final = frozenset(
    {"chat_template_kwargs", "reasoning_effort", "reasoning", "thinking", "enable_thinking", "thinking_token_budget"}
)
"""Fields that say whether a model should think before it answers, or how much."""

# What the scanner does with a field, by its name: how it reads its value, and how it marks the body (body_scan.c).
_MODEL, _STREAM, _CAP, _FIRST_CAP, _OPTIONS, _SIZE, _TEXTS, _ONE, _NO, _PROMPT = range(1, 11)
_TAMPERED: Final = 16
_NESTED: Final = 32
_THINKS: Final = 64
_READ: Final = 128
"""msgspec must read the body: a value is unusual, or of a field that the scanner does not read."""
_STREAMED: Final = 256
_USAGE: Final = 512
_PARTS: Final = 1024
_DOUBLED: Final = 2048

_Scan = Callable[[bytes, object, bool], tuple[int, bytes, int, int, str, int | None] | None]
try:
    from omni_proxy._body_scan import names, scan

    _scan: _Scan | None = scan
except ImportError:  # not built: then msgspec does all
    _scan = None

_OF_MESSAGES: Final = frozenset({CHAT, MESSAGES})
_PROMPTS: Final = {CHAT: "messages", MESSAGES: "messages", COMPLETIONS: "prompt", RESPONSES: "input"}
_SHAPES: Final[dict[str, type[Shared]]] = {
    CHAT: Chat,
    COMPLETIONS: Completion,
    RESPONSES: Responses,
    MESSAGES: Messages,
}
_USUAL: Final = {
    "model": _MODEL,
    "stream": _STREAM,
    "stream_options": _OPTIONS,
    "temperature": _SIZE,
    "top_p": _SIZE,
    "stop": _TEXTS,
    "n": _ONE,
    "best_of": _ONE,
    "echo": _NO,
    "use_beam_search": _NO,
    "background": _NO,
}
"""Fields that the scanner reads itself where they are written in the usual way; all others are read by msgspec."""
_CAPS: Final = {"max_tokens": _CAP, "max_completion_tokens": _FIRST_CAP}


def _codes(path: str) -> dict[str, int]:
    """What the scanner does with the fields of an endpoint's body."""
    codes = {field.encode_name: _READ for field in msgspec.structs.fields(_SHAPES[path])}
    codes |= {name: code for name, code in _USUAL.items() if name in codes}
    codes |= {"max_output_tokens": _CAP} if path == RESPONSES else _CAPS
    codes[_PROMPTS[path]] = _PROMPT
    for names, mark in ((INTERNAL_FIELDS, _TAMPERED), (NESTS, _NESTED), (THINKING_FIELDS, _THINKS)):
        codes |= {name: codes.get(name, 0) | mark for name in names}
    return codes


_NAMES: Final[dict[str, object]] = {} if _scan is None else {path: names(_codes(path)) for path in _SHAPES}
_STANDS_FOR: Final[tuple[bytes, ...]] = (b'""', b'[{"role":""}]')
"""What stands for a text and for messages where these were looked at already."""
_LIST: Final = ord("[")
_CLOSES: Final = ord("}")
_VIEWED_BYTES: Final = 8192
"""What is longer is dearer to copy than to look at."""
_TOP = msgspec.json.Decoder(Fields)
_CHAT = msgspec.json.Decoder(Chat)
_COMPLETION = msgspec.json.Decoder(Completion)
_OTHERS: Final[dict[str, msgspec.json.Decoder[Messages] | msgspec.json.Decoder[Responses]]] = {
    MESSAGES: msgspec.json.Decoder(Messages),
    RESPONSES: msgspec.json.Decoder(Responses),
}


def parse_call(path: str, body: bytes) -> Call:
    """Check a body and take from it what the gateway needs. Raises Rejected, naming the field."""
    if path in ONE_STEP:
        return _cleaned(_parse_one_step(path, body))
    found = None if _scan is None else _scan(body, _NAMES[path], path in _OF_MESSAGES)
    if found is None or found[0] & _READ:
        return _parse_generating(path, body, found)
    marks, places, _, _, model, cap = found
    call = Call(
        path,
        body,
        None,
        model,
        stream=marks & _STREAMED != 0,
        max_tokens=cap,
        wants_usage=marks & _STREAMED != 0 and marks & _USAGE != 0,
        tampered=marks & _TAMPERED != 0,
        has_parts=marks & _PARTS != 0,
        says_thinking=marks & _THINKS != 0,
        places=places,
    )
    return _cleaned(call) if marks & _NESTED else call


def _cleaned(call: Call) -> Call:
    """A call without internal fields in the nests of its body."""
    if not NESTS.isdisjoint(call.fields):
        cleaned = without_nested(call.fields, INTERNAL_FIELDS)
        if cleaned is not None:
            call.put(cleaned)
            call.tampered = True
    return call


def check_form(body: bytes, content_type: bytes) -> None:
    """Refuse a multipart form with a field that is not for clients. Raises Rejected."""
    try:
        name = internal_in_form(body, content_type, INTERNAL_FIELDS)
    except BadForm as exc:
        raise Rejected(ErrorCode.INVALID_VALUE, f"The form cannot be read: {exc}.") from exc
    if name is not None:
        raise Rejected(ErrorCode.INVALID_VALUE, f"'{name}' is not for clients.", name)


_Found = tuple[int, bytes, int, int, str, int | None] | None


def _parse_generating(path: str, body: bytes, found: _Found) -> Call:
    """By msgspec, which says what is wrong. `found`: what the scanner has."""
    try:
        shown, fields, has_parts = _decode(path, body, found)
    except msgspec.ValidationError as exc:
        raise wrong_field(str(exc), body) from exc
    except NOT_JSON as exc:
        raise invalid_json(exc) from exc
    prompts = _count_prompts(shown.prompt) if path == COMPLETIONS and isinstance(shown, Completion) else 1
    if shown.max_tokens == 0 and shown.echo is not True:
        raise Rejected(ErrorCode.INVALID_VALUE, "'max_tokens' must be at least 1.", "max_tokens")
    stream, options = shown.stream is True, shown.stream_options
    samples = max(shown.n or 1, shown.best_of or 1)
    because = _why_whole(path, shown, samples, prompts)
    call = Call(
        path=path,
        body=body,
        fields=fields,
        model=shown.model,
        stream=stream,
        max_tokens=_cap(path, shown),
        priority=shown.priority or 0,
        ttft_target_s=shown.ttft_target_s,
        wants_usage=stream and options is not None and options.include_usage is True,
        prompts=prompts,
        samples=samples,
        whole=because is not None,
        whole_because=because,
        parts=prompts * samples if because is not None and _divides(shown) else 1,
        has_parts=has_parts,
        tampered=not INTERNAL_FIELDS.isdisjoint(fields),
        says_thinking=not THINKING_FIELDS.isdisjoint(fields),
        places=b"" if found is None or found[0] & _DOUBLED else found[1],
    )
    return _cleaned(call)


_Shown = Chat | Completion | Messages | Responses


def _decode(path: str, body: bytes, found: _Found) -> tuple[_Shown, Fields, bool]:
    """What the gateway reads of a body, its fields, and whether a message's content is a list of parts."""
    if found is not None:
        marks, places, begin, end, _, _ = found
        stand_in = body[:begin] + _STANDS_FOR[path in _OF_MESSAGES] + body[end:]
        return _shown(path, stand_in), fields_at(body, places), marks & _PARTS != 0
    if not body.isascii():
        body.decode()  # fields that nobody reads here must be text all the same
    shown = _shown(path, body)
    return shown, _TOP.decode(body), isinstance(shown, Chat) and _has_parts(shown.messages)


def _shown(path: str, body: bytes) -> _Shown:
    if path == CHAT:
        return _CHAT.decode(body)
    if path == COMPLETIONS:
        return _COMPLETION.decode(body)
    return _OTHERS[path].decode(body)


def _has_parts(messages: list[Message]) -> bool:
    """Is there a content that begins as a list does? Looked at without a copy: contents are large."""
    return any(memoryview(message.content)[0] == _LIST for message in messages)


def _cap(path: str, shown: _Shown) -> int | None:
    """The most tokens that the answer may have."""
    # The path first: what a struct is not is dear to ask.
    if path == RESPONSES and isinstance(shown, Responses):
        return shown.max_output_tokens
    return shown.max_completion_tokens or shown.max_tokens


def _why_whole(path: str, shown: _Shown, samples: int, prompts: int) -> str | None:
    """The field for which one worker must do it all, or None."""
    if samples > 1:
        return "n" if (shown.n or 1) > 1 else "best_of"
    if prompts > 1:
        return "prompt"
    if (
        path == RESPONSES
        and isinstance(shown, Responses)
        and (shown.background or shown.previous_response_id is not None)
    ):
        return "background" if shown.background else "previous_response_id"
    return _about_the_prompt(shown)


def _about_the_prompt(shown: _Shown) -> str | None:
    if shown.echo is True and isinstance(shown, Completion):
        return "echo"
    if shown.use_beam_search is True:
        return "use_beam_search"
    if shown.logprob_start_len is not None and shown.logprob_start_len >= 0:
        return "logprob_start_len"
    return None if shown.prompt_logprobs is None else "prompt_logprobs"


def _divides(shown: _Shown) -> bool:
    """Several answers and prompts can be made apart; the best of several cannot, nor what is said of the prompt."""
    return (shown.best_of or 1) <= (shown.n or 1) and _about_the_prompt(shown) is None


_ONE_STEP = msgspec.json.Decoder(OneStep)


def _parse_one_step(path: str, body: bytes) -> Call:
    """A call that one worker answers by itself; its other fields are the worker's to judge. `model` may be empty."""
    if path in MULTIPART:
        return Call(path, body, {}, model_in_form(body), max_tokens=1, whole=True, form=True, prompt_bytes=0)
    try:
        shown, fields = _ONE_STEP.decode(body), _TOP.decode(body)
    except msgspec.ValidationError as exc:
        raise wrong_field(str(exc), body) from exc
    except NOT_JSON as exc:
        raise invalid_json(exc) from exc
    return Call(
        path=path,
        body=body,
        fields=fields,
        model=shown.model or "",
        stream=shown.stream is True,
        max_tokens=1,
        whole=True,
        tampered=not INTERNAL_FIELDS.isdisjoint(fields),
        says_thinking=not THINKING_FIELDS.isdisjoint(fields),
        prompt_bytes=0 if path in TOKENIZE else None,
    )


def _count_prompts(prompt: str | list[int | str | list[int]]) -> int:
    if isinstance(prompt, str):
        return 1
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        raise Rejected(ErrorCode.INVALID_VALUE, "'prompt' must be text, token ids, or a list of one of them.", "prompt")
    return 1 if kinds == {int} else len(prompt)


# -------------------------------------------------------------------------------------------- editing


_KEYS: Final = {
    name: b"," + msgspec.json.encode(name) + b":"
    for name in (
        *(field.encode_name for shape in (Chat, Completion, Responses) for field in msgspec.structs.fields(shape)),
        *INTERNAL_FIELDS,
        *("usage", "choices", "prompt_tokens_details", "cached_tokens", "ignore_eos", "seed", "top_k", "tools"),
    )
}
"""Names that come often, encoded once, each behind a comma."""


def encode_fields(fields: Mapping[str, bytes | Raw]) -> bytes:
    """A JSON object from raw values."""
    parts: list[bytes | Raw] = []
    for name, raw in fields.items():
        parts.append(key_of(name))
        parts.append(raw)  # prompts are large: nothing of them is copied before all is joined
    return object_of(parts)


def object_of(parts: list[bytes | Raw]) -> bytes:
    """A JSON object from names, each behind a comma, and values; the list is used up."""
    if not parts:
        return b"{}"
    parts[0] = b"{" + parts[0][1:]
    parts.append(b"}")
    return b"".join(parts)


def key_of(name: str) -> bytes:
    """A field's name as it stands before its value, behind a comma."""
    return _KEYS.get(name) or b"," + msgspec.json.encode(name) + b":"


def append_fields(call: Call, extra: Sequence[tuple[str, bytes | Raw]]) -> bytes:
    """The client's body with fields added at its end; the rest stays byte for byte, unless it carried internals.

    Fields that the client sent itself under the same name are replaced where they stand.
    """
    changed = call.tampered
    for name, _ in extra:
        changed = changed or (name not in INTERNAL_FIELDS and call.has(name))
    if changed:
        kept: dict[str, bytes | Raw] = {k: v for k, v in call.fields.items() if k not in INTERNAL_FIELDS}
        return encode_fields(kept | dict(extra))
    body = call.body
    if not extra:
        return body
    end = len(body) - 1 if body[-1] == _CLOSES else body.rindex(b"}")
    parts: list[bytes | Raw | memoryview] = [memoryview(body)[:end] if end > _VIEWED_BYTES else body[:end]]
    for name, raw in extra:
        parts.append(key_of(name))
        parts.append(raw)
    parts.append(b"}")
    return b"".join(parts)
