"""vLLM's P2P NCCL connector: P first, but P has to know D, because both addresses are in the request id.

P sends its KV to D's buffer while it computes and answers when that is done; nothing of its answer is used. The id must
be the same on both, letter for letter, as it is the key under which D looks the KV up: see docs/engines.md for vLLM
versions that add letters of their own.
"""

from __future__ import annotations

from msgspec import Raw

from omni_proxy.call import Call
from omni_proxy.messages import Mode
from omni_proxy.workers.connectors.answers import PrefillAnswer, read_usage_and_params
from omni_proxy.workers.connectors.base import Order, Usual
from omni_proxy.workers.connectors.fields import one_token_body
from omni_proxy.workers.connectors.pair import Pair
from omni_proxy.workers.connectors.token_reports import VLLM


class VllmP2pNccl(Usual):
    """Both chosen together, P asked first. D cannot do without P: it takes the addresses out of every id."""

    name = "vllm-p2p-nccl"
    token_reports = VLLM
    modes = (Mode.PARALLEL,)
    kv_by_id = True
    order = Order.PREFILL_FIRST

    def request_id(self, pair: Pair) -> bytes:
        assert pair.prefill is not None
        assert pair.decode is not None
        addresses = f"___prefill_addr_{pair.prefill.kv_address}___decode_addr_{pair.decode.kv_address}"
        return b"%b_%032x" % (addresses.encode(), pair.room)

    def prefill_body(self, call: Call, pair: Pair, asked: Raw | None) -> bytes:
        return one_token_body(call)

    def read_prefill(self, body: bytes) -> PrefillAnswer:
        usage, _ = read_usage_and_params(body)
        return PrefillAnswer(None, usage)

    def decode_fields(self, call: Call, pair: Pair, handoff: bytes | None) -> list[tuple[str, bytes]]:
        return []
