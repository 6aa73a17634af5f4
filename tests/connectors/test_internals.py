"""What is internal does not reach a worker: in headers, in the body, in what engines unpack into it, anywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

from omni_proxy.call import GENERATING, INTERNAL_FIELDS, MULTIPART, ONE_STEP, append_fields, parse_call
from omni_proxy.internals import NESTS
from tests.relay.conftest import Start, start
from tests.relay.scripted import Seen, decode_answer, prefill_answer

__all__ = ["start"]

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
}
PATHS = sorted((GENERATING | ONE_STEP) - MULTIPART)
HEADERS = {
    "x-data-parallel-rank": "424242",
    "X-Data-Parallel-Host-Port": "evil:1",
    "x-prefiller-host-port": "evil:1",
    "x-prefiller-url": "http://evil",
    "x-encoder-hosts-ports": "evil:1",
}


def passed(path: str, **fields: Any) -> Any:
    body = json.dumps({"model": "m", **BODIES.get(path, {"input": "hi"}), **fields}).encode()
    return json.loads(append_fields(parse_call(path, body), []))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("nest", ["", *sorted(NESTS)])
def test_none_passes(path: str, nest: str) -> None:
    forged = {name: {"evil": 1} for name in INTERNAL_FIELDS}
    kept = {"top_k": 5, "seed": 9223372036854775807}
    if not nest:
        assert passed(path, **forged, **kept) == passed(path, **kept)
        return
    deep = {**kept, "list": [[1, {**forged, "a": 1}], 2], "inner": {"more": {**forged, "b": 2.50}}}
    assert passed(path, **{nest: {**forged, **deep}})[nest] == {
        **kept,
        "list": [[1, {"a": 1}], 2],
        "inner": {"more": {"b": 2.50}},
    }


def test_nests_without_anything_internal_stay_byte_for_byte() -> None:
    body = b'{"model":"m","prompt":"hi", "vllm_xargs":{"a":[1,2.50,{}] ,"n":9223372036854775808},"extra_body":"text"}'
    assert append_fields(parse_call("/v1/completions", body), []) is body


@pytest.mark.parametrize("value", ["5", "null", '"kv_transfer_params"', "[]", "{}", "[" * 40 + "]" * 40])
def test_odd_nests(value: str) -> None:
    body = f'{{"model":"m","prompt":"hi","vllm_xargs":{value}}}'.encode()
    sent = json.loads(append_fields(parse_call("/v1/completions", body), []))
    assert "vllm_xargs" in sent
    assert len(json.dumps(sent)) < 150


def test_what_is_the_clients_own_passes() -> None:
    """A tool may have a parameter of that name."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"kv_transfer_params": {}}}}]
    assert passed("/v1/chat/completions", tools=tools)["tools"] == tools


@pytest.mark.parametrize("path", PATHS)
async def test_headers_of_every_endpoint(start: Start, path: str) -> None:
    async def p(seen: Seen) -> None:
        await seen.answer(200, prefill_answer())

    async def d(seen: Seen) -> None:
        await seen.answer(200, decode_answer())

    rig = await start(p0=p, d0=d)
    body = {"model": "m", **BODIES.get(path, {"input": "hi"}), "vllm_xargs": {"kv_transfer_params": "evil"}}
    response = await rig.client.post(path, json=body, headers=HEADERS)
    assert response.status_code == 200
    seen = [seen for worker in rig.workers.values() for seen in worker.seen]
    assert seen
    for one in seen:
        told = (repr(one.headers) + one.body.decode()).lower()
        assert "evil" not in told
        assert "424242" not in told
