"""`tools` and `tool_choice` of a chat request: which calls are wanted, and the structure that forces them. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from omni_proxy.workers.engine.api_error import bad_value
from omni_proxy.workers.engine.structure import Structure
from omni_proxy.workers.engine.tool_calls import HermesCalls, ListedCalls, NamedCall, ToolText


def tool_text_of(
    tools: Sequence[Mapping[str, Any]] | None, choice: Any, parallel: bool
) -> tuple[ToolText | None, Structure | None]:
    """How calls are read out of the answer, and what forces them; (None, None) without tools. Raises ApiError 400."""
    functions = [_function(tool, at) for at, tool in enumerate(tools or ())]
    if isinstance(choice, dict):
        return _named(functions, choice)
    if choice not in (None, "none", "auto", "required"):
        raise bad_value("tool_choice", choice, "expected none, auto, required or a function")
    if choice == "required":
        if not functions:
            raise bad_value("tool_choice", choice, "there are no tools")
        return ListedCalls(), Structure("tool_choice", "json", json.dumps(_list_schema(functions, parallel)))
    if not functions or choice == "none":
        return None, None
    return HermesCalls(), None


def _function(tool: Mapping[str, Any], at: int) -> Mapping[str, Any]:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise bad_value(f"tools[{at}]", dict(tool), "expected a function")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise bad_value(f"tools[{at}].function.name", function.get("name"), "expected a name")
    if not isinstance(function.get("parameters") or {}, dict):
        raise bad_value(f"tools[{at}].function.parameters", function["parameters"], "expected a JSON schema")
    return function


def _named(
    functions: Sequence[Mapping[str, Any]], choice: Mapping[str, Any]
) -> tuple[ToolText | None, Structure | None]:
    wanted = choice.get("function")
    name = wanted.get("name") if isinstance(wanted, dict) else None
    for function in functions:
        if isinstance(name, str) and function["name"] == name:
            return NamedCall(name), Structure("tool_choice", "json", json.dumps(_parameters(function)))
    raise bad_value("tool_choice.function.name", name, "no tool has this name")


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    return dict(function.get("parameters") or {"type": "object"})


def _list_schema(functions: Sequence[Mapping[str, Any]], parallel: bool) -> dict[str, Any]:
    """At least one call, exactly one if not `parallel`. Definitions move to the root, where references look."""
    shared: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for function in functions:
        parameters = _parameters(function)
        for name in ("$defs", "definitions"):
            shared.setdefault(name, {}).update(parameters.pop(name, None) or {})
        said = {"name": {"const": function["name"]}, "parameters": parameters}
        calls.append({"type": "object", "properties": said, "required": list(said), "additionalProperties": False})
    size = {"minItems": 1} if parallel else {"minItems": 1, "maxItems": 1}
    return {"type": "array", **size, "items": {"anyOf": calls}, **{k: v for k, v in shared.items() if v}}
