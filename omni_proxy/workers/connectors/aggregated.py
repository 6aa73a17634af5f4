"""Any OpenAI server that does both by itself: llama.cpp, TGI, MindIE, a vLLM without a KV connector."""

from __future__ import annotations

from msgspec import Raw

from omni_proxy.call import Call
from omni_proxy.messages import Mode
from omni_proxy.workers.connectors.base import NO_IDS, Peer, PrefillAnswer


class Aggregated:
    """No handoff: a prefill leg never happens."""

    name = "aggregated"
    modes = (Mode.AGGREGATED,)
    handoff_reusable = False
    ids_fields = NO_IDS

    def prefill_body(self, call: Call, room: int, prefill: Peer) -> bytes:
        raise AssertionError("an aggregated worker has no prefill leg")

    def read_prefill(self, body: bytes) -> PrefillAnswer:
        raise AssertionError("an aggregated worker has no prefill leg")

    def decode_fields(self, room: int, prefill: Peer | None, handoff: Raw | None) -> list[tuple[str, bytes]]:
        return []

    def release(self, handoff: Raw) -> tuple[str, bytes] | None:
        return None
