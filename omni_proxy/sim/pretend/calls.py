"""What a request body means for a pretending worker: a job, an answer to fill, and where its KV is. Pure."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Annotated, Any, Final

from msgspec import Meta

from omni_proxy.sim.job import Job
from omni_proxy.sim.pretend.answers import Answer
from omni_proxy.sim.pretend.options import PretendOptions
from omni_proxy.sim.pretend.prompts import block_keys, text_of_chat, tokens_of_text
from omni_proxy.workers.engine.kv_params import Leg, check_prompt, parse_leg
from omni_proxy.workers.engine.openai_api import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    parse_body,
    split_prompts,
)
from omni_proxy.workers.engine.types import PullFrom

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RENDER: Final = "/render"
"""What follows the path of a generating route where only the prompt's token ids are asked for."""
_Port = Annotated[int, Meta(ge=1, le=65535)]


class _Chat(ChatRequest, kw_only=True):
    bootstrap_host: str | None = None
    bootstrap_port: _Port | None = None
    bootstrap_room: int | None = None


class _Completion(CompletionRequest, kw_only=True):
    bootstrap_host: str | None = None
    bootstrap_port: _Port | None = None
    bootstrap_room: int | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """Where a D leg of SGLang's protocol finds its KV."""

    host: str
    port: int
    number: int


@dataclass(slots=True)
class Call:
    """One request that a worker has taken in."""

    rid: str
    job: Job
    answer: Answer
    tokens: array[int]
    pull: PullFrom | None
    room: Room | None


def rendered(path: str, body: bytes, rid: str, options: PretendOptions) -> list[dict[str, Any]] | dict[str, Any]:
    """What the prompt of a body is in tokens, as vLLM's `--enable-scale-out` tells it. Raises ApiError."""
    chat = path == CHAT + RENDER
    request: _Chat | _Completion = parse_body(body, _Chat) if chat else parse_body(body, _Completion)
    name = f"{'chatcmpl' if chat else 'cmpl'}-{rid}"
    found = {"request_id": name, "token_ids": _tokens(request).tolist(), "sampling_params": {}}
    found["model"] = _model(request.model, options)
    return found if chat else [found]


def read_call(path: str, body: bytes, rid: str, serial: int, now: int, options: PretendOptions) -> Call:
    """Parse and check a body. `now` is the epoch in seconds. Raises ApiError."""
    chat = path == CHAT
    request: _Chat | _Completion = parse_body(body, _Chat) if chat else parse_body(body, _Completion)
    model = _model(request.model, options)
    if (request.n or 1) > 1:
        raise ApiError(400, "n: a pretending worker gives one answer", "n")
    tokens = _tokens(request)
    limit = request.max_tokens
    if isinstance(request, _Chat) and request.max_completion_tokens is not None:
        limit = request.max_completion_tokens
    output = options.output_tokens if limit is None else limit
    _check_length(len(tokens), limit, options)
    output = min(output, options.model.max_model_len - len(tokens))
    leg = parse_leg(request.kv_transfer_params)
    check_prompt(leg.pull, len(tokens))
    room = _room(request, options, leg)
    keep = leg.keep_kv or (room is not None and options.role == "prefill")
    pull = leg.pull is not None or (room is not None and not keep)
    keys = block_keys(tokens, options.block_size, request.cache_salt)
    job = Job(rid, serial, len(tokens), output, keys, keep_kv=keep, pull=pull)
    usage = request.stream_options is not None and bool(request.stream_options.include_usage)
    answer = Answer(rid, chat, model, now, len(tokens), bool(request.stream), usage)
    return Call(rid, job, answer, tokens, leg.pull, room)


def _model(name: str | None, options: PretendOptions) -> str:
    names = options.served_model_name
    if name is None:
        return names[0]
    if name not in names:
        raise ApiError(404, f"The model `{name[:200]}` does not exist.", "model")
    return name


def _tokens(request: _Chat | _Completion) -> array[int]:
    if isinstance(request, _Chat):
        tokens = tokens_of_text(text_of_chat(request.messages))
    else:
        prompts = split_prompts(request.prompt)
        if len(prompts) > 1:
            raise ApiError(400, "prompt: a pretending worker takes one prompt", "prompt")
        (prompt,) = prompts
        tokens = tokens_of_text(prompt) if isinstance(prompt, str) else array("I", prompt)
    # An empty prompt is one token, as a template's frame or a begin mark would be.
    return tokens or array("I", [0])


def _check_length(prompt: int, limit: int | None, options: PretendOptions) -> None:
    longest = options.model.max_model_len
    if limit is not None and limit < 1:
        raise ApiError(400, f"max_tokens: must be at least 1, got {limit}", "max_tokens")
    if prompt >= longest or (limit is not None and prompt + limit > longest):
        asked = f"{prompt} prompt tokens" + (f" and max_tokens {limit}" if limit is not None else "")
        raise ApiError(400, f"This model's maximum context length is {longest} tokens; got {asked}.", "prompt")


def _room(request: _Chat | _Completion, options: PretendOptions, leg: Leg) -> Room | None:
    if request.bootstrap_room is None or leg.pull is not None:
        return None
    if options.role == "prefill" or leg.keep_kv:
        return Room("", 0, request.bootstrap_room)
    if request.bootstrap_host is None or request.bootstrap_port is None:
        raise ApiError(400, "bootstrap_room: bootstrap_host and bootstrap_port are required with it", "bootstrap_host")
    return Room(request.bootstrap_host.strip("[]"), request.bootstrap_port, request.bootstrap_room)
