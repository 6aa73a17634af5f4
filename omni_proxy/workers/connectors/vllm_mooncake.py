"""vLLM's Mooncake connector: both legs at once, joined by a transfer id; D finds P by its bootstrap server.

Seen on vLLM 0.32: P answers `kv_transfer_params: null`; a D that is not told P's engine id, or a wrong transfer id,
hangs until its own time limit. So the engine id is asked of P's bootstrap server when P is taken in.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

from omni_proxy.call import Call
from omni_proxy.messages import Mode
from omni_proxy.workers.connectors.answers import PrefillAnswer, read_usage_and_params
from omni_proxy.workers.connectors.base import Usual
from omni_proxy.workers.connectors.fields import one_token_body
from omni_proxy.workers.connectors.pair import Pair

BOOTSTRAP_PORT = 8998


class VllmMooncake(Usual):
    """Parallel; a worker may also do both."""

    name = "vllm-mooncake"
    modes = (Mode.PARALLEL, Mode.AGGREGATED)

    def prefill_body(self, call: Call, pair: Pair, asked: Raw | None) -> bytes:
        params = b'{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":%b}' % _transfer_id(pair)
        return one_token_body(call, [("kv_transfer_params", params)])

    def read_prefill(self, body: bytes) -> PrefillAnswer:
        usage, _ = read_usage_and_params(body)
        return PrefillAnswer(None, usage)

    def decode_fields(self, call: Call, pair: Pair, handoff: bytes | None) -> list[tuple[str, bytes]]:
        prefill = pair.prefill
        if prefill is None:
            return []
        host = f"[{prefill.host}]" if ":" in prefill.host else prefill.host
        address = f"http://{host}:{prefill.bootstrap_port or BOOTSTRAP_PORT}"
        rank = b"" if prefill.rank is None else b',"remote_dp_rank":%d' % prefill.rank
        params = (
            b'{"do_remote_prefill":true,"do_remote_decode":false,"remote_bootstrap_addr":%b,"remote_engine_id":%b%b,'
            b'"transfer_id":%b}'
        ) % (msgspec.json.encode(address), msgspec.json.encode(prefill.engine_id), rank, _transfer_id(pair))
        return [("kv_transfer_params", params)]


def _transfer_id(pair: Pair) -> bytes:
    return b'"omni-%016x"' % pair.room
