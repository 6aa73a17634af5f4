"""Writes docs/configuration.md from the config's own JSON schema: every field with its type, default and meaning.

python scripts/config_page.py
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from omni_proxy.schema import config_schema  # noqa: E402

PAGE = ROOT / "docs" / "configuration.md"
_HEAD = """# Configuration

Every field, with what it is when it is left out. `omni-proxy check -c FILE` validates a file and prints the effective
values; unknown fields are errors. What may change without a restart, it says at its end. Examples are in
[configs](../configs). This page is written by `python scripts/config_page.py` from the schema that `omni-proxy schema`
prints for editors.
"""
_BOUNDS = {"minimum": "from {}", "maximum": "to {}", "exclusiveMinimum": "above {}", "exclusiveMaximum": "below {}"}
Schema = dict[str, Any]


def page() -> str:
    """The whole page."""
    schema: Schema = json.loads(config_schema())
    kinds: dict[str, Schema] = schema["$defs"]
    parts = [_HEAD, _section("Config", schema, kinds)]
    parts += [_section(name, kinds[name], kinds) for name in _in_order(schema, kinds)]
    return "\n".join(parts)


def _in_order(schema: Schema, kinds: dict[str, Schema]) -> list[str]:
    """The models, each behind the one that names it first."""
    found: list[str] = []
    for name in _named(schema.get("properties", {})):
        if "properties" in kinds[name]:
            for each in (name, *_in_order(kinds[name], kinds)):
                if each not in found:
                    found.append(each)
    return found


def _named(part: object) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(reference := part.get("$ref"), str):
            yield reference.rpartition("/")[2]
        for value in part.values():
            yield from _named(value)
    elif isinstance(part, list):
        for value in part:
            yield from _named(value)


def _section(name: str, model: Schema, kinds: dict[str, Schema]) -> str:
    required = model.get("required", [])
    lines = [f"## {name}", "", _words(model), ""]
    lines += ["| field | type | default | |", "|---|---|---|---|"]
    for field, about in model["properties"].items():
        default = "required" if field in required else _default(about, kinds)
        meaning = _words(about) or _words_of_its_model(about, kinds)
        cells = (f"`{field}`", _type(about, kinds), default, meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def _words(about: Schema) -> str:
    """What the source says, in the words of YAML and with links to pages."""
    text = re.sub(r"\bNone\b", "null", " ".join(about.get("description", "").split()))
    return re.sub(r"docs/([a-z-]+)\.md", r"[\1](\1.md)", text)


def _words_of_its_model(about: Schema, kinds: dict[str, Schema]) -> str:
    names = [name for name in _named(about) if "properties" in kinds[name]]
    return _words(kinds[names[0]]) if names else ""


def _default(about: Schema, kinds: dict[str, Schema]) -> str:
    value = about.get("default")
    if isinstance(value, dict) and value:
        return "as there"
    return f"`{json.dumps(value)}`"


def _type(about: Schema, kinds: dict[str, Schema]) -> str:
    """In words; models as links to their sections."""
    if "$ref" in about:
        name = about["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})" if "properties" in kinds[name] else _type(kinds[name], kinds)
    if "allOf" in about:
        return " and ".join(_type(each, kinds) for each in about["allOf"])
    if "anyOf" in about:
        return " or ".join(_type(each, kinds) for each in about["anyOf"])
    if "enum" in about:
        return ", ".join(f"`{value}`" for value in about["enum"])
    if "const" in about:
        return f"`{about['const']}`"
    kind = str(about.get("type", "any"))
    if kind == "array":
        inner: Any = about.get("items") or next(iter(about.get("prefixItems", [])), {})
        return f"list of {_type(inner, kinds)}"
    if kind == "object":
        value: Any = about.get("additionalProperties") or next(iter(about.get("patternProperties", {}).values()), {})
        return f"mapping to {_type(value, kinds)}" if isinstance(value, dict) else "mapping"
    bounds = [text.format(f"{about[key]:g}") for key, text in _BOUNDS.items() if key in about]
    words: str = {"integer": "whole number", "boolean": "true or false"}.get(kind, kind)
    return " ".join([words, *bounds])


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        sys.stdout.write(page())
    else:
        PAGE.write_text(page(), encoding="utf-8")
