"""Messages and responses become the chat with the same prompt, or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_proxy.call import CHAT, MESSAGES, RESPONSES, parse_call
from omni_proxy.prompts.as_chat import as_chat
from omni_proxy.tokenizer import PromptTokenizer

USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "7"}]}


def chat_of(path: str, **fields: Any) -> Any:
    usual: dict[str, dict[str, Any]] = {
        MESSAGES: {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
        RESPONSES: {"input": "hi"},
    }
    return as_chat(parse_call(path, msgspec.json.encode({"model": "m"} | usual[path] | fields)))


def test_system_texts_and_tools_find_their_places() -> None:
    system = [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "Be brief."}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "f of 1?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, USE]},
        {"role": "user", "content": [RESULT, {"type": "text", "text": "and?"}]},
    ]
    tools = [{"name": "f", "description": "d", "input_schema": {"type": "object"}}]
    found = chat_of(MESSAGES, system=system, messages=messages, tools=tools, thinking={"type": "disabled"})
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    assert found["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "f of 1?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "7"},
        {"role": "user", "content": "and?"},
    ]
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert found["tools"] == [{"type": "function", "function": function}]
    assert found["reasoning_effort"] == "none"


def test_responses_are_instructions_and_messages() -> None:
    found = chat_of(RESPONSES, instructions="Be brief.", input=[{"role": "user", "content": "hi"}])
    assert [m["content"] for m in found["messages"]] == ["Be brief.", "hi"]
    assert chat_of(RESPONSES)["messages"] == [{"role": "user", "content": "hi"}]
    assert chat_of(RESPONSES, reasoning={"effort": "low"})["reasoning_effort"] == "low"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
        (MESSAGES, {"messages": [{"role": "system", "content": "x"}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": 7}]}),
        (MESSAGES, {"tools": [{"type": "web_search"}]}),
        (RESPONSES, {"previous_response_id": "r"}),
        (RESPONSES, {"tools": [{"type": "function", "name": "f"}]}),
        (RESPONSES, {"input": [{"type": "function_call_output", "output": "x"}]}),
    ],
)
def test_what_is_not_known_is_not_guessed(path: str, fields: dict[str, Any]) -> None:
    assert chat_of(path, **fields) is None


def test_the_same_conversation_has_the_same_prefix_everywhere(tokenizer_dir: Path) -> None:
    tokenizer = PromptTokenizer.load(tokenizer_dir)
    said = [{"role": "user", "content": "the cat sat on the mat " * 20}]
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [{"role": "system", "content": "Be brief."}, *said]},
        MESSAGES: {"max_tokens": 9, "system": "Be brief.", "messages": said},
        RESPONSES: {"instructions": "Be brief.", "input": said},
    }
    found = [tokenizer.read(parse_call(p, msgspec.json.encode({"model": "m"} | b))) for p, b in bodies.items()]
    assert found[0] is not None
    assert found[0].keys
    assert found[0] == found[1] == found[2]
