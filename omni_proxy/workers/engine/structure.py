"""What structure a request's answer must have: `response_format` and vLLM's `guided_*` and `structured_outputs`. Pure.

Several spellings, one meaning. What the structure allows, token by token, is `guides.py`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from omni_proxy.workers.engine.api_error import ApiError, bad_value

Kind = Literal["json", "regex", "choice", "grammar"]

_GUIDED: Final[Mapping[str, Kind]] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
STRUCTURE_FIELDS: Final = ("response_format", "structured_outputs", *_GUIDED)
_OBJECT: Final = '{"type": "object"}'


@dataclass(frozen=True, slots=True)
class Structure:
    """One structure. `field` names where the client said it."""

    field: str
    kind: Kind
    text: str
    """A JSON schema, a regular expression, a JSON list of strings, or a grammar in Lark's notation."""


def structure_of(raw: Mapping[str, Any]) -> Structure | None:
    """The structure that some fields of a body ask for, None if none does; raises ApiError 400."""
    found = [s for s in (_response_format(raw), _structured_outputs(raw), *_guided(raw)) if s is not None]
    if len(found) > 1:
        raise ApiError(400, f"{found[1].field}: {found[0].field} asks for a structure as well", found[1].field)
    return found[0] if found else None


def _response_format(raw: Mapping[str, Any]) -> Structure | None:
    name = "response_format"
    value = raw.get(name)
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    match kind:
        case "text":
            return None
        case "json_object":
            return Structure(name, "json", _OBJECT)
        case "json_schema":
            inner = value.get("json_schema")
            schema = inner.get("schema") if isinstance(inner, dict) else None
            return Structure(f"{name}.json_schema.schema", "json", _schema(f"{name}.json_schema.schema", schema))
        case _:
            raise bad_value(f"{name}.type", kind, "expected text, json_object or json_schema")


def _guided(raw: Mapping[str, Any]) -> list[Structure]:
    return [_of(name, kind, raw[name]) for name, kind in _GUIDED.items() if raw.get(name) is not None]


def _structured_outputs(raw: Mapping[str, Any]) -> Structure | None:
    name = "structured_outputs"
    value = raw.get(name)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise bad_value(name, value, "expected an object")
    if value.get("json_object"):
        return Structure(f"{name}.json_object", "json", _OBJECT)
    kinds: tuple[Kind, ...] = ("json", "regex", "choice", "grammar")
    said = [_of(f"{name}.{kind}", kind, value[kind]) for kind in kinds if value.get(kind) is not None]
    if len(said) != 1:
        raise bad_value(name, value, "expected exactly one of json, regex, choice, grammar, json_object")
    return said[0]


def _of(field: str, kind: Kind, value: Any) -> Structure:
    if kind == "json":
        return Structure(field, kind, _schema(field, value))
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
            raise bad_value(field, value, "expected a list of non-empty strings")
        return Structure(field, kind, json.dumps(value))
    if not isinstance(value, str) or not value:
        raise bad_value(field, value, "expected a non-empty string")
    return Structure(field, kind, value)


def _schema(field: str, value: Any) -> str:
    """A JSON schema as text; one that came as text is parsed, so that an error names the field."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as exc:
            raise bad_value(field, value, f"not valid JSON: {exc}") from exc
    if not isinstance(value, dict | bool):
        raise bad_value(field, value, "expected a JSON schema")
    return json.dumps(value)
