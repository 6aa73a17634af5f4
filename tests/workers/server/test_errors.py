"""Bad input: a 4xx in the OpenAI shape that names the field, and no request reaches the engine."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import pytest

from omni_proxy.workers.engine.http_io import MAX_BODY_BYTES
from tests.workers.server.fake import FakeEngine, LiveServer

HELLO = [{"role": "user", "content": "hello"}]
PULL = {
    "do_remote_prefill": True,
    "remote_engine_id": "E0",
    "remote_request_id": "cmpl-1",
    "remote_host": "127.0.0.1",
    "remote_port": 5601,
    "remote_block_ids": [[1]],
    "remote_num_tokens": 3,
}

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
CHAT_ERRORS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": "x"}, "messages", '"x"'),
    ({"messages": [1]}, "messages[0]", "expected `object`"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "null"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "5"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
        "image_url",
    ),
    ({"messages": [{"role": "user", "content": "x " * 400}]}, "messages", "128 tokens"),
    ({"messages": [{"role": "user", "content": "x" * 9000}]}, "messages", "128 tokens"),
    ({"messages": [{"role": "user", "content": "x" * 9_000_000}]}, "messages", "128 tokens"),
    ({"messages": [{"role": "nobody", "content": "x"}]}, "messages", "nobody may not speak"),
    ({"messages": HELLO, "max_tokens": -1}, "max_tokens", "-1"),
    ({"messages": HELLO, "max_tokens": 0}, "max_tokens", "0"),
    ({"messages": HELLO, "max_tokens": "5"}, "max_tokens", '"5"'),
    ({"messages": HELLO, "max_tokens": 1000}, "max_tokens", "1000"),
    ({"messages": HELLO, "max_completion_tokens": 1000}, "max_completion_tokens", "1000"),
    ({"messages": HELLO, "max_tokens": 2, "min_tokens": 3}, "min_tokens", "3"),
    ({"messages": HELLO, "temperature": -0.5}, "temperature", "-0.5"),
    ({"messages": HELLO, "top_p": 0}, "top_p", "0"),
    ({"messages": HELLO, "top_k": -2}, "top_k", "-2"),
    ({"messages": HELLO, "n": 0}, "n", "0"),
    ({"messages": HELLO, "seed": 2**64}, "seed", str(2**64)),
    ({"messages": HELLO, "stop": ""}, "stop", "empty"),
    ({"messages": HELLO, "stop": [1]}, "stop[0]", "1"),
    ({"messages": HELLO, "stop_token_ids": [5, "a"]}, "stop_token_ids[1]", '"a"'),
    ({"messages": HELLO, "top_logprobs": 3}, "top_logprobs", "3"),
    ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "21"),
    (
        {"messages": HELLO, "stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
        "1",
    ),
    ({"messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options", "only when stream is true"),
    ({"messages": HELLO, "tool_choice": "required"}, "tool_choice", "required"),
    ({"messages": HELLO, "presence_penalty": 2.5}, "presence_penalty", "2.5"),
    ({"messages": HELLO, "frequency_penalty": "much"}, "frequency_penalty", "much"),
    ({"messages": HELLO, "repetition_penalty": 0}, "repetition_penalty", "0"),
    ({"messages": HELLO, "min_p": 1.5}, "min_p", "1.5"),
    ({"messages": HELLO, "logit_bias": {"cat": 1}}, "logit_bias", "cat"),
    ({"messages": HELLO, "logit_bias": {"400": 1}}, "logit_bias", "below 400"),
    ({"messages": HELLO, "logit_bias": {"4": 101}}, "logit_bias", "100"),
    ({"messages": HELLO, "response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ({"messages": HELLO, "response_format": "json"}, "response_format.type", "null"),
    ({"messages": HELLO, "response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "null"),
    ({"messages": HELLO, "guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"messages": HELLO, "guided_json": {"type": "nope"}}, "guided_json", "nope"),
    ({"messages": HELLO, "guided_regex": "("}, "guided_regex", "unclosed"),
    ({"messages": HELLO, "guided_choice": []}, "guided_choice", "[]"),
    ({"messages": HELLO, "guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
    ({"messages": HELLO, "guided_json": {}, "guided_regex": "a"}, "guided_regex", "guided_json asks"),
    ({"messages": HELLO, "structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"messages": HELLO, "structured_outputs": {"regex": ""}}, "structured_outputs.regex", "non-empty"),
    ({"messages": HELLO, "tool_choice": "any"}, "tool_choice", "any"),
    ({"messages": HELLO, "tools": [{"type": "web"}]}, "tools[0]", "web"),
    ({"messages": HELLO, "tools": [{"function": {}}]}, "tools[0].function.name", "null"),
    (
        {"messages": HELLO, "tools": [TOOL], "tool_choice": {"function": {"name": "g"}}},
        "tool_choice.function.name",
        '"g"',
    ),
    (
        {"messages": HELLO, "tools": [TOOL], "tool_choice": "required", "guided_regex": "a"},
        "guided_regex",
        "tool_choice forces",
    ),
    ({"messages": HELLO, "echo": True}, "echo", "true"),
    ({"messages": HELLO, "prompt_logprobs": 21}, "prompt_logprobs", "21"),
    ({"messages": HELLO, "lora_path": "x"}, "lora_path", "x"),
    ({"messages": HELLO, "kv_transfer_params": PULL}, "kv_transfer_params.remote_num_tokens", "another prompt"),
    ({}, "messages", "required"),
]

COMPLETION_ERRORS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "required"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "[]"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": [5, "a"]}, "prompt[1]", '"a"'),
    ({"prompt": [-1]}, "prompt[0]", "-1"),
    ({"prompt": [[1], [True]]}, "prompt[1][0]", "true"),
    ({"prompt": [399, 400]}, "prompt", "400"),
    ({"prompt": [5] * 128}, "prompt", "128 tokens"),
    ({"prompt": {"a": 1}}, "prompt", '{"a":1}'),
    ({"prompt": "\ud800"}, "body", ""),
    ({"prompt": ["a"] * 129}, "prompt", "129"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "without echo"),
    ({"prompt": "a", "temperature": -0.1}, "temperature", "-0.1"),
    ({"prompt": "a", "top_p": 0}, "top_p", "0"),
    ({"prompt": "a", "min_tokens": 3, "max_tokens": 2}, "min_tokens", "max_tokens (2)"),
    (
        {"prompt": "a", "echo": True, "logprobs": 1, "kv_transfer_params": {"do_remote_decode": True}},
        "echo",
        "handoff",
    ),
    ({"prompt": "a", "logprobs": 21}, "logprobs", "21"),
    ({"prompt": "a", "n": 2, "kv_transfer_params": {"do_remote_decode": True}}, "n", "handoff"),
    ({"prompt": ["a", "b"], "kv_transfer_params": {"do_remote_decode": True}}, "prompt", "handoff"),
]


def check(response: httpx.Response, param: str | None, text: str) -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["type"], error["code"]) == (param, "BadRequestError", 400)
    assert text in error["message"]
    assert len(error["message"]) < 500


@pytest.mark.parametrize(("body", "param", "text"), CHAT_ERRORS)
def test_bad_chats_name_the_field(
    engine: FakeEngine, http: httpx.Client, body: dict[str, Any], param: str, text: str
) -> None:
    check(http.post("/v1/chat/completions", json=body), param, text)
    assert engine.submitted == []


@pytest.mark.parametrize(("body", "param", "text"), COMPLETION_ERRORS)
def test_bad_completions_name_the_field(
    engine: FakeEngine, http: httpx.Client, body: dict[str, Any], param: str, text: str
) -> None:
    if param == "body":
        response = http.post("/v1/completions", content=b'{"prompt": "\\ud800"}')
        assert response.status_code == 400
    else:
        check(http.post("/v1/completions", json=body), param, text)
    assert engine.submitted == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/omni/release"])
@pytest.mark.parametrize(
    "data", [b"", b"{", b"null", b"[]", b'"x"', b'{"model": "\xff"}', b'{"a":' * 5000, b"\xff\xfe"]
)
def test_a_body_that_is_no_json_object_is_refused(http: httpx.Client, path: str, data: bytes) -> None:
    check(http.post(path, content=data), None, "the body")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_unknown_model_is_not_found(http: httpx.Client, path: str) -> None:
    response = http.post(path, json={"model": "gpt-9", "messages": HELLO, "prompt": "x"})
    assert response.status_code == 404
    assert response.json()["error"] == {
        "message": "The model `gpt-9` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }


def test_an_impossible_request_is_refused_by_the_engine(
    engine: FakeEngine, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.workers.server.fake.NUM_BLOCKS", 1)
    body = {"messages": HELLO, "model": "tiny"}
    check(http.post("/v1/chat/completions", json=body), "messages", "KV blocks")


def test_unknown_paths_and_methods_answer_in_json(http: httpx.Client) -> None:
    assert http.get("/nowhere").json()["error"]["code"] == 404
    response = http.get("/v1/completions")
    assert (response.status_code, response.json()["error"]["type"]) == (405, "MethodNotAllowedError")


def test_a_body_over_the_limit_is_refused_and_the_server_lives(http: httpx.Client) -> None:
    response = http.post("/v1/completions", content=b" " * (MAX_BODY_BYTES + 1))
    assert response.status_code == 413
    assert "64 MiB" in response.json()["error"]["message"]
    assert http.get("/health").status_code == 200


def test_the_unexpected_is_a_500_without_its_traceback(
    engine: FakeEngine, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> bool:
        raise KeyError("secret")

    monkeypatch.setattr(engine, "reset_prefix_cache", broken)
    response = http.post("/reset_prefix_cache")
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "InternalServerError"
    assert "secret" not in response.text


def test_half_a_request_leaves_nothing(live: LiveServer, engine: FakeEngine, http: httpx.Client) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
    with socket.create_connection(("127.0.0.1", live.port)) as sock:
        sock.sendall(head + b'{"prompt": ')
    assert http.get("/load").json() == {"server_load": 0}
    assert engine.submitted == []
