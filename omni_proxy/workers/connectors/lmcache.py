"""Stores that P writes and D reads (LMCache, vLLM's shared storage): P first, and nothing that has to be told to D."""

from __future__ import annotations

from msgspec import Raw

from omni_proxy.call import Call
from omni_proxy.messages import Mode
from omni_proxy.workers.connectors.answers import PrefillAnswer, read_usage_and_params
from omni_proxy.workers.connectors.base import Usual
from omni_proxy.workers.connectors.fields import one_token_body
from omni_proxy.workers.connectors.pair import Pair
from omni_proxy.workers.connectors.token_reports import VLLM

_IN_THE_STORE = b"{}"


class Lmcache(Usual):
    """Sequential; what D does not find in the store it computes itself."""

    name = "lmcache"
    token_reports = VLLM
    modes = (Mode.SEQUENTIAL, Mode.AGGREGATED)
    handoff_reusable = True

    def prefill_body(self, call: Call, pair: Pair, asked: Raw | None) -> bytes:
        return one_token_body(call)

    def read_prefill(self, body: bytes) -> PrefillAnswer:
        usage, _ = read_usage_and_params(body)
        return PrefillAnswer(_IN_THE_STORE, usage)

    def decode_fields(self, call: Call, pair: Pair, handoff: bytes | None) -> list[tuple[str, bytes]]:
        return []
