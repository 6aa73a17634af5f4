"""The embedded engine: vLLM's NIXL shape, a call that frees blocks which nobody will pull, and a room to meet in.

In parallel mode both legs name a room: D joins it on P, which pushes the KV while it computes. Where D is asked after P
has answered it pulls with P's parameters.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

from omni_proxy.call import CHAT, COMPLETIONS, Call
from omni_proxy.messages import Mode
from omni_proxy.workers.connectors.fields import one_token_body
from omni_proxy.workers.connectors.pair import Pair
from omni_proxy.workers.connectors.sglang import meeting
from omni_proxy.workers.connectors.token_reports import OMNI
from omni_proxy.workers.connectors.vllm_nixl import ASK_PREFILL, VllmNixl


class Omni(VllmNixl):
    """As `vllm-nixl`, and in parallel; P need not wait for its lease to end when D will not come."""

    name = "omni"
    modes = (Mode.SEQUENTIAL, Mode.PARALLEL, Mode.AGGREGATED)
    token_reports = OMNI
    releases_kv = True
    ids_fields = {COMPLETIONS: "prompt", CHAT: "prompt_token_ids"}  # noqa: RUF012 (read-only by its type)

    def prefill_body(self, call: Call, pair: Pair, asked: Raw | None) -> bytes:
        meet = meeting(pair) if pair.together else []
        return one_token_body(call, [("kv_transfer_params", ASK_PREFILL), *meet])

    def decode_fields(self, call: Call, pair: Pair, handoff: bytes | None) -> list[tuple[str, bytes]]:
        if handoff is None and pair.together:
            return meeting(pair)
        return super().decode_fields(call, pair, handoff)

    def release(self, handoff: bytes) -> tuple[str, bytes] | None:
        params = msgspec.json.decode(handoff, type=dict[str, Raw])
        rid = params.get("remote_request_id")
        return None if rid is None else ("/omni/release", b'{"request_id":%b}' % bytes(rid))
