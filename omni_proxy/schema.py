"""The config's JSON schema, for editors: pydantic's, with what the source says of each field."""

from __future__ import annotations

import ast
import inspect
import json
from typing import Any

from omni_proxy import config


def config_schema() -> str:
    """The schema as JSON text."""
    schema: dict[str, Any] = config.Config.model_json_schema()
    said = _field_docs(inspect.getsource(config))
    for name, model in (("Config", schema), *schema.get("$defs", {}).items()):
        for field, shape in model.get("properties", {}).items():
            text = said.get((name, field))
            if text is not None:
                shape["description"] = text
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Omni Proxy"
    return json.dumps(schema, indent=1) + "\n"


def _field_docs(source: str) -> dict[tuple[str, str], str]:
    """What stands below each field of each class; classes have what those have that they are made of."""
    said: dict[tuple[str, str], str] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
        said |= {(node.name, field): text for (owner, field), text in list(said.items()) if owner in bases}
        for before, after in zip(node.body, node.body[1:], strict=False):
            if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
                text = _text(after)
                if text is not None:
                    said[node.name, before.target.id] = text
    return said


def _text(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return None
