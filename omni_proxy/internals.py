"""Objects in a client's body whose keys engines take for fields of the body: what is internal must not hide in them.

vLLM joins `vllm_xargs` with what it hands to its KV connector; others unpack what clients of the OpenAI library put
into `extra_body`. Other nested objects (messages, tools, schemas) are the client's own and pass unread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Raw

from omni_proxy.multipart import fields_in_form

NESTS: Final = frozenset({"vllm_xargs", "extra_args", "extra_body", "sampling_params", "custom_params", "nvext"})
MAX_DEPTH: Final = 32
"""So deep nobody reads; what is deeper is not passed on."""

_OBJECT = msgspec.json.Decoder(dict[str, Raw])
_LIST = msgspec.json.Decoder(list[Raw])
_GONE: Final = Raw(b"null")


def without_nested(fields: Mapping[str, Raw], names: frozenset[str]) -> dict[str, Raw] | None:
    """The fields without these names in any of the nests, however deep; None where there are none."""
    changed = {nest: _cleaned(fields[nest], names, 0) for nest in NESTS & fields.keys()}
    found = {nest: raw for nest, raw in changed.items() if raw is not None}
    return {**fields, **found} if found else None


def internal_in_form(body: bytes, content_type: bytes, names: frozenset[str]) -> str | None:
    """The field of a multipart form that is one of these names, or has one of them in it. Raises BadForm.

    A form is not edited: who sends such a field is told so.
    """
    for name, start, end in fields_in_form(body, content_type):
        outer = name.replace("\\", "").replace("[", ".").partition(".")[0].strip()
        if outer in names:
            return outer
        if outer in NESTS and _has_any(body[start:end], names):
            return outer
    return None


def _has_any(value: bytes, names: frozenset[str]) -> bool:
    try:
        return without_nested({"extra_body": Raw(value.strip())}, names) is not None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # nobody can read a field out of it


def _cleaned(raw: Raw, names: frozenset[str], depth: int) -> Raw | None:
    """A value without these names; None where it has none of them."""
    begin = bytes(raw)[:1]
    if begin not in (b"{", b"["):
        return None
    if depth >= MAX_DEPTH:
        return _GONE
    if begin == b"[":
        values = _LIST.decode(raw)
        items = [_cleaned(value, names, depth + 1) for value in values]
        if all(item is None for item in items):
            return None
        return Raw(msgspec.json.encode([old if new is None else new for old, new in zip(values, items, strict=True)]))
    members = _OBJECT.decode(raw)
    inner = {name: _cleaned(value, names, depth + 1) for name, value in members.items() if name not in names}
    if len(inner) == len(members) and all(value is None for value in inner.values()):
        return None
    kept = {name: members[name] if new is None else new for name, new in inner.items()}
    return Raw(msgspec.json.encode(kept))
