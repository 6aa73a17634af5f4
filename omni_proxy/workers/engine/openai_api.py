"""Request bodies of the OpenAI API as vLLM extends it: their fields, their limits, and what is refused. Pure.

Every refusal is an `ApiError` that names the field and the value. Unknown fields are accepted and ignored; known
fields that this engine cannot honour are refused unless they hold their neutral value, because ignoring them would
silently change the answer. Knows nothing of tokenizers, engines or sockets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from omni_proxy.workers.engine.api_error import ApiError, bad_value, shorten
from omni_proxy.workers.engine.structure import STRUCTURE_FIELDS, Structure, structure_of

__all__ = ["ApiError", "bad_value", "shorten"]

MAX_CHOICES: Final = 128
"""Most continuations that one call may ask for: prompts times `n`."""
MAX_LOGPROBS: Final = 20
MAX_STOPS: Final = 64

_ABSENT: Final = object()
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "best_of": (None, 1),
    "bad_words": (None, []),
    "continue_final_message": (None, False),
    "lora_name": (None,),
    "lora_path": (None,),
    "lora_request": (None,),
    "prompt_embeds": (None,),
    "suffix": (None, ""),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
}
"""Fields that change the answer in a way this engine cannot, with the values under which they change nothing."""
_NEUTRAL_IN_CHAT: Final[Mapping[str, tuple[object, ...]]] = {"echo": (None, False)}


class StreamOptions(Struct):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(Struct, kw_only=True):
    """Fields that chat and text completions share. None means absent."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Annotated[int, Meta(ge=0)]] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | str | None = None
    bootstrap_room: int | str | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None

    def structure(self) -> Structure | None:
        """The structure that the answer must have; raises `ApiError` 400."""
        return structure_of({name: getattr(self, name) for name in STRUCTURE_FIELDS})

    def stops(self) -> tuple[str, ...]:
        """The stop strings as a tuple; refuses empty ones and too many."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if "" in stops:
            raise bad_value("stop", self.stop, "a stop string cannot be empty")
        if len(stops) > MAX_STOPS:
            raise bad_value("stop", self.stop, f"at most {MAX_STOPS} stop strings are allowed")
        return stops


class ChatRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    prompt_token_ids: list[Annotated[int, Meta(ge=0)]] | None = None
    """The rendered messages as token ids, where somebody in front has tokenised them already."""
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/completions; `prompt` is taken apart by `split_prompts`."""

    prompt: Any
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    """0 only with `echo`: the prompt and its log-probabilities, nothing more."""
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(Struct, kw_only=True):
    """Body of POST /tokenize: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[Annotated[int, Meta(ge=0)]]
    model: str | None = None


class ReleaseRequest(Struct, kw_only=True):
    """Body of POST /omni/release; the id is `remote_request_id` of the prefill leg's answer."""

    request_id: str


Body = TypeVar("Body", bound=Struct)
_PATH: Final = re.compile(r"^(?P<rule>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_STEP: Final = re.compile(r"\.([^.\[]+)|\[(\d+)\]|\[\.\.\.\]")
_MISSING: Final = re.compile(r"missing required field `(\w+)`")


def parse_body(data: bytes, kind: type[Body]) -> Body:
    """Decode a JSON body into `kind`; raises `ApiError` 400 that names the field at fault."""
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ApiError(400, f"the body is not valid JSON: {exc}") from exc
    if not isinstance(raw, dict):
        raise ApiError(400, f"the body must be a JSON object, got {shorten(raw)}")
    _refuse_unsupported(raw, _NEUTRAL)
    if kind is ChatRequest:
        _refuse_unsupported(raw, _NEUTRAL_IN_CHAT)
    if raw.get("stream_options") is not None and not raw.get("stream"):
        raise bad_value("stream_options", raw["stream_options"], "it is allowed only when stream is true")
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as exc:
        raise _explain(exc, raw) from exc


def _refuse_unsupported(raw: Mapping[str, Any], table: Mapping[str, tuple[object, ...]]) -> None:
    for name, neutral in table.items():
        value = raw.get(name, _ABSENT)
        if value is not _ABSENT and value not in neutral:
            raise bad_value(name, value, "this engine does not support it")


def _explain(exc: msgspec.ValidationError, raw: Any) -> ApiError:
    """Turn msgspec's words ("Expected `int` >= 1 - at `$.n`") into a sentence with the field and its value."""
    match = _PATH.match(str(exc))
    rule, path = (match["rule"], match["path"] or "") if match else (str(exc), "")
    missing = _MISSING.search(rule)
    if missing:
        param = f"{path}.{missing[1]}".lstrip(".")
        return ApiError(400, f"{param}: this field is required", param)
    value, name = _look_up(raw, path)
    rule = rule[:1].lower() + rule[1:]
    if value is _ABSENT:
        return ApiError(400, f"{name}: {rule}", name)
    return bad_value(name, value, re.sub(r", got `[^`]*`$", "", rule))


def _look_up(raw: Any, path: str) -> tuple[Any, str]:
    """The value at a msgspec path and the path without `[...]`; `_ABSENT` where the path does not say which item."""
    name = path.lstrip(".")
    value = raw
    for step in _STEP.finditer(path):
        try:
            if step[1] is not None:
                value = value[step[1]]
            elif step[2] is not None:
                value = value[int(step[2])]
            else:
                return _ABSENT, name.replace("[...]", "")
        except (KeyError, IndexError, TypeError):
            return _ABSENT, name
    return value, name


Prompt = str | tuple[int, ...]
"""Text still to be tokenised, or token ids."""


def split_prompts(value: Any) -> list[Prompt]:
    """The prompts of a completion call: a string, a list of strings, token ids, or a list of lists of token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise bad_value("prompt", value, "expected text, token ids, or a non-empty list of either")
    if all(isinstance(item, str) for item in value):
        return list(value)
    if all(isinstance(item, list) for item in value):
        return [_token_ids(item, f"prompt[{index}]") for index, item in enumerate(value)]
    return [_token_ids(value, "prompt")]


def _token_ids(value: list[Any], param: str) -> tuple[int, ...]:
    if set(map(type, value)) <= {int} and min(value, default=0) >= 0:
        return tuple(value)
    for index, item in enumerate(value):
        if type(item) is not int or item < 0:
            raise bad_value(f"{param}[{index}]", item, "expected a token id")
    return tuple(value)
