"""Request bodies: parsed once, checked as far as the gateway relies on them, edited without loss.

A body is split into its top-level fields, each kept as the bytes that the client sent. So unknown fields, key order,
and large integers reach the worker unchanged, and an edit touches nothing but its own key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Raw, Struct

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


_INT64: Final = 2**63 - 1
"""Numbers that the core hears of travel between processes."""


class _Message(Struct):
    role: str
    content: Raw = Raw(b"null")


class _Shared(Struct):
    """The fields that the gateway itself reads or vouches for, of either endpoint; all others pass unread."""

    model: Annotated[str, Meta(min_length=1)]
    stream: bool | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=_INT64)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=_INT64)] | None = None
    n: Annotated[int, Meta(ge=1, le=_INT64)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=_INT64)] | None = None
    priority: Annotated[int, Meta(ge=-_INT64, le=_INT64)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(ge=0)] | None = None
    stop: str | list[str] | None = None
    stream_options: _StreamOptions | None = None
    echo: bool | None = None
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = None


class _StreamOptions(Struct):
    include_usage: bool | None = None


class _Chat(_Shared, kw_only=True):
    messages: Annotated[list[_Message], Meta(min_length=1)]


class _Completion(_Shared, kw_only=True):
    prompt: str | Annotated[list[int | str | list[int]], Meta(min_length=1)]


_TOP = msgspec.json.Decoder(Fields)
_CHAT = msgspec.json.Decoder(_Chat)
_COMPLETION = msgspec.json.Decoder(_Completion)
_NOT_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_PLACE = re.compile(r" - at `\$\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]*)`")


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
    whole_because: str | None = None
    """The field that asks for that."""
    tampered: bool = False
    """The client sent internal fields; they must not reach a worker."""
    token_ids: bytes = b""
    """The prompt's token ids as JSON, where it was text and workers are to get them."""


def parse_call(path: str, body: bytes) -> Call:
    """Check a body and take from it what the gateway needs. Raises Rejected, naming the field."""
    try:
        shown, fields = _decode(path, body)
    except msgspec.ValidationError as exc:
        raise _wrong_field(str(exc), body) from exc
    except _NOT_JSON as exc:
        raise _invalid_json(exc) from exc
    prompts = 1 if isinstance(shown, _Chat) else _count_prompts(shown.prompt)
    if shown.max_tokens == 0 and shown.echo is not True:
        raise Rejected(ErrorCode.INVALID_VALUE, "'max_tokens' must be at least 1.", "max_tokens")
    stream, options = shown.stream is True, shown.stream_options
    samples = max(shown.n or 1, shown.best_of or 1)
    because = _why_whole(shown, samples, prompts)
    return Call(
        path=path,
        body=body,
        fields=fields,
        model=shown.model,
        stream=stream,
        max_tokens=shown.max_completion_tokens or shown.max_tokens,
        priority=shown.priority or 0,
        wants_usage=stream and options is not None and options.include_usage is True,
        prompts=prompts,
        samples=samples,
        whole=because is not None,
        whole_because=because,
        tampered=not INTERNAL_FIELDS.isdisjoint(fields),
    )


def _decode(path: str, body: bytes) -> tuple[_Chat | _Completion, Fields]:
    if not body.isascii():
        body.decode()  # fields that nobody reads here must be text all the same
    shown: _Chat | _Completion = _CHAT.decode(body) if path == CHAT else _COMPLETION.decode(body)
    return shown, _TOP.decode(body)


def _why_whole(shown: _Chat | _Completion, samples: int, prompts: int) -> str | None:
    """The field for which one worker must do it all, or None."""
    if samples > 1:
        return "n" if (shown.n or 1) > 1 else "best_of"
    if prompts > 1:
        return "prompt"
    if shown.echo is True:
        return "echo"
    if shown.use_beam_search is True:
        return "use_beam_search"
    return None if shown.prompt_logprobs is None else "prompt_logprobs"


def _invalid_json(exc: Exception) -> Rejected:
    what = "UTF-8 text" if isinstance(exc, UnicodeDecodeError) else "valid JSON"
    return Rejected(ErrorCode.INVALID_JSON, f"The request body is not {what}: {exc}.")


def _wrong_field(message: str, body: bytes) -> Rejected:
    """What msgspec says of a wrong value, in the words of the API: the field, the rule, the value."""
    place = _PLACE.search(message)
    missing = _MISSING.search(message)
    rule = _PLACE.sub("", message)
    if missing is not None:
        name = f"{place[1]}.{missing[1]}" if place is not None else missing[1]
        return Rejected(ErrorCode.INVALID_VALUE, f"'{name}' is required.", name)
    if place is None or not place[1]:
        return Rejected(ErrorCode.INVALID_JSON, f"The request body must be a JSON object: {rule}.")
    try:
        shown = bytes(_TOP.decode(body).get(place[1].partition(".")[0].partition("[")[0], b""))[:80]
    except _NOT_JSON as exc:  # behind the wrong value it is not even JSON
        return _invalid_json(exc)
    text = shown.decode("utf-8", "replace")
    return Rejected(ErrorCode.INVALID_VALUE, f"'{place[1]}' is not valid: {rule}; got {text}.", place[1])


def _count_prompts(prompt: str | list[int | str | list[int]]) -> int:
    if isinstance(prompt, str):
        return 1
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        raise Rejected(ErrorCode.INVALID_VALUE, "'prompt' must be text, token ids, or a list of one of them.", "prompt")
    return 1 if kinds == {int} else len(prompt)


# -------------------------------------------------------------------------------------------- editing


_KEYS: Final = {
    name: msgspec.json.encode(name) + b":"
    for name in (
        *(field.encode_name for shape in (_Chat, _Completion) for field in msgspec.structs.fields(shape)),
        *INTERNAL_FIELDS,
        *("usage", "choices", "prompt_tokens_details", "cached_tokens", "ignore_eos", "seed", "top_k", "tools"),
    )
}
"""Names that come often, encoded once."""


def encode_fields(fields: Mapping[str, bytes | Raw]) -> bytes:
    """A JSON object from raw values."""
    parts = [(_KEYS.get(name) or msgspec.json.encode(name) + b":") + bytes(raw) for name, raw in fields.items()]
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
