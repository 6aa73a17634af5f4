"""What clients may call a model, and what its requests get before anybody decides about them.

A call leaves here with the model's own name, and with the priority and the thinking budget of its class; what the
client called it is kept, so that answers can say the same. Which worker knows the model by which name is the upstream's
business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
from msgspec import Raw

from omni_proxy.api.served_shapes import ServedModel, wish_of
from omni_proxy.call import CHAT, Call, Fields

__all__ = ["ServedModel"]

OTHER: Final = "default"
"""The class of a request that names no effort."""


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
        if model is not None or call.says_thinking:
            _think(call, _ANY if model is None else model)


def _think(call: Call, model: ServedModel) -> None:
    effort, thinks = wish_of(call)
    call.thinking = model.thinks if thinks is None else thinks
    if not call.thinking or not model.thinking_budgets or call.path != CHAT:
        return
    budget = model.thinking_budgets.get(effort or OTHER)
    if budget is not None and "thinking_token_budget" not in call.fields:
        call.put({**call.fields, "thinking_token_budget": Raw(b"%d" % budget)})
        call.tampered = True


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
