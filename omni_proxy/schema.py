"""The config's JSON schema, for editors: pydantic's, with what the source says of each field."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
from collections.abc import Iterator
from typing import Any

from omni_proxy.config import Config
from omni_proxy.config.section import Section


def config_schema() -> str:
    """The schema as JSON text."""
    schema: dict[str, Any] = Config.model_json_schema()
    sections = {kind.__name__: kind for kind in _below(Section)}
    for name, model in (("Config", schema), *schema.get("$defs", {}).items()):
        said = _field_docs(sections[name]) if name in sections else {}
        for field, shape in model.get("properties", {}).items():
            if field in said:
                shape["description"] = said[field]
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Omni Proxy"
    return json.dumps(schema, indent=1) + "\n"


def _below(kind: type[Section]) -> Iterator[type[Section]]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)


def _field_docs(section: type[Section]) -> dict[str, str]:
    """What stands below each field of a class, and of those that it is made of."""
    said: dict[str, str] = {}
    for kind in reversed([each for each in section.__mro__ if issubclass(each, Section)]):
        (node,) = ast.parse(inspect.getsource(kind)).body
        assert isinstance(node, ast.ClassDef)
        for before, after in itertools.pairwise(node.body):
            if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
                text = _text(after)
                if text is not None:
                    said[before.target.id] = text
    return said


def _text(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return None
