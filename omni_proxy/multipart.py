"""The field `model` of a multipart form; nothing else of it is read or changed. Pure."""

from __future__ import annotations

from typing import Final

_FORM_MODEL: Final = (b'name="model"', b"name=model\r")


def _model_place(body: bytes) -> tuple[int, int] | None:
    """Where the value of the field stands; a file may hold the same words."""
    for mark in _FORM_MODEL:
        at = body.find(mark)
        while at >= 0:
            start = body.find(b"\r\n\r\n", at) + 4
            end = body.find(b"\r\n", start)
            if b"content-disposition" in body[body.rfind(b"\n", 0, at) + 1 : at].lower() and start >= 4 and end >= 0:
                return start, end
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
