"""The embedded engine's connector: one P body for both modes, and the D body of each."""

from __future__ import annotations

import msgspec
import pytest

from omni_proxy.call import COMPLETIONS, Call, parse_call
from omni_proxy.messages import Mode
from omni_proxy.workers.connectors.pair import Pair, Peer
from omni_proxy.workers.connectors.registry import CONNECTORS

OMNI = CONNECTORS["omni"]
P = Peer("p", "10.0.0.1", 8000, bootstrap_port=5601)
D = Peer("d", "10.0.0.2", 8000)
TOGETHER = Pair(b"r", 77, P, D, together=True)


@pytest.fixture
def call() -> Call:
    return parse_call(COMPLETIONS, b'{"model":"m","prompt":"hi","max_tokens":9,"stream":true,"bootstrap_room":5}')


def test_it_can_do_every_mode() -> None:
    assert OMNI.modes == (Mode.SEQUENTIAL, Mode.PARALLEL, Mode.AGGREGATED)


def test_p_keeps_its_kv_and_opens_a_room_in_parallel_only(call: Call) -> None:
    body = msgspec.json.decode(OMNI.prefill_body(call, TOGETHER, None))
    assert (body["bootstrap_room"], body["max_tokens"], body["stream"]) == (77, 1, False)
    assert body["kv_transfer_params"]["do_remote_decode"] is True
    alone = msgspec.json.decode(OMNI.prefill_body(call, Pair(b"r", 77, P), None))
    assert "bootstrap_room" not in alone
    assert alone["kv_transfer_params"]["do_remote_decode"] is True


def test_d_joins_the_room_when_p_has_not_answered(call: Call) -> None:
    assert dict(OMNI.decode_fields(call, TOGETHER, None)) == {
        "bootstrap_host": b'"10.0.0.1"',
        "bootstrap_port": b"5601",
        "bootstrap_room": b"77",
    }
    v6 = Pair(b"r", 77, Peer("p", "::1", 8000, 5601), D, together=True)
    assert dict(OMNI.decode_fields(call, v6, None))["bootstrap_host"] == b'"[::1]"'


def test_d_pulls_when_p_has_answered_and_does_all_without_p(call: Call) -> None:
    assert OMNI.decode_fields(call, Pair(b"r", 77, P, D), b"{}") == [("kv_transfer_params", b"{}")]
    assert OMNI.decode_fields(call, Pair(b"r", 77, None, D), None) == []
