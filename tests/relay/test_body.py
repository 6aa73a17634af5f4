"""What becomes of a client's body on its way: untouched for D but for what is ours, capped for P."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from omni_proxy.call import INTERNAL_FIELDS
from tests.relay.conftest import Start
from tests.relay.scripted import HANDOFF, Seen, decode_stream, prefill_ok

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"model": "m", "prompt": "hi"},
}


async def test_d_gets_the_clients_bytes_and_our_field_at_the_end(start: Start) -> None:
    """Spaces, key order, large and odd numbers, escapes, unknown fields, doubled keys (faults R11, R12)."""
    rig = await start()
    body = (
        b' {"zeta" : [1, 2.50, 1e400, 9223372036854775808, -0.0],\t"model":"m", "messages":[{"role":"user",'
        b'"content":"h\\u00e9 \xf0\x9f\x98\x80","name":"x"}],"alpha":{"b":1,"a":{"b":2}},"x":1,"x":2}\n'
    )
    answer = await rig.client.post(CHAT, content=body)
    assert answer.status_code == 200
    ours = b',"kv_transfer_params":' + json.dumps(HANDOFF).encode() + b"}"
    assert rig["d0"].seen[0].body == body.rstrip()[:-1] + ours
    await rig.idle()


FIELDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # what the client sends, and what of it P gets besides the cap of one unstreamed token
    "no cap at all": (CHAT, {}, {}),
    "max_tokens": (CHAT, {"max_tokens": 256}, {}),
    "max_completion_tokens": (CHAT, {"max_completion_tokens": 256}, {"max_completion_tokens": 1}),
    "both caps": (CHAT, {"max_tokens": 9, "max_completion_tokens": 7}, {"max_completion_tokens": 1}),
    "max_output_tokens": (CHAT, {"max_output_tokens": 9}, {"max_output_tokens": 1}),
    "min_tokens": (CHAT, {"max_tokens": 500, "min_tokens": 100}, {}),
    "stream": (CHAT, {"stream": True, "stream_options": {"include_usage": True}}, {}),
    "stops": (COMPLETIONS, {"stop": ["\n"], "stop_token_ids": [2], "include_stop_str_in_output": True}, {}),
    "one sample": (COMPLETIONS, {"n": 1, "best_of": 1}, {}),
    "logprobs": (CHAT, {"logprobs": True, "top_logprobs": 3}, {}),
    "structured": (CHAT, {"response_format": {"type": "json_object"}, "guided_json": {}}, {}),
    "what the prompt is made of": (
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": 2}}}],
         "chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": True, "documents": []},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": 2}}}],
         "chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": True, "documents": []},
    ),
    "what samples": (CHAT, {"temperature": 0.5, "seed": 7, "top_k": 5}, {"temperature": 0.5, "seed": 7, "top_k": 5}),
    "what nobody knows": (COMPLETIONS, {"x_vendor": {"a": [1, 2.5]}}, {"x_vendor": {"a": [1, 2.5]}}),
    "token ids": (COMPLETIONS, {"prompt": [1, 2, 3]}, {"prompt": [1, 2, 3]}),
    "one prompt in a list": (COMPLETIONS, {"prompt": ["hi"]}, {"prompt": ["hi"]}),
    "ignore_eos": (COMPLETIONS, {"ignore_eos": False}, {}),
}  # fmt: skip


async def test_what_p_is_asked(start: Start) -> None:
    """Faults 1.1: one token, not streamed, ended by length and by nothing else, the prompt as it is."""
    rig = await start()
    for name, (path, sent, kept) in FIELDS.items():
        answer = await rig.client.post(path, json=BODIES[path] | sent)
        assert answer.status_code == 200
        p, d = rig["p0"].seen[-1], rig["d0"].seen[-1]
        assert (p.path, d.path) == (path, path)
        asked = p.json
        params = asked.pop("kv_transfer_params")
        assert params["do_remote_decode"] is True
        assert params["do_remote_prefill"] is False
        one = {"max_tokens": 1, "stream": False, "ignore_eos": True}
        assert (name, asked) == (name, BODIES[path] | kept | one)
        assert list(asked)[: len(BODIES[path])] == list(BODIES[path])
        assert d.json == BODIES[path] | sent | {"kv_transfer_params": HANDOFF}
    await rig.idle()


async def test_tool_text_is_the_same_bytes_on_both_legs(start: Start) -> None:
    rig = await start()
    tools = b'[ {"type":"function","function":{"name":"f","parameters":{"z":{"y":1.0},"a":[ ]}}} ]'
    body = b'{"tools":' + tools + b',"model":"m","messages":[{"role":"user","content":"hi"}]}'
    assert (await rig.client.post(CHAT, content=body)).status_code == 200
    assert tools in rig["p0"].seen[0].body
    assert tools in rig["d0"].seen[0].body


@pytest.mark.parametrize("connector", ["vllm-nixl", "sglang", "aggregated"])
async def test_fields_among_workers_are_never_a_clients(start: Start, connector: str) -> None:
    scripts = {"m0": decode_stream} if connector == "aggregated" else {"p0": prefill_ok, "d0": decode_stream}
    rig = await start({"connector": connector}, **scripts)
    mark = 424242
    body = json.dumps({**BODIES[CHAT], **dict.fromkeys(INTERNAL_FIELDS, mark)})
    # The same name in other letters, and twice.
    body = body[:-1] + ',"kv\\u005ftransfer_params":424242,"bootstrap_room":424242,"bootstrap_room":424242}'
    answer = await rig.client.post(CHAT, content=body)
    assert answer.status_code == 200
    for worker in rig.workers.values():
        assert len(worker.seen) == 1
        assert b"424242" not in worker.seen[0].body
        assert worker.seen[0].json["messages"] == BODIES[CHAT]["messages"]
    await rig.idle()


async def test_usage_that_we_need_keeps_the_clients_other_options(start: Start) -> None:
    rig = await start()
    options = {"include_usage": False, "continuous_usage_stats": True, "include_obfuscation": False}
    for sent, asked in (
        (options, {"include_usage": True, "include_obfuscation": False}),
        ({}, {"include_usage": True}),
        (None, {"include_usage": True}),
        ({"include_usage": True, "continuous_usage_stats": True},) * 2,
    ):
        body = BODIES[CHAT] | {"stream": True, "stream_options": sent}
        answer = await rig.client.post(CHAT, json=body)
        assert answer.status_code == 200
        assert rig["d0"].seen[-1].json["stream_options"] == asked
    await rig.idle()


async def test_several_answers_are_one_workers_business(start: Start) -> None:
    """Faults R7 and R8: one room or one set of blocks cannot serve several."""
    rig = await start(p0=prefill_ok, d0=decode_stream)
    extras: list[dict[str, Any]] = [{"n": 2}, {"prompt": ["a", "b"]}, {"prompt": [[1], [2, 3]]}, {"echo": True}]
    for extra in [*extras, {"prompt_logprobs": 1}]:
        answer = await rig.client.post(COMPLETIONS, json=BODIES[COMPLETIONS] | extra)
        assert answer.status_code == 200
        assert rig["d0"].seen[-1].json == BODIES[COMPLETIONS] | extra
    assert not rig["p0"].seen
    await rig.idle()


@pytest.mark.parametrize("answer", ["stop", "nothing"])
async def test_a_missed_handoff_is_made_good(start: Start, answer: str) -> None:
    """Faults R6: P ended by itself and gives no parameters; the prompt is computed once more, never guessed."""

    async def prefill(seen: Seen) -> None:
        extra = b'"kv_transfer_params":null,' if answer == "stop" else b""
        await seen.answer(200, b'{%b"choices":[]}' % extra)

    rig = await start(p0=prefill, d0=decode_stream)
    response = await rig.chat()
    assert response.status_code == 200
    assert "kv_transfer_params" not in rig["d0"].seen[0].json
    assert len(rig["p0"].seen) == len(rig["d0"].seen) == 1
    assert (await rig.timeline(response))["mode"] == "aggregated"
    assert 'omni_handoffs_total{result="missed"} 1.0' in (await rig.client.get("/metrics")).text
    await rig.idle()


async def test_a_large_prompt_to_a_worker_that_reads_slowly(start: Start) -> None:
    text = "\u00e9" * (4 << 20)
    rig = await start()
    asked = asyncio.create_task(rig.chat(messages=[{"role": "user", "content": text}], max_tokens=3))
    assert (await asked).status_code == 200
    assert rig["p0"].seen[0].json["messages"][0]["content"] == text
    assert rig["d0"].seen[0].json["messages"][0]["content"] == text
    await rig.idle()
