"""Models as a config names them, and what clients say of thinking. A module of its own: structs do not compile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Struct

from omni_proxy.call import MESSAGES, Call

_NOT_THINKING: Final = frozenset({"none", "minimal"})


class ServedModel(Struct, frozen=True):
    """One model as its clients see it."""

    name: str
    aliases: tuple[str, ...] = ()
    priority: int = 0
    """Added to that of each request."""
    thinks: bool = False
    """Do requests that say nothing about it think?"""
    thinking_budgets: Mapping[str, int] = {}
    """Tokens of thinking by reasoning effort; `default` for requests that name none."""
    counted: bool = False
    """Its prompts are tokenised here."""


class _Wish(Struct):
    enable_thinking: bool | None = None
    thinking: bool | None = None
    effort: str | None = None
    type: str | None = None


_WISH: Final = msgspec.json.Decoder(_Wish)
_EFFORT: Final = msgspec.json.Decoder(str | None)
_FLAG: Final = msgspec.json.Decoder(bool | None)


def wish_of(call: Call) -> tuple[str | None, bool | None]:
    """The effort that a client asks for, and whether it wants thinking; None where it does not say.

    What is malformed is for the worker to refuse.
    """
    if not call.says_thinking:
        return None, None
    fields = call.fields
    try:
        effort = _EFFORT.decode(fields.get("reasoning_effort", b"null"))
        template = _WISH.decode(fields.get("chat_template_kwargs", b"{}"))
        reasoning = _WISH.decode(fields.get("reasoning", b"{}"))
        anthropic = _WISH.decode(fields.get("thinking", b"{}")) if call.path == MESSAGES else _Wish()
        plain = _FLAG.decode(fields.get("enable_thinking", b"null"))
    except msgspec.DecodeError:
        return None, None
    effort = effort or reasoning.effort
    for flag in (template.enable_thinking, template.thinking, plain):
        if flag is not None:
            return effort, flag
    if anthropic.type is not None:
        return effort, anthropic.type != "disabled"
    if "thinking_token_budget" in fields:
        return effort, True
    return effort, None if effort is None else effort not in _NOT_THINKING
