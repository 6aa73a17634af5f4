"""The embedded engine: vLLM's NIXL shape, and a call that frees blocks which nobody will pull."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from omni_proxy.call import CHAT, COMPLETIONS
from omni_proxy.workers.connectors.vllm_nixl import VllmNixl


class Omni(VllmNixl):
    """As `vllm-nixl`; P need not wait for its lease to end when D will not come."""

    name = "omni"
    ids_fields = {COMPLETIONS: "prompt", CHAT: "prompt_token_ids"}  # noqa: RUF012 (read-only by its type)

    def release(self, handoff: Raw) -> tuple[str, bytes] | None:
        params = msgspec.json.decode(handoff, type=dict[str, Raw])
        rid = params.get("remote_request_id")
        return None if rid is None else ("/omni/release", b'{"request_id":%b}' % bytes(rid))
