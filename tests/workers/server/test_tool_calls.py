"""Function calls taken out of a text: whole, and however it is cut into pieces."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.workers.engine.tool_calls import CallPiece, HermesCalls, ListedCalls, NamedCall, ToolText

Calls = list[tuple[str, str]]


def read(tools: ToolText, pieces: list[str]) -> tuple[str, Calls]:
    """Content and calls of a text that comes in pieces; each call's name comes with its first piece."""
    content = ""
    calls: Calls = []
    for at, text in enumerate(pieces):
        said, news = tools.feed(text, at == len(pieces) - 1)
        content += said
        for piece in news:
            if piece.name is not None:
                assert piece.index == len(calls)
                calls.append((piece.name, piece.arguments))
            else:
                assert piece.index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    return content, calls


def tag(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


F = '{"name": "f", "arguments": {"a": "}]\\"</tool_call>", "name": "x", "b": [1, {"c": null}]}}'
ARGUMENTS = '{"a": "}]\\"</tool_call>", "name": "x", "b": [1, {"c": null}]}'
HERMES: dict[str, tuple[str, str, Calls]] = {
    "none": ("just < text <tool", "just < text <tool", []),
    "one": (tag(F), "", [("f", ARGUMENTS)]),
    "amid text": ("Wait.\n\n" + tag(F) + "\n and so", "Wait.and so", [("f", ARGUMENTS)]),
    "two": (tag(F) + "\n" + tag('{"arguments": {}, "name": "g"}'), "", [("f", ARGUMENTS), ("g", "{}")]),
    "parameters": (tag('{"name": "f", "parameters": {"a": 1}}'), "", [("f", '{"a": 1}')]),
    "no arguments": (tag('{"name": "f"}'), "", [("f", "{}")]),
    "as text": (tag('{"name": "f", "arguments": "{\\"a\\": 1}"}'), "", [("f", '{"a": 1}')]),
    "cut short": ('<tool_call>\n{"name": "f", "arguments": {"a": ', "", [("f", '{"a": ')]),
    "no call": ("<tool_call>\nhello", "<tool_call>hello", []),
    "space at the end": ("text  \n", "text  \n", []),
    "space amid": ("a  b\n\nc " + tag(F) + " d  e ", "a  b\n\ncd  e ", [("f", ARGUMENTS)]),
}


@pytest.mark.parametrize("name", HERMES)
def test_calls_between_tags(name: str) -> None:
    text, content, calls = HERMES[name]
    assert read(HermesCalls(), [text]) == (content, calls)
    assert read(HermesCalls(), [*text, ""]) == (content, calls)


@given(st.sampled_from(list(HERMES)), st.lists(st.integers(0, 120)))
def test_however_the_text_is_cut(name: str, cuts: list[int]) -> None:
    text, content, calls = HERMES[name]
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    assert read(HermesCalls(), pieces) == (content, calls)


def test_arguments_stream_as_they_come() -> None:
    tools = HermesCalls()
    assert tools.feed('<tool_call>{"name": "f", "argum', False) == ("", [CallPiece(0, "f", "")])
    assert tools.feed('ents": {"a": "lo', False) == ("", [CallPiece(0, None, '{"a": "lo')])
    assert tools.feed('ng"}}</tool_call>', True) == ("", [CallPiece(0, None, 'ng"}')])


def test_a_list_of_calls() -> None:
    text = json.dumps([{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}])
    want = ("", [("f", '{"a": 1}'), ("g", "{}")])
    assert read(ListedCalls(), [text]) == want
    assert read(ListedCalls(), list(text)) == want


def test_bare_arguments() -> None:
    assert read(NamedCall("f"), ['{"a"', ": 1}", ""]) == ("", [("f", '{"a": 1}')])


@pytest.mark.parametrize("tools", [HermesCalls(), ListedCalls(), NamedCall("f")])
def test_a_fresh_one_knows_nothing(tools: ToolText) -> None:
    read(tools, ["<tool_call>", '{"name": "f", "parameters": {'])
    assert read(tools.fresh(), [""])[0] == ""
