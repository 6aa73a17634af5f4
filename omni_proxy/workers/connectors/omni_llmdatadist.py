"""Omni's LLMDataDist connectors on Ascend. Pull: P first, D gets the place of P's blocks. D2P: both at once, D asks P.

Which of the two the engines run decides the mode: `schedule_mode: sequential` for pull, `parallel` for D2P.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

from omni_proxy.call import COMPLETIONS, Call
from omni_proxy.json_fields import pick
from omni_proxy.messages import Mode
from omni_proxy.workers.connectors.answers import GarbageAnswer, PrefillAnswer, read_usage_and_params
from omni_proxy.workers.connectors.base import Usual
from omni_proxy.workers.connectors.fields import one_token_body
from omni_proxy.workers.connectors.pair import Pair

BOOTSTRAP_PORT = 8998
_NEEDED = ("remote_cluster_id", "remote_host_ip", "remote_block_ids")


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
        return one_token_body(call, _meeting(pair) if pair.together else ())

    def read_prefill(self, body: bytes) -> PrefillAnswer:
        usage, params = read_usage_and_params(body)
        try:
            whole = params is not None and None not in pick(params, _NEEDED)
        except msgspec.DecodeError as exc:
            raise GarbageAnswer(f"kv_transfer_params are not as expected ({exc})") from exc
        return PrefillAnswer(params if whole else None, usage)

    def decode_fields(self, call: Call, pair: Pair, handoff: bytes | None) -> list[tuple[str, bytes]]:
        if handoff is not None:
            return [("kv_transfer_params", handoff)]
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
