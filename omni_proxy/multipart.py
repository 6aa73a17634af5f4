"""Multipart forms: the field `model`, and what the fields are called; nothing else is read or changed. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from email.message import Message
from email.utils import collapse_rfc2231_value
from typing import Final

MAX_PART_HEAD: Final = 8 << 10
"""Bytes that the head of one part may have."""

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


class BadForm(Exception):
    """A form that two readers might read differently."""


def fields_in_form(body: bytes, content_type: bytes) -> Iterator[tuple[str, int, int]]:
    """Name of each field, and where its value begins and ends. Raises BadForm.

    Whatever reader a worker has finds no more fields than these: a delimiter counts wherever it stands, a head may be
    folded or have bare line feeds, and of several names all count.
    """
    delimiter = b"--" + _boundary(content_type)
    at = body.find(delimiter)
    while at >= 0:
        begin = at + len(delimiter)
        at = body.find(delimiter, begin)
        if body.startswith(b"--", begin):
            continue
        end = at if at >= 0 else len(body)
        head, length = _part_head(body[begin : min(end, begin + MAX_PART_HEAD)])
        for name in _names(head):
            yield name, begin + length, end


def _boundary(content_type: bytes) -> bytes:
    values = [value for key, value in _params(content_type.decode("latin-1")) if key == "boundary"]
    if len(values) != 1 or not values[0]:
        raise BadForm("its content type does not name one boundary")
    return values[0].encode("latin-1", "replace")


def _part_head(data: bytes) -> tuple[str, int]:
    """The head of a part, unfolded, and how long it is with the empty line behind it."""
    ends = [(data.find(mark), len(mark)) for mark in (b"\r\n\r\n", b"\n\n")]
    found = [(at, size) for at, size in ends if at >= 0]
    if not found:
        raise BadForm("a part of it has no end of its head")
    at, size = min(found)
    text = data[:at].decode("utf-8", "replace").replace("\r\n", "\n")
    return text.replace("\n ", " ").replace("\n\t", " "), at + size


def _names(head: str) -> Iterator[str]:
    for line in head.split("\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition":
            yield from (value.strip() for name, value in _params(value) if name == "name")


def _params(header: str) -> list[tuple[str, str]]:
    """The parameters of a header's value, unquoted and decoded as RFC 2231 says."""
    message = Message()
    message["content-type"] = header.strip()
    params = message.get_params(failobj=[], header="content-type")
    return [(key.lower().strip(), collapse_rfc2231_value(value)) for key, value in params]
