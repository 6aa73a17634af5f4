"""Reads a prompt as the model will: its tokens, their number and the keys of its prefixes, off the event loop.

Messages are rendered with the model's own chat template and encoded with its own tokenizer. What cannot be tokenised
(images, a broken template, no template) is counted and falls back to an estimate; it is never an error of the client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct
from tokenizers import Tokenizer

from omni_proxy.apc.keys import block_keys
from omni_proxy.call import CHAT, COMPLETIONS, Call
from omni_proxy.messages import Tokenized
from omni_proxy.prompts.as_chat import as_chat
from omni_proxy.prompts.chat_messages import BadMessage, ready_messages
from omni_proxy.prompts.chat_template import ChatTemplate, ChatTemplateError, load_chat_template
from omni_proxy.prompts.media import without_media
from omni_proxy.prompts.segments import SegmentEncoder
from omni_proxy.prompts.text_tokenizer import TokenizerError, load_tokenizer

logger = logging.getLogger(__name__)

THREADS: Final = 2
_CHAT_FIELDS: Final = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template_kwargs",
    "reasoning_effort",
)
_UNREADABLE: Final = frozenset({"chat_template", "documents", "mm_processor_kwargs", "prompt_embeds", "suffix"})
"""Fields that change the prompt in a way that only the worker knows."""
PostTokenized = Callable[[Tokenized], None]


class PromptTokens(Struct, frozen=True):
    """A prompt as the model reads it."""

    count: int
    """Of all prompts of a call together."""
    ids: array[int] | None = None
    """Of a call's only prompt; None where there are several."""
    keys: tuple[int, ...] = ()


class PromptTokenizer:
    """One model's template and tokenizer. Blocking; used from worker threads only."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, adapters: Collection[str] = frozenset()
    ) -> None:
        self._encoder = SegmentEncoder(tokenizer)
        self._tokenizer = tokenizer
        self._template = template
        self._adapters = adapters
        """Model names that are LoRA adapters: they share tokens, but no KV."""

    @classmethod
    def load(cls, folder: Path, adapters: Collection[str] = frozenset()) -> PromptTokenizer:
        """Read a model folder. Raises TokenizerError or ChatTemplateError, naming the file."""
        return cls(load_tokenizer(folder), load_chat_template(folder), adapters)

    def text_of(self, ids: list[int]) -> str:
        """The text of token ids, special ones too."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def read(self, call: Call) -> PromptTokens | None:
        """A call's prompt, or None when it cannot be read."""
        if not _UNREADABLE.isdisjoint(call.fields):
            return None
        if call.path != COMPLETIONS:
            ids = self._chat(call)
            if ids is None:
                return None
            told = self._told(call, ids)
            # Ids of a prompt with media are ours, not the model's.
            return told if not call.media else PromptTokens(told.count, None, told.keys)
        prompt = msgspec.json.decode(call.fields["prompt"])
        special = _flag(call, "add_special_tokens", True)
        if isinstance(prompt, list) and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                return PromptTokens(sum(len(self._prompt(one, special)) for one in prompt))
            prompt = prompt[0]
        return self._told(call, self._prompt(prompt, special))

    def _told(self, call: Call, ids: array[int]) -> PromptTokens:
        salt = msgspec.json.decode(call.fields["cache_salt"]) if "cache_salt" in call.fields else None
        lora = call.model if call.model in self._adapters else ""
        return PromptTokens(len(ids), ids, block_keys(ids, lora, salt or ""))

    def _prompt(self, prompt: str | list[int], add_special_tokens: bool) -> array[int]:
        return self._encoder.encode(prompt, add_special_tokens) if isinstance(prompt, str) else array("I", prompt)

    def _chat(self, call: Call) -> array[int] | None:
        if self._template is None:
            return None
        fields: dict[str, Any] | None
        if call.path == CHAT:
            fields = {name: msgspec.json.decode(call.fields[name]) for name in _CHAT_FIELDS if name in call.fields}
        else:
            fields = as_chat(call)
        if fields is None:
            return None
        variables: dict[str, Any] = dict(fields.get("chat_template_kwargs") or {})
        if fields.get("reasoning_effort") is not None:
            variables.setdefault("reasoning_effort", fields["reasoning_effort"])
        text = self._template.render(
            messages := ready_messages(without_media(fields["messages"]) if call.media else fields["messages"]),
            fields.get("tools"),
            fields.get("add_generation_prompt") is not False and not fields.get("continue_final_message"),
            variables,
        )
        if fields.get("continue_final_message"):
            text = open_end(text, messages)
        # Templates write their own beginning of sequence: a second one only where the client asks for it.
        return self._encoder.encode(text, bool(fields.get("add_special_tokens")))


def open_end(text: str, messages: list[dict[str, Any]]) -> str:
    """A rendered chat, cut behind its last message's content. Raises ChatTemplateError where that is not in it."""
    final = str(messages[-1]["content"])
    at = text.rfind(final.strip())
    if at < 0:
        raise ChatTemplateError("the last message is not in the rendered chat as it is")
    kept = final.lstrip()
    return text[: at + len(kept)] if text.startswith(kept, at) else text[: at + len(final.strip())]


def _flag(call: Call, name: str, default: bool) -> bool:
    raw: Mapping[str, Any] = call.fields
    value = msgspec.json.decode(raw[name]) if name in raw else None
    return default if value is None else bool(value)


class TokenCounter:
    """Reads prompts in a few threads and posts `Tokenized`. `fallbacks` counts what could not be tokenised."""

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        post: PostTokenized,
        keep_ids: bool = False,
        took: Callable[[float], None] | None = None,
    ) -> None:
        """`keep_ids`: a call that was text keeps its token ids for the workers. `took` hears the seconds of each."""
        self._took = took
        self._tokenizer = tokenizer
        self._post = post
        self._keep_ids = keep_ids
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenizer")
        self._loop = asyncio.get_running_loop()
        self.fallbacks = 0

    def __call__(self, rid: str, call: Call) -> None:
        self._threads.submit(self._read, rid, call)

    def work(self, task: Callable[[PromptTokenizer], None]) -> None:
        """Do something else with the tokenizer, in one of its threads."""
        self._threads.submit(task, self._tokenizer)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _read(self, rid: str, call: Call) -> None:
        tokens: PromptTokens | None = None
        begin = time.perf_counter()
        try:
            tokens = self._tokenizer.read(call)
            if self._keep_ids and tokens is not None and tokens.ids is not None:
                call.token_ids = msgspec.json.encode(tokens.ids.tolist())
        except (BadMessage, ChatTemplateError, TokenizerError, msgspec.DecodeError) as exc:
            logger.debug("prompt not tokenised: %s", exc)
        except (OverflowError, TypeError, ValueError) as exc:  # token ids that are none, text that is not Unicode
            logger.debug("prompt not tokenised: %s", exc)
        except Exception:  # a foreign tokenizer may raise anything; the request goes on by its estimate
            logger.exception("the tokenizer failed")
        self._loop.call_soon_threadsafe(self._done, rid, tokens, time.perf_counter() - begin)

    def _done(self, rid: str, tokens: PromptTokens | None, seconds: float) -> None:
        if self._took is not None:
            self._took(seconds)
        if tokens is None:
            self.fallbacks += 1
            self._post(Tokenized(rid, None))
        else:
            self._post(Tokenized(rid, tokens.count, tokens.keys))


class TokenCounters:
    """Counters by model; `others` for the models that are not named."""

    def __init__(self, by_model: Mapping[str, TokenCounter], others: TokenCounter | None) -> None:
        self._by_model = by_model
        self._others = others

    def __call__(self, rid: str, call: Call) -> None:
        """Read a prompt of a model that has a counter."""
        counter = self._by_model.get(call.model, self._others)
        assert counter is not None
        counter(rid, call)

    def work(self, model: str, task: Callable[[PromptTokenizer], None]) -> bool:
        """Do something else with a model's tokenizer, in one of its threads; False where it has none."""
        counter = self._by_model.get(model, self._others)
        if counter is not None:
            counter.work(task)
        return counter is not None

    def close(self) -> None:
        """Stop the threads."""
        for counter in {*self._by_model.values(), self._others}:
            if counter is not None:
                counter.close()
