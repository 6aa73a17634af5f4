"""A client's body as a worker gets it: the model by its name there, token ids, and usage at the end of streams."""

from __future__ import annotations

from typing import Final

import msgspec

from omni_proxy.call import CHAT, COMPLETIONS, Call, Fields, encode_fields
from omni_proxy.multipart import form_with_model
from omni_proxy.workers.connectors.base import Connector

FORCED_USAGE: Final = ("stream_options", b'{"include_usage":true}')
"""Asked of every D so that streams are counted in true tokens; taken out again before the client."""

RETURN_IDS: Final = ("return_token_ids", b"true")
"""Asked of a D whose stream may have to be continued; taken out again before the client."""

USAGE_ON_DEMAND: Final = (CHAT, COMPLETIONS)
"""Streams of these end with usage only where it is asked for."""


def for_worker(call: Call, connector: Connector, name: str = "") -> Call:
    """The call as a worker gets it: the model by its name there, token ids where they are known and it takes them."""
    field = connector.ids_fields.get(call.path) if call.token_ids else None
    renamed = call.asked != "" and call.asked != name
    if field is None and not renamed:
        return call
    if call.form:
        form = call.copy()
        form.body = form_with_model(call.body, name)
        return form
    fields = dict(call.fields)
    if renamed:
        fields["model"] = msgspec.Raw(msgspec.json.encode(name))
    if field is not None:
        fields[field] = msgspec.Raw(call.token_ids)
    changed = call.copy()
    changed.put(fields)
    changed.tampered = True
    return changed


def forced_usage(call: Call) -> tuple[str, bytes]:
    """`stream_options` as the client sent them, with usage at the end of the stream and nowhere else."""
    raw = call.fields["stream_options"] if call.has("stream_options") else None
    if raw is None or bytes(raw) == b"null":
        return FORCED_USAGE
    options = msgspec.json.decode(raw, type=Fields)
    options.pop("continuous_usage_stats", None)
    return "stream_options", encode_fields({**options, "include_usage": b"true"})
