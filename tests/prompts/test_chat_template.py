"""Templates render as `transformers` renders them, and their complaints reach the client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omni_proxy.prompts.chat_messages import ready_messages
from omni_proxy.prompts.chat_template import ChatTemplate, ChatTemplateError, load_chat_template
from tests.workers.server.conftest import TEMPLATE

DEMO_MODEL = Path(__file__).parents[2] / "omni_proxy" / "workers" / "demo_model"

LOOPS = """{{ bos_token }}{% for m in messages %}
    {% if loop.index0 > 2 %}{% break %}{% endif %}
    {% if m['role'] == 'system' %}{% continue %}{% endif %}
  {{- m['role'] | upper }}: {{ m['content'] | trim }}{{ eos_token }}
{% endfor %}
"""
TOOLS = """{% if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}
{% for m in messages %}
{% if m.tool_calls %}{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}{% endif %}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}
{% endfor %}{% if add_generation_prompt %}A{% if enable_thinking is defined and not enable_thinking %}!{% endif %}
{% endif %}"""
NAMESPACE = """{% set ns = namespace(first=true) %}{% macro say(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}
{%- for m in messages[::-1] %}{% if ns.first %}{% set ns.first = false %}last{% endif %}{{ say(m) }}{% endfor %}
{{ messages | map(attribute='role') | join(',') }} {{ messages[0].get('name', 'nobody') }}"""

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hello <b>\"world\"</b> & 'all' é 🙂"}],
    [
        {"role": "system", "content": "be brief\n"},
        {"role": "user", "content": "  hi  "},
        {"role": "assistant", "content": "hello", "tool_calls": [{"function": {"name": "f", "arguments": {"b": 1}}}]},
        {"role": "tool", "content": "{}", "name": "f"},
        {"role": "user", "content": "{{ not a template }}"},
    ],
]
TOOL_LIST = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"z": 1, "a": []}}}]


@pytest.fixture(scope="module")
def reference(tokenizer_dir: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer_dir, bos_token="<|im_start|>")


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOL_LIST])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("source", [TEMPLATE, LOOPS, TOOLS, NAMESPACE])
def test_templates_render_as_in_transformers(
    reference: Any, source: str, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None, prompt: bool
) -> None:
    variables = {"enable_thinking": False}
    expected = reference.apply_chat_template(
        chat, tools=tools, chat_template=source, tokenize=False, add_generation_prompt=prompt, **variables
    )
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert ChatTemplate(source, tokens).render(chat, tools, prompt, variables) == expected


@pytest.mark.slow
@pytest.mark.skipif(not (DEMO_MODEL / "tokenizer.json").is_file(), reason="the demo model is not built")
@pytest.mark.parametrize("tools", [None, TOOL_LIST])
@pytest.mark.parametrize("chat", [CHATS[0], [{"role": "system", "content": "s"}, *CHATS[0]]])
def test_the_demo_models_template_renders_as_in_transformers(
    chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(DEMO_MODEL)
    template = load_chat_template(DEMO_MODEL)
    assert template is not None
    expected = reference.apply_chat_template(chat, tools=tools, tokenize=False, add_generation_prompt=True)
    assert template.render(chat, tools) == expected


def test_the_time_of_day_is_known() -> None:
    assert len(ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}).render([])) == 10


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].missing.field }}", "cannot render"),
        ("{{ ''.__class__.__mro__ }}", "cannot render"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{{ 1 / 0 }}", "cannot render"),
    ],
)
def test_complaints_are_one_kind_of_error(source: str, complaint: str) -> None:
    with pytest.raises(ChatTemplateError, match=complaint):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


def test_a_broken_template_is_known_at_load() -> None:
    with pytest.raises(ChatTemplateError, match="broken"):
        ChatTemplate("{% if %}", {})


def test_variables_cannot_replace_the_messages() -> None:
    template = ChatTemplate("{{ messages | length }}{{ x }}", {"x": "a"})
    assert template.render([{}], variables={"messages": [], "x": "b"}) == "1b"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("one", "one"),
        ([{"name": "rag", "template": "no"}, {"name": "default", "template": "two"}], "two"),
        (None, None),
    ],
)
def test_the_template_may_be_named_or_absent(tmp_path: Path, value: Any, expected: str | None) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    template = load_chat_template(tmp_path)
    assert (None if template is None else template.render([])) == expected


def test_a_template_file_comes_first(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old", "eos_token": "E"}))
    (tmp_path / "chat_template.jinja").write_text("new {{ eos_token }}")
    template = load_chat_template(tmp_path)
    assert template is not None
    assert template.render([]) == "new E"


def test_messages_are_made_ready_for_templates() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    ready = ready_messages(
        [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    )
    assert ready[0]["content"] == "a\nb"
    assert ready[1]["content"] == ""
    assert ready[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert call["function"] == {"name": "f", "arguments": '{"x": 1}'}
