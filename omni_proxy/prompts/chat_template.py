"""Renders chat messages with the model's own template, as `transformers` does. No network, sandboxed.

Templates are Jinja text written by model makers: they run in an immutable sandbox. What a template sees (helpers,
special tokens, whitespace rules) follows `apply_chat_template`, against which the tests compare.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """The template refused these messages, or is itself broken."""


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said (for training masks); here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template with the special tokens it may write. Safe to use from several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        env.filters["tojson"] = _to_json
        env.globals["raise_exception"] = _raise
        env.globals["strftime_now"] = _strftime_now
        try:
            self._template = env.from_string(source)
        except jinja2.TemplateError as exc:
            raise ChatTemplateError(f"the chat template is broken: {exc}") from exc
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text; raises `ChatTemplateError` with the template's own complaint."""
        names = {
            **self._special_tokens,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(names)
        except ChatTemplateError:
            raise
        except Exception as exc:
            raise ChatTemplateError(f"the chat template cannot render this: {exc}") from exc


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """The template of a model folder: `chat_template.jinja`, else the one in `tokenizer_config.json`, else None."""
    config = _read_config(folder / "tokenizer_config.json")
    file = folder / "chat_template.jinja"
    source = file.read_text("utf-8") if file.is_file() else _pick(config.get("chat_template"))
    return None if source is None else ChatTemplate(source, _special_tokens(config))


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as exc:
        raise ChatTemplateError(f"{path}: not valid JSON: {exc}") from exc
    return config if isinstance(config, dict) else {}


def _pick(value: Any) -> str | None:
    """One template out of the value of `chat_template`: a text, or a list of named texts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        named = {e.get("name"): e.get("template") for e in value if isinstance(e, dict)}
        picked = named.get("default")
        return picked if isinstance(picked, str) else None
    return None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and so on, which are texts or objects with a `content`."""
    tokens: dict[str, str] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as people read it: unlike Jinja's own filter, no HTML escapes and no sorted keys."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> NoReturn:
    raise ChatTemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
