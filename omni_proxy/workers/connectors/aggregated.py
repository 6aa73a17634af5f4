"""Any OpenAI server that does both by itself: llama.cpp, TGI, MindIE, a vLLM without a KV connector."""

from __future__ import annotations

from msgspec import Raw

from omni_proxy.call import Call
from omni_proxy.messages import Mode
from omni_proxy.workers.connectors.answers import PrefillAnswer
from omni_proxy.workers.connectors.base import Usual
from omni_proxy.workers.connectors.pair import Pair


class Aggregated(Usual):
    """No handoff: a prefill leg never happens."""

    name = "aggregated"
    modes = (Mode.AGGREGATED,)

    def prefill_body(self, call: Call, pair: Pair, asked: Raw | None) -> bytes:
        raise AssertionError("an aggregated worker has no prefill leg")

    def read_prefill(self, body: bytes) -> PrefillAnswer:
        raise AssertionError("an aggregated worker has no prefill leg")

    def decode_fields(self, call: Call, pair: Pair, handoff: bytes | None) -> list[tuple[str, bytes]]:
        return []
