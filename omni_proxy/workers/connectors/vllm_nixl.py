"""vLLM's NIXL connector, and the embedded engine, which speaks the same: P first, D pulls.

P is asked with `do_remote_decode`, answers with the place of its blocks, and D gets that place verbatim. Seen on vLLM
0.32: block ids are nested per KV group, so the object is passed on untouched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Raw

from omni_proxy.call import COMPLETIONS, Call
from omni_proxy.json_fields import pick
from omni_proxy.messages import Mode
from omni_proxy.workers.connectors.answers import GarbageAnswer, PrefillAnswer, read_usage_and_params
from omni_proxy.workers.connectors.base import Usual
from omni_proxy.workers.connectors.fields import one_token_body
from omni_proxy.workers.connectors.pair import Pair
from omni_proxy.workers.connectors.token_reports import VLLM, TokenReports

ASK_PREFILL: Final = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
_ASKED: Final = [("kv_transfer_params", ASK_PREFILL)]

_HANDED_OVER: Final = (b'{"do_remote_prefill":true,', b'{"do_remote_prefill": true,')
"""What vLLM's parameters begin with: block ids of a long prompt follow, which need not be read a second time."""
_PULLS: Final[tuple[str, ...]] = ("do_remote_prefill",)


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
        return one_token_body(call, _ASKED)

    def read_prefill(self, body: bytes) -> PrefillAnswer:
        usage, params = read_usage_and_params(body)
        if params is None or params.startswith(_HANDED_OVER):
            return PrefillAnswer(params, usage)
        try:
            (pulls,) = pick(params, _PULLS)
        except msgspec.DecodeError as exc:
            raise GarbageAnswer(f"kv_transfer_params are not as expected ({exc})") from exc
        if pulls != b"true":
            # P's own parameters sent back (seen when P ended by itself): they would crash D.
            raise GarbageAnswer("kv_transfer_params without do_remote_prefill")
        return PrefillAnswer(params, usage)

    def decode_fields(self, call: Call, pair: Pair, handoff: bytes | None) -> list[tuple[str, bytes]]:
        return [] if handoff is None else [("kv_transfer_params", handoff)]
