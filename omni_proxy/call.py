"""Request bodies: parsed once, checked as far as the gateway relies on them, edited without loss.

A body is split into its top-level fields, each kept as the bytes that the client sent. So unknown fields, key order,
and large integers reach the worker unchanged, and an edit touches nothing but its own key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec
from msgspec import Raw, Struct

from omni_proxy.errors import ErrorCode, Rejected

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
HOT_PATHS: Final = frozenset({CHAT, COMPLETIONS})

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
    }
)
"""Fields with which workers talk about KV: never taken from a client."""

Fields = dict[str, Raw]


class _Message(Struct):
    role: str
    content: Raw = Raw(b"null")


class _Shown(Struct):
    """The fields that the gateway itself reads or vouches for; all others pass unread."""

    model: str
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    priority: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    stream_options: dict[str, Raw] | None = None
    best_of: int | None = None
    echo: bool | None = None
    prompt_logprobs: int | None = None


_TOP = msgspec.json.Decoder(Fields)
_MESSAGES = msgspec.json.Decoder(list[_Message])
_Prompt = str | list[int | str | list[int]]
_PROMPT = msgspec.json.Decoder(_Prompt)
_FIELD_DECODERS: Final[Mapping[str, msgspec.json.Decoder[object]]] = {
    field.encode_name: msgspec.json.Decoder(field.type) for field in msgspec.structs.fields(_Shown)
}
_MINIMUM: Final[Mapping[str, float]] = {
    "max_tokens": 1,
    "max_completion_tokens": 1,
    "n": 1,
    "best_of": 1,
    "temperature": 0,
    "top_p": 0,
}


class Call(Struct):
    """One client call as the gateway understands it. `body` and `fields` are what the client sent."""

    path: str
    body: bytes
    fields: Fields
    model: str
    stream: bool = False
    max_tokens: int | None = None
    priority: int = 0
    wants_usage: bool = False
    """The client asked for usage in its stream."""
    prompts: int = 1
    samples: int = 1
    whole: bool = False
    """Must be computed by one worker: several answers, or an answer about the prompt itself."""
    tampered: bool = False
    """The client sent internal fields; they must not reach a worker."""


def parse_call(path: str, body: bytes) -> Call:
    """Check a body and take from it what the gateway needs. Raises Rejected, naming the field."""
    fields = _split(body)
    values = {name: _decode(name, raw) for name, raw in fields.items() if name in _FIELD_DECODERS}
    model = values.get("model")
    if not isinstance(model, str) or not model:
        raise Rejected(ErrorCode.INVALID_VALUE, "'model' is required and must be a non-empty string.", "model")
    _check_ranges(values)
    prompts = _check_messages(fields) if path == CHAT else _check_prompt(fields)
    return _call(path, body, fields, values, model, prompts)


def _call(path: str, body: bytes, fields: Fields, values: dict[str, object], model: str, prompts: int) -> Call:
    caps = [v for name in ("max_completion_tokens", "max_tokens") if isinstance(v := values.get(name), int)]
    options = values.get("stream_options")
    stream = values.get("stream") is True
    samples = max((v for name in ("n", "best_of") if isinstance(v := values.get(name), int)), default=1)
    about_prompt = values.get("echo") is True or values.get("prompt_logprobs") is not None
    priority = values.get("priority")
    return Call(
        path=path,
        body=body,
        fields=fields,
        model=model,
        stream=stream,
        max_tokens=caps[0] if caps else None,
        priority=priority if isinstance(priority, int) else 0,
        wants_usage=stream and isinstance(options, dict) and _is_true(options.get("include_usage")),
        prompts=prompts,
        samples=samples,
        whole=samples > 1 or prompts > 1 or about_prompt,
        tampered=not INTERNAL_FIELDS.isdisjoint(fields),
    )


def _split(body: bytes) -> Fields:
    try:
        return _TOP.decode(body)
    except msgspec.ValidationError as exc:
        raise Rejected(ErrorCode.INVALID_JSON, "The request body must be a JSON object.") from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise Rejected(ErrorCode.INVALID_JSON, f"The request body is not valid JSON: {exc}.") from exc


def _decode(name: str, raw: Raw) -> object:
    try:
        return _FIELD_DECODERS[name].decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise _wrong_type(name, raw, exc) from exc


def _wrong_type(name: str, raw: Raw, exc: Exception) -> Rejected:
    shown = bytes(raw)[:80].decode("utf-8", "replace")
    return Rejected(ErrorCode.INVALID_VALUE, f"'{name}' is not valid: {exc}; got {shown}.", name)


def _check_ranges(values: Mapping[str, object]) -> None:
    for name, least in _MINIMUM.items():
        value = values.get(name)
        if isinstance(value, int | float) and value < least:
            raise Rejected(ErrorCode.INVALID_VALUE, f"'{name}' must be at least {least}, got {value}.", name)


def _check_messages(fields: Fields) -> int:
    raw = fields.get("messages")
    if raw is None:
        raise Rejected(ErrorCode.INVALID_VALUE, "'messages' is required.", "messages")
    try:
        messages = _MESSAGES.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise _wrong_type("messages", raw, exc) from exc
    if not messages:
        raise Rejected(ErrorCode.INVALID_VALUE, "'messages' must not be empty.", "messages")
    return 1


def _check_prompt(fields: Fields) -> int:
    raw = fields.get("prompt")
    if raw is None:
        raise Rejected(ErrorCode.INVALID_VALUE, "'prompt' is required.", "prompt")
    try:
        prompt = _PROMPT.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise _wrong_type("prompt", raw, exc) from exc
    if not prompt:
        raise Rejected(ErrorCode.INVALID_VALUE, "'prompt' must not be empty.", "prompt")
    kinds = {type(p) for p in prompt} if isinstance(prompt, list) else set()
    if len(kinds) > 1:
        raise Rejected(ErrorCode.INVALID_VALUE, "'prompt' must be text, token ids, or a list of one of them.", "prompt")
    return len(prompt) if kinds & {str, list} else 1


def _is_true(raw: Raw | None) -> bool:
    return raw is not None and bytes(raw) == b"true"


# -------------------------------------------------------------------------------------------- editing


def without(fields: Fields, drop: Callable[[str], bool]) -> Fields:
    """The fields that are not to be dropped, in their order."""
    return {name: raw for name, raw in fields.items() if not drop(name)}


def encode_fields(fields: Mapping[str, bytes | Raw]) -> bytes:
    """A JSON object from raw values."""
    parts = [b"%b:%b" % (msgspec.json.encode(name), bytes(raw)) for name, raw in fields.items()]
    return b"{" + b",".join(parts) + b"}"


def append_fields(call: Call, extra: Iterable[tuple[str, bytes | Raw]]) -> bytes:
    """The client's body with fields added at its end; the rest stays byte for byte, unless it carried internals.

    Fields that the client sent itself under the same name are replaced where they stand.
    """
    added = dict(extra)
    if call.tampered or not added.keys().isdisjoint(call.fields):
        kept: dict[str, bytes | Raw] = {k: v for k, v in call.fields.items() if k not in INTERNAL_FIELDS}
        return encode_fields(kept | added)
    if not added:
        return call.body
    tail = b",".join(b'"%b":%b' % (name.encode(), bytes(raw)) for name, raw in added.items())
    return b"%b,%b}" % (call.body.rstrip()[:-1], tail)
