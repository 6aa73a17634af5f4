"""What clients may call a model, and what its requests get before anybody decides about them.

A call leaves here with the model's own name, and with the priority and the thinking budget of its class; what the
client called it is kept, so that answers can say the same. Which worker knows the model by which name is the upstream's
business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
from msgspec import Raw, Struct

from omni_proxy.call import CHAT, MESSAGES, Call, Fields

OTHER: Final = "default"
"""The class of a request that names no effort."""
_NOT_THINKING: Final = frozenset({"none", "minimal"})
_SAYS_SO: Final = frozenset(
    {"chat_template_kwargs", "reasoning_effort", "reasoning", "thinking", "enable_thinking", "thinking_token_budget"}
)


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


_ANY: Final = ServedModel("")


class ServedModels:
    """All models that a config names. Others pass under their own names."""

    def __init__(self, models: Iterable[ServedModel] = (), others_counted: bool = False) -> None:
        self._by_name: dict[str, ServedModel] = {}
        for model in models:
            for name in (model.name, *model.aliases):
                self._by_name[name] = model
        self._others_counted = others_counted

    def counted(self, model: str) -> bool:
        """Are the prompts of a model tokenised here?"""
        found = self._by_name.get(model)
        return self._others_counted if found is None else found.counted

    def aliases(self) -> dict[str, str]:
        """The models' own names by their other names."""
        return {alias: model.name for alias, model in self._by_name.items() if alias != model.name}

    def take(self, call: Call) -> None:
        """Make a call ready for the core and for workers."""
        model = self._by_name.get(call.model)
        call.asked = call.model
        if model is not None:
            call.model = model.name
            call.priority += model.priority
        if model is None and _SAYS_SO.isdisjoint(call.fields):
            return
        _think(call, _ANY if model is None else model)


def _think(call: Call, model: ServedModel) -> None:
    effort, thinks = _wish(call)
    call.thinking = model.thinks if thinks is None else thinks
    if not call.thinking or not model.thinking_budgets or call.path != CHAT:
        return
    budget = model.thinking_budgets.get(effort or OTHER)
    if budget is not None and "thinking_token_budget" not in call.fields:
        call.fields = {**call.fields, "thinking_token_budget": Raw(b"%d" % budget)}
        call.tampered = True


class _Wish(Struct):
    enable_thinking: bool | None = None
    thinking: bool | None = None
    effort: str | None = None
    type: str | None = None


_WISH: Final = msgspec.json.Decoder(_Wish)
_EFFORT: Final = msgspec.json.Decoder(str | None)
_FLAG: Final = msgspec.json.Decoder(bool | None)


def _wish(call: Call) -> tuple[str | None, bool | None]:
    """The effort that a client asks for, and whether it wants thinking; None where it does not say.

    What is malformed is for the worker to refuse.
    """
    fields = call.fields
    if _SAYS_SO.isdisjoint(fields):
        return None, None
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


def with_aliases(models: list[bytes], aliases: Mapping[str, str]) -> list[bytes]:
    """Entries of a model list, those under other names behind them; their `root` is the model itself."""
    found: dict[str, bytes] = {}
    for raw in models:
        fields = msgspec.json.decode(raw, type=Fields)
        name = msgspec.json.decode(fields["id"], type=str)
        found[name] = raw
        for alias in (alias for alias, model in aliases.items() if model == name):
            renamed = {**fields, "id": Raw(msgspec.json.encode(alias)), "root": fields["id"]}
            found.setdefault(alias, msgspec.json.encode(renamed))
    return list(found.values())
