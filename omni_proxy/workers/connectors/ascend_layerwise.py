"""vLLM-Ascend's push layer by layer: D first. D makes room, then asks for its prefill; P pushes while it computes.

D asks by a call to a "metaserver", which is the gateway itself: the call names the request by the id that D gave it and
says where the KV has to go. P gets what D said, word for word.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

from omni_proxy.call import Call
from omni_proxy.messages import Mode
from omni_proxy.workers.connectors.answers import PrefillAnswer, read_usage_and_params
from omni_proxy.workers.connectors.base import Order, Usual
from omni_proxy.workers.connectors.fields import one_token_body
from omni_proxy.workers.connectors.pair import Pair


class AscendLayerwise(Usual):
    """Parallel, D first; a worker may also do both."""

    name = "ascend-layerwise"
    modes = (Mode.PARALLEL, Mode.AGGREGATED)
    kv_by_id = True
    order = Order.DECODE_FIRST

    def request_id(self, pair: Pair) -> bytes:
        return pair.unique_id if pair.together else pair.request_id

    def prefill_body(self, call: Call, pair: Pair, asked: Raw | None) -> bytes:
        assert asked is not None, "P is asked when D has asked"
        return one_token_body(call, [("min_tokens", b"1"), ("kv_transfer_params", asked)])

    def read_prefill(self, body: bytes) -> PrefillAnswer:
        usage, _ = read_usage_and_params(body)
        return PrefillAnswer(None, usage)

    def decode_fields(self, call: Call, pair: Pair, handoff: bytes | None) -> list[tuple[str, bytes]]:
        if pair.prefill is None:
            return []
        url = msgspec.json.encode(pair.callback_url)
        return [("kv_transfer_params", b'{"do_remote_decode":false,"do_remote_prefill":true,"metaserver":%b}' % url)]
