"""Prompts of `/v1/messages` and `/v1/responses` as the chat that vLLM (0.32) makes of them. Pure.

What is not known to become the same prompt there is not guessed: such a prompt is not read, which costs a wrong
estimate and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from omni_proxy.call import MESSAGES, RESPONSES, Call

_FIELDS: Final[tuple[str, ...]] = (
    "messages",
    "system",
    "tools",
    "thinking",
    "output_config",
    "chat_template_kwargs",
    "input",
    "instructions",
    "reasoning",
)
_OTHERWISE: Final = frozenset({"previous_response_id", "previous_input_messages", "prompt", "truncation"})
"""Make another prompt of a response, in ways that only the worker knows."""
_BILLING: Final = "x-anthropic-billing-header"
"""A client's note that changes with each request; the engine leaves it out."""


class _Unknown(Exception):
    """Something of which it is not known what the engine makes."""


def as_chat(call: Call) -> dict[str, Any] | None:
    """The fields of a chat with the same prompt; None where that is not known."""
    read = _READ[call.path]
    if call.path == RESPONSES and not _OTHERWISE.isdisjoint(call.fields):
        return None
    fields = {name: msgspec.json.decode(call.fields[name]) for name in _FIELDS if name in call.fields}
    try:
        return read(fields)
    except (_Unknown, KeyError, TypeError, AttributeError):
        return None


def _messages(fields: Mapping[str, Any]) -> dict[str, Any]:
    system = _text_blocks(fields.get("system") or "")
    chat: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for message in fields["messages"]:
        chat += _message(message)
    found: dict[str, Any] = {"messages": chat, "chat_template_kwargs": fields.get("chat_template_kwargs")}
    if fields.get("tools"):
        found["tools"] = [_tool(tool) for tool in fields["tools"]]
    effort = (fields.get("output_config") or {}).get("effort")
    if (fields.get("thinking") or {}).get("type") == "disabled":
        effort = "none"
    return found | ({} if effort is None else {"reasoning_effort": effort})


def _text_blocks(content: Any) -> str:
    if isinstance(content, str):
        return content
    texts = [block["text"] for block in content if block["type"] == "text"]
    return "".join(text for text in texts if not text.startswith(_BILLING))


def _message(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One message, behind the results of tools that it brings."""
    role, content = message["role"], message["content"]
    if role not in ("user", "assistant"):
        raise _Unknown
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results: list[dict[str, Any]] = []
    texts: list[dict[str, str]] = []
    calls: list[dict[str, Any]] = []
    for block in content:
        match block["type"]:
            case "text":
                texts.append({"type": "text", "text": block["text"]})
            case "tool_use" if role == "assistant":
                calls.append(_tool_call(block))
            case "tool_result" if role == "user":
                results.append(_tool_result(block))
            case _:
                raise _Unknown
    if not texts and not calls:
        return results
    found: dict[str, Any] = {"role": role}
    if texts:
        found["content"] = texts[0]["text"] if len(texts) == 1 else texts
    if calls:
        found["tool_calls"] = calls
    return [*results, found]


def _tool_call(block: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": block["name"], "arguments": msgspec.json.encode(block.get("input") or {}).decode()}
    return {"id": block["id"], "type": "function", "function": function}


def _tool_result(block: Mapping[str, Any]) -> dict[str, Any]:
    content = block.get("content") or ""
    if not isinstance(content, str):
        if any(part["type"] != "text" for part in content):
            raise _Unknown
        content = "\n".join(part["text"] for part in content)
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _responses(fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields.get("tools"):
        raise _Unknown
    chat: list[dict[str, Any]] = []
    if fields.get("instructions"):
        chat.append({"role": "system", "content": fields["instructions"]})
    asked = fields["input"]
    if isinstance(asked, str):
        chat.append({"role": "user", "content": asked})
    else:
        for item in asked:
            if item.get("type", "message") != "message":
                raise _Unknown
            chat.append({"role": item["role"], "content": item["content"]})
    effort = (fields.get("reasoning") or {}).get("effort")
    found: dict[str, Any] = {"messages": chat, "chat_template_kwargs": fields.get("chat_template_kwargs")}
    return found | ({} if effort is None else {"reasoning_effort": effort})


_READ: Final[Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]]] = {
    MESSAGES: _messages,
    RESPONSES: _responses,
}
