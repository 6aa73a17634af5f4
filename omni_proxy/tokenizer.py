"""Counts a prompt's tokens as the model will see them, off the event loop.

Messages are rendered with the model's own chat template and encoded with its own tokenizer. What cannot be tokenised
(images, a broken template, no template) is counted and falls back to an estimate; it is never an error of the client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

from omni_proxy.call import CHAT, Call
from omni_proxy.messages import Tokenized
from omni_proxy.prompts.chat_messages import BadMessage, ready_messages
from omni_proxy.prompts.chat_template import ChatTemplate, ChatTemplateError, load_chat_template
from omni_proxy.prompts.text_tokenizer import TokenizerError, encode, load_tokenizer

logger = logging.getLogger(__name__)

THREADS: Final = 2
_CHAT_FIELDS: Final = frozenset({"messages", "tools", "add_generation_prompt", "chat_template_kwargs"})
PostTokenized = Callable[[Tokenized], None]


class PromptTokenizer:
    """One model's template and tokenizer. Blocking; used from worker threads only."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    @classmethod
    def load(cls, folder: Path) -> PromptTokenizer:
        """Read a model folder. Raises TokenizerError or ChatTemplateError, naming the file."""
        return cls(load_tokenizer(folder), load_chat_template(folder))

    def count(self, call: Call) -> int | None:
        """Tokens of the call's prompt (of all its prompts together), or None when that cannot be said."""
        if call.path == CHAT:
            text = self._render(call)
            return None if text is None else len(encode(self._tokenizer, text, add_special_tokens=False))
        return self._count_prompt(msgspec.json.decode(call.fields["prompt"]))

    def _render(self, call: Call) -> str | None:
        if self._template is None:
            return None
        fields = {name: msgspec.json.decode(raw) for name, raw in call.fields.items() if name in _CHAT_FIELDS}
        variables: Mapping[str, Any] = fields.get("chat_template_kwargs") or {}
        return self._template.render(
            ready_messages(fields["messages"]),
            fields.get("tools"),
            fields.get("add_generation_prompt") is not False,
            variables,
        )

    def _count_prompt(self, prompt: Any) -> int:
        if isinstance(prompt, str):
            return len(encode(self._tokenizer, prompt, add_special_tokens=True))
        if prompt and isinstance(prompt[0], int):
            return len(prompt)
        return sum(map(self._count_prompt, prompt))


class TokenCounter:
    """Counts calls in a few threads and posts `Tokenized`. `fallbacks` counts what could not be tokenised."""

    def __init__(self, tokenizer: PromptTokenizer, post: PostTokenized) -> None:
        self._tokenizer = tokenizer
        self._post = post
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenizer")
        self._loop = asyncio.get_running_loop()
        self.fallbacks = 0

    def __call__(self, rid: str, call: Call) -> None:
        self._threads.submit(self._count, rid, call)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _count(self, rid: str, call: Call) -> None:
        tokens: int | None = None
        try:
            tokens = self._tokenizer.count(call)
        except (BadMessage, ChatTemplateError, TokenizerError, msgspec.DecodeError) as exc:
            logger.debug("prompt not tokenised: %s", exc)
        except Exception:  # a foreign tokenizer may raise anything; the request goes on by its estimate
            logger.exception("the tokenizer failed")
        self._loop.call_soon_threadsafe(self._done, rid, tokens)

    def _done(self, rid: str, tokens: int | None) -> None:
        if tokens is None:
            self.fallbacks += 1
        self._post(Tokenized(rid, tokens))
