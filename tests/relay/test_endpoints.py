"""Every endpoint besides chat and completions: which workers answer it, and that its bytes pass as they are."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.relay.conftest import Start
from tests.relay.raw import post
from tests.relay.scripted import HANDOFF, Seen, decode_stream, prefill_ok
from tests.workers.server.conftest import write_tokenizer

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    RESPONSES: {"model": "m", "input": "hi"},
    MESSAGES: {"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]},
}
ONE_STEP: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"model": "m", "input": ["a", "b"], "encoding_format": "float"},
    "/v1/rerank": {"model": "m", "query": "q", "documents": ["a", "b"]},
    "/v1/score": {"model": "m", "text_1": "a", "text_2": ["b"]},
    "/v1/audio/speech": {"model": "m", "input": "hi", "voice": "x"},
    "/tokenize": {"model": "m", "prompt": "hi"},
    "/detokenize": {"model": "m", "tokens": [1, 2]},
    "/v1/messages/count_tokens": {"model": "m", "messages": []},
}


def prefilled(usage: dict[str, Any], **params: Any) -> bytes:
    return json.dumps({"id": "x", "usage": usage, "kv_transfer_params": HANDOFF | params}).encode()


def named(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


async def test_one_worker_answers_what_is_no_generation(start: Start) -> None:
    async def worker(seen: Seen) -> None:
        await seen.answer(200, b'{"object":"list","data":[1e400],"usage":{"prompt_tokens":4,"total_tokens":4}}')

    rig = await start(p0=prefill_ok, m0=worker, m1=worker)
    for path, body in ONE_STEP.items():
        for _ in range(2):
            answer = await rig.client.post(path, json=body)
            assert answer.status_code == 200
            assert answer.content.startswith(b'{"object":"list","data":[1e400]')
    # Equals take turns; they are equals until their times differ.
    assert rig["m0"].seen
    assert rig["m1"].seen
    seen = [*rig["m0"].seen, *rig["m1"].seen]
    assert sorted(s.path for s in seen) == sorted([*ONE_STEP, *ONE_STEP])
    assert all(s.json == ONE_STEP[s.path] for s in seen)
    assert not rig["p0"].seen
    await rig.idle()


async def test_a_list_and_what_is_not_json_pass_too(start: Start) -> None:
    async def worker(seen: Seen) -> None:
        if seen.path == "/rerank":
            await seen.answer(200, b'[{"index":0,"score":1}]')
        else:
            await seen.answer(200, bytes(range(256)) * 64, "audio/wav")

    rig = await start(m0=worker)
    assert (await rig.client.post("/rerank", json={"model": "m", "texts": []})).json() == [{"index": 0, "score": 1}]
    speech = await rig.client.post("/v1/audio/speech", json=ONE_STEP["/v1/audio/speech"])
    assert speech.headers["content-type"] == "audio/wav"
    assert speech.content == bytes(range(256)) * 64
    await rig.idle()


async def test_half_a_sound_is_never_a_whole_one(start: Start) -> None:
    async def worker(seen: Seen) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: audio/wav\r\ntransfer-encoding: chunked\r\n\r\n"
        await seen.send(head + b"4\r\nabcd\r\n")
        await asyncio.sleep(0.05)
        seen.reset()

    rig = await start(m0=worker)
    client = await rig.raw()
    await client.send(post(json.dumps(ONE_STEP["/v1/audio/speech"]).encode(), path="/v1/audio/speech"))
    answer = await client.response()
    assert (answer.body, answer.clean) == (b"abcd", False)
    await rig.idle()


async def test_a_file_passes_as_it_was_sent(start: Start) -> None:
    async def worker(seen: Seen) -> None:
        await seen.answer(200, b"some words", "text/plain; charset=utf-8")

    rig = await start(m0=worker)
    sound = bytes(range(256)) * 300
    files = {"file": ("a.wav", sound, "audio/wav")}
    answer = await rig.client.post(
        "/v1/audio/transcriptions", files=files, data={"model": "m", "response_format": "text"}
    )
    assert (answer.status_code, answer.text) == (200, "some words")
    seen = rig["m0"].seen[0]
    assert sound in seen.body
    assert seen.headers["content-type"].startswith("multipart/form-data; boundary=")
    assert seen.body.startswith(b"--" + seen.headers["content-type"].partition("boundary=")[2].encode())
    for path, status, code in (
        ("/v1/audio/transcriptions", 404, "model_not_found"),
        ("/v1/audio/translations", 404, "model_not_found"),
    ):
        refused = await rig.client.post(path, files=files, data={"model": "other"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
    refused = await rig.client.post("/v1/audio/transcriptions", json={"model": "m"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_value")
    await rig.idle()


async def test_a_form_with_a_field_that_is_not_for_clients_is_refused(start: Start) -> None:
    rig = await start()
    files = {"file": ("a.wav", b"sound", "audio/wav")}
    for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
        for name in ("kv_transfer_params", "bootstrap_room", "rid"):
            refused = await rig.client.post(path, files=files, data={"model": "m", name: "{}"})
            error = refused.json()["error"]
            assert (refused.status_code, error["code"], error["param"]) == (400, "invalid_value", name)
    assert rig.untouched()
    await rig.idle()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/v1/responses"])
async def test_query_strings_stay_here(start: Start, path: str) -> None:
    """Engines read none, and whoever has one read may not be told of KV by it."""
    rig = await start()
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "input": "hi"}
    query = "?kv_transfer_params=evil&bootstrap_host=evil&api-version=1"
    await rig.client.post(path + query, json=body)
    seen = [seen for worker in rig.workers.values() for seen in worker.seen]
    assert seen
    assert {one.path for one in seen} == {path}
    assert all("evil" not in repr(one.headers) and b"evil" not in one.body for one in seen)


async def test_routes_that_nobody_allowed_do_not_pass(start: Start) -> None:
    """Faults D18: engines guard /v1 only."""
    rig = await start(m0=decode_stream)
    for path in ("/sleep", "/wake_up", "/pause", "/collective_rpc", "/v1/load_lora_adapter", "/server_info"):
        assert (await rig.client.post(path, json={"model": "m"})).status_code == 404
    assert (await rig.client.get("/v1/embeddings")).status_code == 405
    assert rig.untouched()


@pytest.mark.parametrize("path", BODIES)
async def test_p_and_d_share_responses_and_messages(start: Start, path: str) -> None:
    usage = {"input_tokens": 10, "output_tokens": 1, "input_tokens_details": {"cached_tokens": 3}}

    async def prefill(seen: Seen) -> None:
        await seen.answer(200, prefilled(usage))

    async def decode(seen: Seen) -> None:
        done = usage | {"output_tokens": 7, "input_tokens_details": {"cached_tokens": 9}}
        await seen.answer(200, json.dumps({"id": "r", "type": "message", "usage": done}).encode())

    rig = await start(p0=prefill, d0=decode)
    extra = {"stop_sequences": ["x"], "temperature": 0, "tool_choice": {"type": "any"}, "x_vendor": [1]}
    answer = await rig.client.post(path, json=BODIES[path] | extra)
    assert answer.status_code == 200
    asked = rig["p0"].seen[0].json
    cap = "max_output_tokens" if path == RESPONSES else "max_tokens"
    assert asked.pop(cap) == 1
    assert asked.pop("stream") is False
    assert asked.pop("kv_transfer_params")["do_remote_decode"] is True
    ours = {"ignore_eos": True, "store": False} if path == RESPONSES else {}
    sent = BODIES[path] | {k: v for k, v in extra.items() if k != "stop_sequences"} | ours
    sent.pop(cap, None)
    assert asked == sent
    assert rig["d0"].seen[0].json == BODIES[path] | extra | {"kv_transfer_params": HANDOFF}
    assert answer.json()["usage"]["input_tokens_details"]["cached_tokens"] == 3, "P's count, not D's"
    record = next(iter(rig.gateway.scheduling.last(1)))
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (10, 3, 7)
    await rig.idle()


STREAMS: dict[str, list[bytes]] = {
    RESPONSES: [
        named("response.created", response={"status": "in_progress"}),
        named("response.output_text.delta", delta="Hel"),
        named("response.output_text.delta", delta='l"usage":o'),
        named("response.completed", response={"usage": {"input_tokens": 10, "output_tokens": 2}}),
    ],
    MESSAGES: [
        named("message_start", message={"id": "m", "usage": {"input_tokens": 10, "output_tokens": 0}}),
        named("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        named("content_block_delta", index=0, delta={"type": "text_delta", "text": "Hello"}),
        named("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 2}),
        named("message_stop"),
    ],
}


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("done", [b"", b"data: [DONE]\n\n"])
@pytest.mark.parametrize("step", [1, 1 << 20])
async def test_their_streams_pass_as_they_are(start: Start, path: str, done: bytes, step: int) -> None:
    whole = b"".join(STREAMS[path]) + done

    async def decode(seen: Seen) -> None:
        await seen.open_stream()
        for at in range(0, len(whole), step):
            await seen.chunk(whole[at : at + step])
        await seen.end_stream()

    rig = await start(p0=prefill_ok, d0=decode)
    answer = await rig.client.post(path, json=BODIES[path] | {"stream": True})
    assert answer.content == whole
    assert "stream_options" not in rig["d0"].seen[0].json
    record = next(iter(rig.gateway.scheduling.last(1)))
    assert (record.outcome, record.prompt_tokens, record.completion_tokens) == ("completed", 10, 2)
    assert record.first_token_at is not None
    await rig.idle()


@pytest.mark.parametrize("path", STREAMS)
async def test_their_streams_never_end_cleanly_when_they_break(start: Start, path: str) -> None:
    """Faults S7, C4: one relay for all routes."""

    async def decode(seen: Seen) -> None:
        await seen.open_stream()
        for event in STREAMS[path][:3]:
            await seen.chunk(event)
        await asyncio.sleep(0.05)
        seen.reset()

    rig = await start(p0=prefill_ok, d0=decode)
    client = await rig.raw()
    await client.send(post(json.dumps(BODIES[path] | {"stream": True}).encode(), path=path))
    answer = await client.response()
    last = answer.body.decode().strip().split("\n\n")[-1]
    kind, data = last.split("\n")
    told = json.loads(data.removeprefix("data: "))
    assert (kind, told["type"], told["code"]) == ("event: error", "error", "worker_closed")
    assert told["error"]["message"] == told["message"]
    assert not answer.clean
    await rig.idle()


@pytest.mark.parametrize("path", STREAMS)
async def test_a_client_that_leaves_ends_them_on_the_worker(start: Start, path: str) -> None:
    gone = asyncio.Event()

    async def decode(seen: Seen) -> None:
        await seen.open_stream()
        for event in STREAMS[path][:3]:
            await seen.chunk(event)
        await seen.gone.wait()
        gone.set()

    rig = await start(p0=prefill_ok, d0=decode)
    async with rig.client.stream("POST", path, json=BODIES[path] | {"stream": True}) as answer:
        async for _ in answer.aiter_raw():
            break
    async with asyncio.timeout(2):
        await gone.wait()
    await rig.idle()


async def test_an_error_in_their_stream_is_told_and_counted(start: Start) -> None:
    async def decode(seen: Seen) -> None:
        await seen.open_stream()
        await seen.chunk(STREAMS[RESPONSES][1] + named("error", message="out of memory"))
        await seen.end_stream()

    rig = await start(p0=prefill_ok, d0=decode)
    answer = await rig.client.post(RESPONSES, json=BODIES[RESPONSES] | {"stream": True})
    assert b"out of memory" in answer.content
    assert next(iter(rig.gateway.scheduling.last(1))).outcome == "failed"
    await rig.idle()


async def test_responses_in_the_background_are_one_workers_business(start: Start) -> None:
    rig = await start(p0=prefill_ok, d0=decode_stream)
    for extra in ({"background": True}, {"previous_response_id": "resp_1"}):
        assert (await rig.client.post(RESPONSES, json=BODIES[RESPONSES] | extra)).status_code == 200
        assert rig["d0"].seen[-1].json == BODIES[RESPONSES] | extra
    assert not rig["p0"].seen
    await rig.idle()


async def test_responses_are_one_workers_business_where_their_id_would_be_the_key_to_kv(start: Start) -> None:
    rig = await start({"connector": "omni-llmdatadist"}, p0=prefill_ok, d0=decode_stream)
    assert (await rig.client.post(RESPONSES, json=BODIES[RESPONSES])).status_code == 200
    assert not rig["p0"].seen
    assert (await rig.chat()).status_code == 200
    assert len(rig["p0"].seen) == 1
    await rig.idle()
    addresses = {"p0": {"kv_address": "127.0.0.1:1"}, "d0": {"kv_address": "127.0.0.1:2"}}
    rig = await start({"connector": "vllm-p2p-nccl", "each": addresses}, p0=prefill_ok, d0=decode_stream)
    answer = await rig.client.post(RESPONSES, json=BODIES[RESPONSES])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input"), answer.text
    assert rig.untouched()


async def test_wrong_bodies_are_refused_by_name(start: Start) -> None:
    rig = await start()
    for path, body, param in (
        (RESPONSES, {"model": "m"}, "input"),
        (RESPONSES, {"model": "m", "input": []}, "input"),
        (RESPONSES, {"model": "m", "input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        (MESSAGES, {"model": "m", "messages": "x"}, "messages"),
        ("/v1/embeddings", {"model": 3, "input": "x"}, "model"),
    ):
        answer = await rig.client.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), body
        assert answer.json().get("type") == ("error" if path == MESSAGES else None)
    assert rig.untouched()


async def test_the_gateway_tokenises_where_no_worker_can_be_asked(start: Start, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    log = tmp_path / "access.log"
    models = [{"name": "m", "path": str(tmp_path)}]
    config = {"connector": "sglang", "models": models, "access_log": {"path": str(log)}}
    rig = await start(config, p0=prefill_ok, d0=decode_stream)
    said = await rig.client.post("/tokenize", json={"model": "m", "prompt": "the cat"})
    assert said.status_code == 200
    back = await rig.client.post("/detokenize", json={"tokens": said.json()["tokens"]})
    assert "the cat" in back.json()["prompt"]
    wrong = await rig.client.post("/detokenize", json={"model": "m", "tokens": "x"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tokens")
    assert (await rig.client.post("/tokenize", json={"model": "other", "prompt": "x"})).status_code == 404
    assert rig.untouched()
    await rig.idle()
    async with asyncio.timeout(5):
        while len(lines := log.read_text().splitlines()) < 4:
            await asyncio.sleep(0.05)
    told = [(line["request"], line["status"], line["outcome"]) for line in map(json.loads, lines)]
    assert told[:2] == [("POST /tokenize", 200, "completed"), ("POST /detokenize", 200, "completed")]
    assert {outcome for _, status, outcome in told if status >= 400} == {"rejected"}
