"""From a parsed body to engine requests: model, prompt tokens, limits, sampling, handoff. No HTTP.

Everything a client can get wrong that needs the model to be known (its context, its tokenizer, its template) is
refused here, before the engine hears of it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from omni_proxy.prompts.chat_messages import BadMessage, ready_messages
from omni_proxy.prompts.chat_template import ChatTemplate, ChatTemplateError
from omni_proxy.workers.engine.choice import Choice
from omni_proxy.workers.engine.guides import Guide, GuideCompiler
from omni_proxy.workers.engine.kv_params import Bootstrap, Leg, check_prompt, meet, parse_leg
from omni_proxy.workers.engine.model_card import ModelCard
from omni_proxy.workers.engine.openai_api import (
    MAX_CHOICES,
    ApiError,
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    Prompt,
    TokenizeRequest,
    bad_value,
    split_prompts,
)
from omni_proxy.workers.engine.respond import ChatFormat, CompletionFormat, Format, ReplyHead
from omni_proxy.workers.engine.structure import Structure
from omni_proxy.workers.engine.text import ModelTokenizer, StopStrings
from omni_proxy.workers.engine.tool_calls import ToolText
from omni_proxy.workers.engine.tool_choice import tool_text_of
from omni_proxy.workers.engine.types import EngineRequest, SamplingParams

_INLINE_CHARS: Final = 2000
"""Texts up to this length are tokenised on the event loop: about 2 ms at 1 µs per character."""
_SHRINK: Final = 4
"""A tokenizer's normaliser may merge characters; at most this many become one."""


@dataclass(frozen=True, slots=True)
class Call:
    """One API call, ready for the engine."""

    format: Format
    head: ReplyHead
    choices: list[Choice]
    per_prompt: int
    stream: bool
    prompt_field: str


@dataclass(frozen=True, slots=True)
class _Plan:
    """The parts of a call that chat and text completions share, before there are tokens."""

    body: GenerationFields
    id: str
    leg: Leg
    logprobs: int | None
    max_tokens: int | None
    prompt_field: str
    guide: Guide | None = None
    tools: ToolText | None = None
    echo: tuple[str, ...] = ()
    """The prompts' texts, where they are to be shown."""


class CallBuilder:
    """Builds calls for one model. Long texts are tokenised on its threads; the event loop goes on meanwhile."""

    def __init__(
        self, card: ModelCard, tokenizer: ModelTokenizer, template: ChatTemplate | None, role: str = "mixed"
    ) -> None:
        self._role = role
        self.card: Final = card
        self.tokenizer: Final = tokenizer
        self._template = template
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._chat = ChatFormat(tokenizer)
        self._completion = CompletionFormat(tokenizer)
        self._guides = GuideCompiler(tokenizer.to_json, card.vocab_size, card.eos_token_ids)

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def chat(self, body: ChatRequest, request_id: str, created: int) -> Call:
        """A chat completion; raises ApiError."""
        model = self.card.check_name(body.model)
        if body.top_logprobs and not body.logprobs:
            raise bad_value("top_logprobs", body.top_logprobs, "logprobs must be true as well")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        tools, forced = tool_text_of(body.tools, body.tool_choice, body.parallel_tool_calls is not False)
        limit = body.max_completion_tokens
        field = "max_tokens" if limit is None else "max_completion_tokens"
        _check_min_tokens(body, limit or body.max_tokens, field)
        plan = _Plan(
            body=body,
            id=f"{self._chat.id_prefix}-{request_id}",
            leg=self._leg(body),
            logprobs=logprobs,
            max_tokens=limit or body.max_tokens,
            prompt_field="messages",
            guide=await self._guide(body, forced),
            tools=tools,
        )
        if body.prompt_token_ids is None:
            token_ids = await self.chat_tokens(body)
        else:
            token_ids = await self.prompt_tokens(tuple(body.prompt_token_ids), False)
        return self._call(self._chat, plan, [token_ids], model, created)

    async def completion(self, body: CompletionRequest, request_id: str, created: int) -> Call:
        """A text completion; raises ApiError."""
        model = self.card.check_name(body.model)
        _check_min_tokens(body, body.max_tokens, "max_tokens")
        if body.max_tokens == 0 and not body.echo:
            raise bad_value("max_tokens", 0, "must be at least 1 without echo")
        prompts = split_prompts(body.prompt)
        if len(prompts) * (body.n or 1) > MAX_CHOICES:
            rule = f"at most {MAX_CHOICES} continuations (prompts times n) are allowed"
            raise bad_value("n" if len(prompts) == 1 else "prompt", len(prompts), rule)
        plan = _Plan(
            body=body,
            id=f"{self._completion.id_prefix}-{request_id}",
            leg=self._leg(body),
            logprobs=body.logprobs,
            max_tokens=1 if body.max_tokens == 0 else body.max_tokens,
            prompt_field="prompt",
            guide=await self._guide(body, None),
        )
        special = body.add_special_tokens is not False
        token_lists = [await self.prompt_tokens(prompt, special) for prompt in prompts]
        if body.echo:
            plan = replace(plan, echo=tuple(map(self._echo, prompts)))
        return self._call(self._completion, plan, token_lists, model, created)

    def _leg(self, body: GenerationFields) -> Leg:
        where = Bootstrap(body.bootstrap_host, body.bootstrap_port, body.bootstrap_room)
        return meet(parse_leg(body.kv_transfer_params), where, self._role)

    def _echo(self, prompt: Prompt) -> str:
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt, skip_special_tokens=False)

    async def _guide(self, body: GenerationFields, forced: Structure | None) -> Guide | None:
        """What keeps the answer to a structure; compiled on a thread, as a large one takes a while."""
        asked = body.structure()
        if asked is not None and forced is not None:
            raise ApiError(400, f"{asked.field}: tool_choice forces another structure", asked.field)
        structure = asked or forced
        if structure is None:
            return None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._guides.compile, structure)

    async def chat_tokens(self, body: ChatRequest | TokenizeRequest) -> tuple[int, ...]:
        """The prompt of some chat messages."""
        if self._template is None:
            raise ApiError(400, "this model has no chat template; use /v1/completions", "messages")
        generation_prompt = body.add_generation_prompt is not False
        render = self._template.render
        variables = body.chat_template_kwargs
        try:
            messages = ready_messages(body.messages or [])
            text = render(messages, body.tools, generation_prompt, variables)
        except BadMessage as exc:
            raise bad_value(exc.param, exc.value, exc.expected) from exc
        except ChatTemplateError as exc:
            raise ApiError(400, f"messages: {exc}", "messages") from exc
        return await self._tokens(text, bool(body.add_special_tokens), "messages")

    async def prompt_tokens(self, prompt: Prompt, add_special_tokens: bool) -> tuple[int, ...]:
        """The tokens of a text prompt, or token ids checked against the vocabulary."""
        if isinstance(prompt, str):
            return await self._tokens(prompt, add_special_tokens, "prompt")
        largest = max(prompt, default=0)
        if largest >= self.card.vocab_size:
            rule = f"token ids must be below {self.card.vocab_size}"
            raise bad_value("prompt", largest, rule)
        return prompt

    async def _tokens(self, text: str, add_special_tokens: bool, field: str) -> tuple[int, ...]:
        if len(text) <= _INLINE_CHARS:
            return tuple(self._encode(text, add_special_tokens, field))
        least = len(text) // (_SHRINK * self.tokenizer.max_token_chars)
        if least > self.card.max_model_len:
            raise self._too_long(f"more than {least}", field)
        work = partial(self._encode, text, add_special_tokens, field)
        loop = asyncio.get_running_loop()
        return tuple(await loop.run_in_executor(self._threads, work))

    def _encode(self, text: str, add_special_tokens: bool, field: str) -> list[int]:
        try:
            return self.tokenizer.encode(text, add_special_tokens)
        except (UnicodeEncodeError, TypeError) as exc:  # a lone surrogate from a \ud800 escape
            raise ApiError(400, f"{field}: the text is not valid Unicode", field) from exc

    def _call(
        self,
        format: Format,
        plan: _Plan,
        prompts: Sequence[tuple[int, ...]],
        model: str,
        created: int,
    ) -> Call:
        body = plan.body
        per_prompt = body.n or 1
        if not plan.leg.alone and per_prompt * len(prompts) > 1:
            field = "n" if per_prompt > 1 else "prompt"
            raise bad_value(field, per_prompt * len(prompts), "a handoff carries one continuation")
        choices = [
            self._choice(plan, at * per_prompt + sample, sample, token_ids)
            for at, token_ids in enumerate(prompts)
            for sample in range(per_prompt)
        ]
        options = body.stream_options
        head = ReplyHead(
            id=plan.id,
            created=created,
            model=model,
            token_ids=bool(body.return_token_ids),
            logprobs=plan.logprobs,
            include_usage=bool(options and options.include_usage),
            running_usage=bool(options and options.continuous_usage_stats),
            prompt_logprobs=body.prompt_logprobs is not None,
        )
        return Call(format, head, choices, per_prompt, bool(body.stream), plan.prompt_field)

    def _choice(self, plan: _Plan, index: int, sample: int, token_ids: tuple[int, ...]) -> Choice:
        body = plan.body
        check_prompt(plan.leg.pull, len(token_ids))
        scores = body.prompt_logprobs if body.prompt_logprobs is not None else plan.logprobs if plan.echo else None
        if scores is not None and not plan.leg.alone:
            field = "echo" if plan.echo else "prompt_logprobs"
            raise ApiError(400, f"{field}: a handoff carries no log-probabilities of the prompt", field)
        request = EngineRequest(
            request_id=f"{plan.id}-{index}-{secrets.token_hex(4)}",
            prompt_token_ids=token_ids,
            sampling=self._sampling(plan, len(token_ids), sample),
            priority=body.priority or 0,
            keep_kv=plan.leg.keep_kv,
            room=plan.leg.room,
            pull=plan.leg.pull,
            join=plan.leg.join,
            guide=None if plan.guide is None else plan.guide.copy(),
            prompt_logprobs=scores,
            cache_salt=body.cache_salt or "",
        )
        include_stop = bool(body.include_stop_str_in_output)
        return Choice(
            index=index,
            request=request,
            detokenizer=self.tokenizer.detokenizer(body.skip_special_tokens is not False, token_ids),
            stops=StopStrings(() if plan.leg.room is not None else body.stops(), include_stop),
            include_stop=include_stop,
            tools=None if plan.tools is None else plan.tools.fresh(),
            echo=plan.echo[index // (body.n or 1)] if plan.echo else None,
            only_prompt=isinstance(body, CompletionRequest) and body.max_tokens == 0,
        )

    def _sampling(self, plan: _Plan, prompt_tokens: int, sample: int) -> SamplingParams:
        body, defaults = plan.body, self.card.defaults
        if plan.leg.room is not None:  # the decode leg's own body, perhaps: only the prompt is wanted
            self._max_tokens(plan, prompt_tokens)
            return SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        top_k = defaults.top_k if body.top_k is None else body.top_k
        return SamplingParams(
            max_tokens=self._max_tokens(plan, prompt_tokens),
            temperature=defaults.temperature if body.temperature is None else body.temperature,
            top_p=defaults.top_p if body.top_p is None else body.top_p,
            top_k=max(top_k, 0),
            seed=None if body.seed is None else _sample_seed(body.seed, sample),
            min_tokens=body.min_tokens or 0,
            stop_token_ids=frozenset(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            logprobs=plan.logprobs,
            min_p=body.min_p or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
            logit_bias=self._logit_bias(body.logit_bias or {}),
        )

    def _logit_bias(self, said: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
        """Token ids come as texts, as JSON's keys are."""
        for token in said:
            if not (token.isascii() and token.isdigit() and int(token) < self.card.vocab_size):
                raise bad_value("logit_bias", token, f"expected token ids below {self.card.vocab_size}")
        return tuple((int(token), float(bias)) for token, bias in said.items())

    def _max_tokens(self, plan: _Plan, prompt_tokens: int) -> int:
        """The client's limit, else the rest of the context; refuses what does not fit."""
        if prompt_tokens == 0:
            raise ApiError(400, f"{plan.prompt_field}: the prompt is empty", plan.prompt_field)
        room = self.card.max_model_len - prompt_tokens
        if room < 1:
            raise self._too_long(str(prompt_tokens), plan.prompt_field)
        if plan.max_tokens is not None and plan.max_tokens > room:
            chat_limit = isinstance(plan.body, ChatRequest) and plan.body.max_completion_tokens
            field = "max_completion_tokens" if chat_limit else "max_tokens"
            rule = f"the context of {self.card.max_model_len} tokens has room for {room} after"
            raise bad_value(field, plan.max_tokens, f"{rule} this prompt of {prompt_tokens}")
        return plan.max_tokens or room

    def _too_long(self, length: str, field: str) -> ApiError:
        limit = self.card.max_model_len
        message = f"{field}: the prompt has {length} tokens, the model's context is {limit} tokens"
        return ApiError(400, f"{message} and one is needed for the answer", field)


def _check_min_tokens(body: GenerationFields, max_tokens: int | None, field: str) -> None:
    if body.min_tokens and max_tokens and body.min_tokens > max_tokens:
        rule = f"it cannot exceed {field} ({max_tokens})"
        raise bad_value("min_tokens", body.min_tokens, rule)


def _sample_seed(seed: int, sample: int) -> int:
    """A seed of its own for each sample of one prompt, within 64 bits."""
    return (seed + sample + 2**63) % 2**64 - 2**63
