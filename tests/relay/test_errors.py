"""What a client sees when it asks wrongly, or when a worker says no before its answer has begun."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.relay.conftest import Start
from tests.relay.raw import chat, post
from tests.relay.scripted import Script, Seen, decode_stream, prefill_ok

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = b'"messages":[{"role":"user","content":"hi"}]'


def with_field(field: bytes) -> bytes:
    return b'{"model":"m",' + MESSAGES + b"," + field + b"}"


BAD_BODIES = {
    "empty": (CHAT, b"", "invalid_json", None),
    "cut": (CHAT, b'{"model":', "invalid_json", None),
    "list": (CHAT, b"[]", "invalid_json", None),
    "null": (CHAT, b"null", "invalid_json", None),
    "two values": (CHAT, with_field(b'"n":1') + b"{}", "invalid_json", None),
    "bad utf-8 in a message": (
        CHAT,
        b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}',
        "invalid_json",
        None,
    ),
    "bad utf-8 in an unknown field": (CHAT, with_field(b'"x":"\xc3("'), "invalid_json", None),
    "half a character": (CHAT, with_field(b'"user":"\\ud83d"'), "invalid_json", None),
    "nan": (CHAT, with_field(b'"temperature":NaN'), "invalid_json", None),
    "infinity": (CHAT, with_field(b'"x_vendor":Infinity'), "invalid_json", None),
    "deep": (CHAT, with_field(b'"x":' + b"[" * 100_000 + b"]" * 100_000), "invalid_json", None),
    "wrong and then broken": (CHAT, b'{"model":5,"messages":[}', "invalid_json", None),
    "no model": (CHAT, b"{" + MESSAGES + b"}", "invalid_value", "model"),
    "empty model": (CHAT, b'{"model":"",' + MESSAGES + b"}", "invalid_value", "model"),
    "model of a wrong type": (CHAT, b'{"model":["m"],' + MESSAGES + b"}", "invalid_value", "model"),
    "no messages": (CHAT, b'{"model":"m"}', "invalid_value", "messages"),
    "empty messages": (CHAT, b'{"model":"m","messages":[]}', "invalid_value", "messages"),
    "messages of a wrong type": (CHAT, b'{"model":"m","messages":"hi"}', "invalid_value", "messages"),
    "message without a role": (
        CHAT,
        b'{"model":"m","messages":[{"content":"x"}]}',
        "invalid_value",
        "messages[0].role",
    ),
    "negative max_tokens": (CHAT, with_field(b'"max_tokens":-1'), "invalid_value", "max_tokens"),
    "zero max_tokens": (CHAT, with_field(b'"max_tokens":0'), "invalid_value", "max_tokens"),
    "huge max_tokens": (CHAT, with_field(b'"max_tokens":%d' % 2**70), "invalid_value", "max_tokens"),
    "max_tokens as text": (CHAT, with_field(b'"max_tokens":"5"'), "invalid_value", "max_tokens"),
    "max_completion_tokens": (CHAT, with_field(b'"max_completion_tokens":0'), "invalid_value", "max_completion_tokens"),
    "half a token": (CHAT, with_field(b'"max_tokens":1.5'), "invalid_value", "max_tokens"),
    "temperature below zero": (CHAT, with_field(b'"temperature":-0.1'), "invalid_value", "temperature"),
    "temperature as text": (CHAT, with_field(b'"temperature":"hot"'), "invalid_value", "temperature"),
    "no samples": (CHAT, with_field(b'"n":0'), "invalid_value", "n"),
    "stream as text": (CHAT, with_field(b'"stream":"yes"'), "invalid_value", "stream"),
    "stop as number": (CHAT, with_field(b'"stop":7'), "invalid_value", "stop"),
    "no prompt": (COMPLETIONS, b'{"model":"m"}', "invalid_value", "prompt"),
    "empty prompts": (COMPLETIONS, b'{"model":"m","prompt":[]}', "invalid_value", "prompt"),
    "mixed prompts": (COMPLETIONS, b'{"model":"m","prompt":[1,"a"]}', "invalid_value", "prompt"),
    "prompt of a wrong type": (COMPLETIONS, b'{"model":"m","prompt":{"a":1}}', "invalid_value", "prompt"),
}


async def test_bad_bodies_are_refused_at_the_door(start: Start) -> None:
    rig = await start()
    for name, (path, body, code, param) in BAD_BODIES.items():
        answer = await rig.client.post(path, content=body)
        assert answer.status_code == 400, name
        error = answer.json()["error"]
        assert (name, answer.status_code, error["code"], error["param"]) == (name, 400, code, param)
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-request-id"]
    assert rig.untouched()
    await rig.idle()


WRONG_PLACES = [
    ("POST", CHAT, 404, "model_not_found", "model"),
    ("GET", CHAT, 405, "method_not_allowed", None),
    ("DELETE", "/health", 405, "method_not_allowed", None),
    ("POST", "/v1/nowhere", 404, "not_found", None),
    ("POST", "/collective_rpc", 404, "not_found", None),
    ("POST", "/sleep", 404, "not_found", None),
    ("GET", "/omni/requests/unknown", 404, "not_found", "request_id"),
    ("GET", "/omni/requests?limit=x", 400, "invalid_value", "limit"),
]


async def test_wrong_places(start: Start) -> None:
    rig = await start()
    for method, path, status, code, param in WRONG_PLACES:
        content = chat(model="other") if method == "POST" else None
        answer = await rig.client.request(method, path, content=content)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
        assert status != 405 or answer.headers["allow"]
    assert rig.untouched()
    await rig.idle()


async def test_what_no_worker_can_do_names_its_field(start: Start) -> None:
    rig = await start({"connector": "sglang"})
    asks = {"best_of": 2, "echo": True, "use_beam_search": True, "prompt_logprobs": 1, "logprob_start_len": 0}
    for field, value in asks.items():
        answer = await rig.client.post(COMPLETIONS, json={"model": "m", "prompt": "x", field: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert rig.untouched()
    await rig.idle()


async def test_no_output_tokens_are_allowed_with_echo(start: Start) -> None:
    rig = await start({"connector": "aggregated"}, m0=decode_stream)
    body = {"model": "m", "prompt": "x", "echo": True, "max_tokens": 0}
    assert (await rig.client.post(COMPLETIONS, json=body)).status_code == 200


# ----------------------------------------------------------------------------------- large bodies


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_large_body_is_refused_and_not_kept(start: Start, chunked: bool) -> None:
    rig = await start({"limits": {"client_max_body_bytes": 1000}})
    client = await rig.raw()
    if chunked:
        await client.send(b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\n")
        await client.send(b"3ff\r\n" + b"x" * 0x3FF + b"\r\n")
    else:
        await client.send(post(b"x" * 1001))
    answer = await client.response()
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")
    assert "1000 bytes" in answer.error["message"]
    assert answer.header("connection") == "close"
    await client.send(b"0\r\n\r\n" if chunked else b"")
    assert await client.closed()
    assert rig.untouched()
    await rig.idle()


async def test_a_body_of_the_limit_passes(start: Start) -> None:
    body = chat()
    rig = await start({"limits": {"client_max_body_bytes": len(body)}})
    assert (await rig.client.post(CHAT, content=body)).status_code == 200


async def test_expect_is_answered_by_the_refusal(start: Start) -> None:
    """Nobody has to send a body that will be refused."""
    rig = await start({"limits": {"client_max_body_bytes": 10}})
    client = await rig.raw()
    await client.send(
        b"POST %b HTTP/1.1\r\nhost: g\r\nexpect: 100-continue\r\ncontent-length: 11\r\n\r\n" % CHAT.encode()
    )
    assert (await client.response()).status == 413


@pytest.mark.slow
async def test_a_hundred_megabytes(start: Start) -> None:
    """With the default limit; the sender sees the refusal while it sends."""
    rig = await start()
    client = await rig.raw()
    size = 100 << 20
    await client.send(b"POST %b HTTP/1.1\r\nhost: g\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), size))
    part = b"x" * (1 << 20)
    for _ in range(100):
        await client.send(part)
    answer = await client.response()
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")
    assert await client.closed()
    assert rig.untouched()


# ----------------------------------------------------------------------------------- long prompts


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A tokenizer that counts words, with a chat template."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return tmp_path


async def test_a_prompt_longer_than_the_context(start: Start, model_folder: Path) -> None:
    rig = await start({"model": {"path": str(model_folder)}})
    words = "a " * 100_000
    answer = await rig.chat(messages=[{"role": "user", "content": words}])
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert "100000 tokens" in error["message"]
    answer = await rig.client.post(COMPLETIONS, json={"model": "m", "prompt": words})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert rig.untouched()
    assert (await rig.chat()).status_code == 200
    await rig.idle()


# --------------------------------------------------------------------------- workers that say no


def says(status: int, body: bytes = b'{"error":{"message":"no"}}', content_type: str = "application/json") -> Script:
    async def script(seen: Seen) -> None:
        await seen.answer(status, body, content_type, "x-vendor: 1\r\nretry-after: 7\r\n")

    return script


REFUSALS = [
    (400, "application/json"),
    (401, "application/problem+json"),
    (404, "text/plain"),
    (422, "application/json"),
    (429, "application/json"),
    (500, "text/html"),
    (503, "application/json"),
]


@pytest.mark.parametrize("leg", ["p0", "d0"])
async def test_a_workers_refusal_reaches_the_client(start: Start, leg: str) -> None:
    rig = await start({"retries": {"max": 1}})
    for (status, content_type), stream in itertools.product(REFUSALS, (False, True)):
        body = b'{"error":{"message":"\xc3\xa9","code":%d}}' % status
        rig[leg].script = says(status, body, content_type)
        answer = await rig.chat(stream=stream)
        assert (answer.status_code, answer.content) == (status, body)
        assert answer.headers["content-type"] == content_type
        assert answer.headers["x-vendor"] == "1"
        assert answer.headers["retry-after"] == "7"
        assert answer.headers["x-request-id"]
    await rig.idle()


async def test_what_is_no_answer_is_not_passed_on(start: Start) -> None:
    async def redirect(seen: Seen) -> None:
        extra = "location: http://10.0.0.7:8000/secret\r\n"
        await seen.send(f"HTTP/1.1 {seen.json['seed']} X\r\n{extra}content-length: 0\r\n\r\n".encode())

    rig = await start(p0=prefill_ok, d0=redirect)
    for status in (204, 302, 307):
        answer = await rig.chat(seed=status)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "worker_garbage")
        assert "10.0.0.7" not in answer.text + str(answer.headers)
    await rig.idle()


async def hang_up(seen: Seen) -> None:
    seen.reset()


async def garbage(seen: Seen) -> None:
    await seen.send(b"SSH-2.0-OpenSSH_9\r\n\r\n")


async def half_a_head(seen: Seen) -> None:
    await seen.send(b"HTTP/1.1 200 OK\r\ncontent-le")
    seen.reset()


async def not_json(seen: Seen) -> None:
    await seen.answer(200, b"<html>")


async def half_a_body(seen: Seen) -> None:
    await seen.send(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"id":')
    seen.reset()


async def endless_head(seen: Seen) -> None:
    await seen.send(b"HTTP/1.1 200 OK\r\nx: ")
    while not seen.writer.is_closing():
        await seen.send(b"y" * 10_000)


async def p_params(seen: Seen) -> None:
    """P's own parameters sent back: they crash D (faults R2)."""
    await seen.answer(200, b'{"kv_transfer_params":{"do_remote_decode":true}}')


BROKEN: list[tuple[str, Script, str]] = [
    ("p0", hang_up, "worker_closed"),
    ("p0", half_a_head, "worker_closed"),
    ("p0", half_a_body, "worker_closed"),
    ("p0", garbage, "worker_garbage"),
    ("p0", not_json, "worker_garbage"),
    ("p0", p_params, "worker_garbage"),
    ("p0", endless_head, "worker_garbage"),
    ("d0", garbage, "worker_garbage"),
    ("d0", not_json, "worker_garbage"),
    ("d0", half_a_head, "worker_closed"),
    ("d0", half_a_body, "worker_closed"),
    ("d0", endless_head, "worker_garbage"),
]


async def test_a_broken_worker_gives_a_clear_error(start: Start) -> None:
    rig = await start({"retries": {"max": 0}})
    usual = {"p0": prefill_ok, "d0": decode_stream}
    for (leg, script, code), stream in itertools.product(BROKEN, (False, True)):
        rig[leg].script = script
        answer = await rig.chat(stream=stream)
        error = answer.json()["error"]
        assert (script, answer.status_code, error["code"]) == (script, 502, code)
        assert error["type"] == "server_error"
        ports = [str(worker.port) for worker in rig.workers.values()]
        assert not any(secret in answer.text for secret in ("127.0.0.1", *ports))
        rig[leg].script = usual[leg]
    await rig.idle()


@pytest.mark.parametrize("leg", ["p0", "d0"])
async def test_a_refused_connection(start: Start, leg: str) -> None:
    rig = await start({"health": {"interval_s": 60}})
    await rig[leg].stop()
    answer = await rig.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "worker_unreachable")
    assert "127.0.0.1" not in answer.text
    assert str(rig[leg].port) not in answer.text
    await rig.idle()


async def test_no_worker_is_told_without_addresses(start: Start) -> None:
    rig = await start({"limits": {"no_worker_timeout_s": 0.05}})
    await rig["d0"].stop()
    async with asyncio.timeout(5):
        while rig.gateway.scheduling.ready():
            await asyncio.sleep(0.01)
    answer = await rig.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")
    assert "127.0.0.1" not in answer.text
    await rig.idle()


async def test_the_status_is_not_told_before_d_has_spoken(start: Start) -> None:
    """P's success alone says nothing to a client (faults S8)."""
    go = asyncio.Event()

    async def decode(seen: Seen) -> None:
        await go.wait()
        await seen.answer(400, b'{"error":{"message":"too long"}}')

    rig = await start(p0=prefill_ok, d0=decode)
    client = await rig.raw()
    await client.send(post(chat(stream=True)))
    await rig.seen("d0")
    assert next(iter(rig.gateway.front.edge.exchanges.values())).status == 0
    go.set()
    assert (await client.response()).status == 400
    await rig.idle()
