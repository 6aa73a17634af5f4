"""What is wrong with a client's body, in the words of the API. Pure."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from omni_proxy.call_shapes import Fields
from omni_proxy.errors import ErrorCode, Rejected

NOT_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_OBJECT: Final = msgspec.json.Decoder(Fields)
_PLACE: Final = re.compile(r" - at `\$\.?([^`]*)`$")
_MISSING: Final = re.compile(r"missing required field `([^`]*)`")


def invalid_json(exc: Exception) -> Rejected:
    """What the refusal of a body that is no JSON says."""
    what = "UTF-8 text" if isinstance(exc, UnicodeDecodeError) else "valid JSON"
    return Rejected(ErrorCode.INVALID_JSON, f"The request body is not {what}: {exc}.")


def wrong_field(message: str, body: bytes) -> Rejected:
    """What msgspec says of a wrong value, in the words of the API: the field, the rule, the value."""
    place = _PLACE.search(message)
    missing = _MISSING.search(message)
    rule = _PLACE.sub("", message)
    if missing is not None:
        name = f"{place[1]}.{missing[1]}" if place is not None else missing[1]
        return Rejected(ErrorCode.INVALID_VALUE, f"'{name}' is required.", name)
    if place is None or not place[1]:
        return Rejected(ErrorCode.INVALID_JSON, f"The request body must be a JSON object: {rule}.")
    try:
        value = _OBJECT.decode(body).get(place[1].partition(".")[0].partition("[")[0], b"")
        shown = bytes(value)[:80]
    except NOT_JSON as exc:  # behind the wrong value it is not even JSON
        return invalid_json(exc)
    text = shown.decode("utf-8", "replace")
    return Rejected(ErrorCode.INVALID_VALUE, f"'{place[1]}' is not valid: {rule}; got {text}.", place[1])
