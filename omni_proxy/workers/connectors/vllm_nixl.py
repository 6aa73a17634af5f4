"""vLLM's NIXL connector, and the embedded engine, which speaks the same: P first, D pulls.

P is asked with `do_remote_decode`, answers with the place of its blocks, and D gets that place verbatim. Seen on vLLM
0.32: block ids are nested per KV group, so the object is passed on untouched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Raw, Struct

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
from omni_proxy.workers.connectors.token_reports import VLLM, TokenReports

ASK_PREFILL: Final = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)


_HANDED_OVER: Final = (b'{"do_remote_prefill":true,', b'{"do_remote_prefill": true,')
"""What vLLM's parameters begin with: block ids of a long prompt follow, which need not be read a second time."""


class _Params(Struct):
    do_remote_prefill: bool = False


_PARAMS = msgspec.json.Decoder(_Params | None)


class VllmNixl(Usual):
    """Sequential; also serves without a handoff."""

    name = "vllm-nixl"
    modes: tuple[Mode, ...] = (Mode.SEQUENTIAL, Mode.AGGREGATED)
    handoff_reusable = True
    token_reports: TokenReports | None = VLLM
    kv_lease_s: float | None = 30.0
    """vLLM 0.32's `kv_lease_duration`; before there were leases, `VLLM_NIXL_ABORT_REQUEST_TIMEOUT` was 480 s."""
    ids_fields: Mapping[str, str] = {COMPLETIONS: "prompt"}

    def prefill_body(self, call: Call, pair: Pair, asked: Raw | None) -> bytes:
        return encode_fields(one_token_fields(call) | {"kv_transfer_params": ASK_PREFILL})

    def read_prefill(self, body: bytes) -> PrefillAnswer:
        usage, raw = read_usage_and_params(body)
        if bytes(raw).startswith(_HANDED_OVER):
            return PrefillAnswer(raw, usage)
        try:
            params = _PARAMS.decode(raw)
        except msgspec.DecodeError as exc:
            raise GarbageAnswer(f"kv_transfer_params are not as expected ({exc})") from exc
        if params is None:
            return PrefillAnswer(None, usage)
        if not params.do_remote_prefill:
            # P's own parameters sent back (seen when P ended by itself): they would crash D.
            raise GarbageAnswer("kv_transfer_params without do_remote_prefill")
        return PrefillAnswer(raw, usage)

    def decode_fields(self, call: Call, pair: Pair, handoff: Raw | None) -> list[tuple[str, bytes]]:
        return [] if handoff is None else [("kv_transfer_params", bytes(handoff))]
