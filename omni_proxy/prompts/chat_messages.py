"""Chat messages from the OpenAI shape to the shape that chat templates expect. Pure."""

from __future__ import annotations

from typing import Any

import msgspec


class BadMessage(ValueError):
    """A message that no template can take; says where it stands, what it is, and what was expected."""

    def __init__(self, param: str, value: Any, expected: str) -> None:
        super().__init__(f"{param}: {expected}")
        self.param = param
        self.value = value
        self.expected = expected


def ready_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check chat messages and bring them into the form templates expect.

    Lists of text parts become one text, joined by line ends, and the arguments of tool calls become objects, both
    as vLLM does.
    """
    if not messages:
        raise BadMessage("messages", messages, "expected at least one message")
    return [_ready_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _ready_message(message: dict[str, Any], param: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadMessage(f"{param}.role", role, "expected a non-empty string")
    ready = dict(message)
    ready["content"] = _content_text(message.get("content"), f"{param}.content")
    if message.get("tool_calls") is not None:
        ready["tool_calls"] = _tool_calls(message["tool_calls"], f"{param}.tool_calls")
    return ready


def _content_text(content: Any, param: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadMessage(param, content, "expected text or a list of text parts")
    return "\n".join(_part_text(part, f"{param}[{i}]") for i, part in enumerate(content))


def _part_text(part: Any, param: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise BadMessage(f"{param}.type", kind, "this model reads text only")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise BadMessage(f"{param}.text", text, "expected text")
    return text


def _tool_calls(calls: Any, param: str) -> list[Any]:
    if not isinstance(calls, list):
        raise BadMessage(param, calls, "expected a list")
    return [_tool_call(call, f"{param}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, param: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise BadMessage(param, call, "expected an object with a function")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return dict(call)
    try:
        parsed = msgspec.json.decode(arguments) if arguments else {}
    except msgspec.DecodeError as exc:
        raise BadMessage(f"{param}.function.arguments", arguments, f"not valid JSON: {exc}") from exc
    return {**call, "function": {**function, "arguments": parsed}}
