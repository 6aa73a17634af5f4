"""The field `model` of a multipart form; nothing else of it is read or changed. Pure."""

from __future__ import annotations

from typing import Final

_FORM_MODEL: Final = (b'name="model"', b"name=model\r")


MAX_LINE: Final = 256
"""How far before the field's name its header line may begin."""


def _model_place(body: bytes) -> tuple[int, int] | None:
    """Where the value of the field stands; a file may hold the same words. Takes time in proportion to the body."""
    for mark in _FORM_MODEL:
        at = body.find(mark)
        while at >= 0:
            line = body[max(0, at - MAX_LINE) : at].rpartition(b"\n")[2]
            if line.lower().startswith(b"content-disposition:"):
                start = body.find(b"\r\n\r\n", at) + 4
                end = body.find(b"\r\n", start) if start >= 4 else -1
                return None if end < 0 else (start, end)
            at = body.find(mark, at + 1)
    return None


def model_in_form(body: bytes) -> str:
    """The field `model` of a multipart form; empty where there is none."""
    place = _model_place(body)
    return "" if place is None else body[place[0] : place[1]].decode("utf-8", "replace").strip()


def form_with_model(body: bytes, model: str) -> bytes:
    """A multipart form with another value of its field `model`, if it has that field."""
    place = _model_place(body)
    return body if place is None else body[: place[0]] + model.encode() + body[place[1] :]
