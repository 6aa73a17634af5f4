"""A connector of one's own, and a gateway that speaks it.

    python examples/own_connector.py CONFIG

A connector says what P is sent, what P's answer means and what D is sent; it turns bytes into bytes and keeps no state.
This one is for an engine whose P answers with `kv_transfer_params`, as vLLM's does, and whose D has to be told who P
was. In the repository it is a file in `workers/connectors/`, a line in its `registry.py`, a name in `config.py` and an
entry in `tests/connectors/protocols.py`; here it takes the place of `lmcache`.
"""

from __future__ import annotations

import sys
from typing import cast

import msgspec
from msgspec import Raw

from omni_proxy.call import Call
from omni_proxy.cli import main as omni_proxy
from omni_proxy.messages import Mode
from omni_proxy.workers.connectors.answers import PrefillAnswer, read_usage_and_params
from omni_proxy.workers.connectors.base import Connector, Usual
from omni_proxy.workers.connectors.fields import one_token_body
from omni_proxy.workers.connectors.pair import Pair
from omni_proxy.workers.connectors.registry import CONNECTORS


class Named(Usual):
    """P first; D gets P's parameters and P's name."""

    name = "lmcache"
    modes = (Mode.SEQUENTIAL, Mode.AGGREGATED)
    handoff_reusable = True

    def prefill_body(self, call: Call, pair: Pair, asked: Raw | None) -> bytes:
        return one_token_body(call, [("kv_transfer_params", b'{"do_remote_decode":true}')])

    def read_prefill(self, body: bytes) -> PrefillAnswer:
        usage, params = read_usage_and_params(body)
        return PrefillAnswer(params, usage)

    def decode_fields(self, call: Call, pair: Pair, handoff: bytes | None) -> list[tuple[str, bytes]]:
        if handoff is None or pair.prefill is None:
            return []  # D does both
        return [
            ("kv_transfer_params", handoff),
            ("computed_by", msgspec.json.encode(pair.prefill.name)),
        ]


def main(config: str) -> int:
    cast("dict[str, Connector]", CONNECTORS)["lmcache"] = Named()
    return omni_proxy(["serve", "-c", config])


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
