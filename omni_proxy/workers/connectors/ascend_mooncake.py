"""vLLM-Ascend's pull over Mooncake: P first, D pulls; the object of P's answer is another one, but D's all the same."""

from __future__ import annotations

from typing import Final

from msgspec import Raw

from omni_proxy.call import Call
from omni_proxy.workers.connectors.fields import one_token_body
from omni_proxy.workers.connectors.pair import Pair
from omni_proxy.workers.connectors.vllm_nixl import ASK_PREFILL, VllmNixl

_ASKED: Final = [("min_tokens", b"1"), ("kv_transfer_params", ASK_PREFILL)]


class AscendMooncake(VllmNixl):
    """As `vllm-nixl`; P is told to make its one token in any case."""

    name = "ascend-mooncake"
    kv_lease_s = 480.0

    def prefill_body(self, call: Call, pair: Pair, asked: Raw | None) -> bytes:
        return one_token_body(call, _ASKED)
