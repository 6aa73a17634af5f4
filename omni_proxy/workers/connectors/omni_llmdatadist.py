"""Omni's LLMDataDist connectors on Ascend. Pull: P first, D gets the place of P's blocks. D2P: both at once, D asks P.

Which of the two the engines run decides the mode: `schedule_mode: sequential` for pull, `parallel` for D2P.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

from omni_proxy.call import COMPLETIONS, Call, encode_fields
from omni_proxy.messages import Mode
from omni_proxy.workers.connectors.base import (
    GarbageAnswer,
    Pair,
    PrefillAnswer,
    Usual,
    read_usage_and_params,
)
from omni_proxy.workers.connectors.fields import one_token_fields

BOOTSTRAP_PORT = 8998
_NEEDED = frozenset({"remote_cluster_id", "remote_host_ip", "remote_block_ids"})
_PARAMS = msgspec.json.Decoder(dict[str, Raw] | None)


class OmniLlmDataDist(Usual):
    """Engines know their role from their own settings, so that P is not told to keep its KV."""

    name = "omni-llmdatadist"
    kv_lease_s = 600.0
    """Its `BLOCK_RELEASE_DELAY`."""
    modes = (Mode.SEQUENTIAL, Mode.PARALLEL, Mode.AGGREGATED)
    kv_by_id = True

    def request_id(self, pair: Pair) -> bytes:
        # With D2P the id is the key under which D asks for its KV.
        return pair.unique_id if pair.together else pair.request_id

    def prefill_body(self, call: Call, pair: Pair, asked: Raw | None) -> bytes:
        return encode_fields(one_token_fields(call) | (dict(_meeting(pair)) if pair.together else {}))

    def read_prefill(self, body: bytes) -> PrefillAnswer:
        usage, raw = read_usage_and_params(body)
        try:
            params = _PARAMS.decode(raw)
        except msgspec.DecodeError as exc:
            raise GarbageAnswer(f"kv_transfer_params are not as expected ({exc})") from exc
        whole = params is not None and all(bytes(params.get(name, b"null")) != b"null" for name in _NEEDED)
        return PrefillAnswer(raw if whole else None, usage)

    def decode_fields(self, call: Call, pair: Pair, handoff: Raw | None) -> list[tuple[str, bytes]]:
        if handoff is not None:
            return [("kv_transfer_params", bytes(handoff))]
        if pair.prefill is None:
            return []
        params = b'{"remote_cluster_id":%b,"remote_request_id":%b}' % (
            msgspec.json.encode(pair.prefill.host),
            msgspec.json.encode(_engine_id(call, self.request_id(pair)).decode()),
        )
        return [*_meeting(pair), ("kv_transfer_params", params)]


def _meeting(pair: Pair) -> list[tuple[str, bytes]]:
    """As strings, unlike SGLang's."""
    prefill = pair.prefill
    assert prefill is not None
    return [
        ("bootstrap_host", msgspec.json.encode(prefill.host)),
        ("bootstrap_port", b'"%d"' % (prefill.bootstrap_port or BOOTSTRAP_PORT)),
        ("bootstrap_room", b'"%d"' % pair.room),
    ]


def _engine_id(call: Call, request_id: bytes) -> bytes:
    """What the engine makes of a request id: the number of the prompt goes with completions."""
    return b"cmpl-%b-0" % request_id if call.path == COMPLETIONS else b"chatcmpl-%b" % request_id
