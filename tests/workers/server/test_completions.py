"""Whole and streamed answers over a real socket, with a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from omni_proxy.workers.engine.types import FinishReason
from tests.workers.server.fake import FakeEngine, LiveServer


def say(live: LiveServer, text: str, engine: FakeEngine) -> list[int]:
    """Have the engine answer `text`, then end of text."""
    tokens = live.tokenizer.encode(text, False)
    engine.script = lambda request: [*tokens, 0]
    return tokens


def events(response: httpx.Response) -> list[Any]:
    parts = response.text.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts)
    return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], **more}


def complete(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hello world", **more}


def test_a_chat_answer_has_the_shape_of_vllm(live: LiveServer, engine: FakeEngine, http: httpx.Client) -> None:
    tokens = say(live, "the cat sat", engine)
    response = http.post("/v1/chat/completions", json=chat(), headers={"x-request-id": "r1"})
    body = response.json()
    assert response.status_code == 200
    assert response.headers["x-request-id"] == "r1"
    assert (body["id"], body["object"], body["model"]) == ("chatcmpl-r1", "chat.completion", "tiny")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "the cat sat", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    prompt = live.tokenizer.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n", False)
    assert engine.submitted[0].prompt_token_ids == tuple(prompt)
    assert engine.submitted[0].request_id.startswith("chatcmpl-r1-0-")
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(tokens) + 1,
        "total_tokens": len(prompt) + len(tokens) + 1,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert body["kv_transfer_params"] is None


def test_a_chat_stream_opens_with_the_role_and_ends_with_done(
    live: LiveServer, engine: FakeEngine, http: httpx.Client
) -> None:
    say(live, "the cat sat on the mat", engine)
    options = {"include_usage": True}
    response = http.post("/v1/chat/completions", json=chat(stream=True, stream_options=options))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["x-accel-buffering"] == "no"
    first, *middle, last, usage, done = events(response)
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    texts = [chunk["choices"][0]["delta"]["content"] for chunk in [*middle, last]]
    assert "".join(texts) == "the cat sat on the mat"
    assert [chunk["choices"][0]["finish_reason"] for chunk in middle] == [None] * len(middle)
    assert last["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(live.tokenizer.encode("the cat sat on the mat", False)) + 1
    assert done == "[DONE]"
    assert {chunk["id"] for chunk in [first, *middle, last, usage]} == {first["id"]}


def test_a_stream_without_stream_options_has_no_usage(live: LiveServer, engine: FakeEngine, http: httpx.Client) -> None:
    say(live, "hello", engine)
    chunks = events(http.post("/v1/completions", json=complete(stream=True)))
    assert all(chunk["choices"] for chunk in chunks[:-1])
    assert all("usage" not in chunk for chunk in chunks[:-1])


def test_running_usage_is_in_every_chunk(live: LiveServer, engine: FakeEngine, http: httpx.Client) -> None:
    say(live, "the cat", engine)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(http.post("/v1/completions", json=complete(stream=True, stream_options=options)))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == len(live.tokenizer.encode("the cat", False)) + 1


@pytest.mark.parametrize("per_step", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_over_token_borders_is_cut(
    live: LiveServer, engine: FakeEngine, http: httpx.Client, stream: bool, per_step: int
) -> None:
    say(live, "the cat sat on the mat and the dog ate", engine)
    engine.per_step = per_step
    response = http.post("/v1/completions", json=complete(stream=stream, stop=["zebra", "t on th"]))
    if stream:
        choices = [chunk["choices"][0] for chunk in events(response)[:-1]]
        text, last = "".join(choice["text"] for choice in choices), choices[-1]
    else:
        last = response.json()["choices"][0]
        text = last["text"]
    assert text == "the cat sa"
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "t on th")
    assert engine.aborted == [engine.submitted[0].request_id]
    assert engine.stats().running == 0


def test_a_stop_string_is_kept_on_request(live: LiveServer, engine: FakeEngine, http: httpx.Client) -> None:
    say(live, "the cat sat on the mat", engine)
    body = complete(stop=" sat", include_stop_str_in_output=True)
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "the cat sat"


def test_min_tokens_holds_off_stop_strings(live: LiveServer, engine: FakeEngine, http: httpx.Client) -> None:
    tokens = say(live, "the the the the", engine)
    body = complete(stop="the", min_tokens=len(tokens))
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"].count("the") >= len(tokens) - 1


def test_a_stop_token_ends_the_text_before_it(live: LiveServer, engine: FakeEngine, http: httpx.Client) -> None:
    tokens = say(live, "the cat sat", engine)
    body = complete(stop_token_ids=[tokens[-1]], return_token_ids=True)
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == live.tokenizer.decode(tokens[:-1])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", tokens[-1])
    assert choice["token_ids"] == tokens


def test_no_replacement_characters_on_the_way(live: LiveServer, engine: FakeEngine, http: httpx.Client) -> None:
    text = "a 🙂 ß 中文 \u0915\u094d\u0937 end"
    say(live, text, engine)
    chunks = events(http.post("/v1/completions", json=complete(stream=True)))
    texts = [chunk["choices"][0]["text"] for chunk in chunks[:-1]]
    assert "".join(texts) == text
    assert not any("\ufffd" in piece for piece in texts)


def test_several_prompts_and_samples_are_indexed_in_order(
    live: LiveServer, engine: FakeEngine, http: httpx.Client
) -> None:
    body = complete(prompt=["hello", "world"], n=2, max_tokens=1, seed=7)
    answer = http.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [request.sampling.seed for request in engine.submitted] == [7, 8, 7, 8]
    one, two = (len(live.tokenizer.encode(word, True)) for word in ("hello", "world"))
    assert answer["usage"]["prompt_tokens"] == one + two
    assert answer["usage"]["completion_tokens"] == 4


def test_samples_are_streamed_side_by_side(live: LiveServer, engine: FakeEngine, http: httpx.Client) -> None:
    say(live, "the cat", engine)
    chunks = events(http.post("/v1/chat/completions", json=chat(stream=True, n=3)))
    texts = {0: "", 1: "", 2: ""}
    for chunk in chunks[:-1]:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["delta"]["content"]
    assert set(texts.values()) == {"the cat"}
    assert sum(chunk["choices"][0]["finish_reason"] == "stop" for chunk in chunks[:-1]) == 3


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]], [[5], [6, 7]]])
def test_token_ids_are_taken_as_they_are(engine: FakeEngine, http: httpx.Client, prompt: list[Any]) -> None:
    answer = http.post("/v1/completions", json=complete(prompt=prompt, max_tokens=2)).json()
    expected = [prompt] if isinstance(prompt[0], int) else prompt
    assert [list(request.prompt_token_ids) for request in engine.submitted] == expected
    assert len(answer["choices"]) == len(expected)


def test_token_ids_come_back_on_request(live: LiveServer, engine: FakeEngine, http: httpx.Client) -> None:
    tokens = say(live, "the cat", engine)
    prompt = live.tokenizer.encode("hello world", True)
    body = complete(return_token_ids=True)
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, [*tokens, 0])
    chunks = events(http.post("/v1/completions", json={**body, "stream": True}))[:-1]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == prompt
    assert [t for chunk in chunks for t in chunk["choices"][0]["token_ids"]] == [*tokens, 0]
    first = events(http.post("/v1/chat/completions", json=chat(return_token_ids=True, stream=True)))[0]
    assert first["prompt_token_ids"] == list(engine.submitted[-1].prompt_token_ids)


def test_chat_logprobs(live: LiveServer, engine: FakeEngine, http: httpx.Client) -> None:
    tokens = say(live, "the cat", engine)
    body = chat(logprobs=True, top_logprobs=2)
    content = http.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [live.tokenizer.token_text(t) for t in [*tokens, 0]]
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    assert content[0]["logprob"] == -0.5
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -9999.0]
    chunks = events(http.post("/v1/chat/completions", json={**body, "stream": True}))[1:-1]
    assert [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"]["content"]] == content


def test_completion_logprobs(live: LiveServer, engine: FakeEngine, http: httpx.Client) -> None:
    tokens = say(live, "the cat", engine)
    body = complete(logprobs=1)
    whole = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert whole["tokens"] == [live.tokenizer.token_text(t) for t in [*tokens, 0]]
    assert whole["text_offset"][0] == 0
    assert whole["text_offset"][-1] == len("the cat")
    assert len(whole["top_logprobs"]) == len(whole["token_logprobs"]) == len(tokens) + 1
    chunks = events(http.post("/v1/completions", json={**body, "stream": True}))[:-1]
    assert [o for c in chunks for o in c["choices"][0]["logprobs"]["text_offset"]] == whole["text_offset"]


def test_the_rest_of_the_context_is_the_default_limit(engine: FakeEngine, http: httpx.Client) -> None:
    http.post("/v1/chat/completions", json=chat(ignore_eos=True))
    request = engine.submitted[0]
    assert request.sampling.max_tokens == 128 - len(request.prompt_token_ids)
    assert request.sampling.ignore_eos


def test_fields_reach_the_engine(engine: FakeEngine, http: httpx.Client) -> None:
    body = chat(
        max_tokens=9,
        max_completion_tokens=5,
        min_tokens=2,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        priority=3,
        cache_salt="s",
        x_vendor={"a": [1, 2.5]},
        presence_penalty=0,
        response_format={"type": "text"},
    )
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    request = engine.submitted[0]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature) == (5, 2, 0)
    assert (sampling.top_p, sampling.top_k, request.priority, request.cache_salt) == (0.5, 0, 3, "s")


def test_tools_are_shown_to_the_model(live: LiveServer, engine: FakeEngine, http: httpx.Client) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"b": 1, "a": "é"}}}]
    http.post("/v1/chat/completions", json=chat(tools=tools, max_tokens=1))
    prompt = live.tokenizer.decode(engine.submitted[0].prompt_token_ids, skip_special_tokens=False)
    assert '{"name": "weather", "parameters": {"b": 1, "a": "é"}}' in prompt


def test_an_engine_error_before_the_first_token_has_its_status(engine: FakeEngine, http: httpx.Client) -> None:
    engine.fail_at = 0
    for stream in (False, True):
        response = http.post("/v1/chat/completions", json=chat(stream=stream))
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "the fake engine failed"


def test_an_engine_error_in_a_stream_is_an_event_and_no_done(engine: FakeEngine, http: httpx.Client) -> None:
    engine.fail_at = engine.hold_at = 3
    with http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as response:
        lines = response.iter_lines()
        first = next(lines)
        engine.gate.set()
        *_, last = [line for line in lines if line]
    assert '"role":"assistant"' in first
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["message"], error["code"]) == ("the fake engine failed", 500)


def test_what_is_abandoned_may_be_started_over(live: LiveServer, engine: FakeEngine, http: httpx.Client) -> None:
    engine.fail_at, engine.fail_as = 0, FinishReason.ABANDONED
    for stream in (False, True):
        response = http.post("/v1/chat/completions", json=chat(stream=stream))
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "abandoned"


def test_a_chat_may_come_with_its_token_ids(http: httpx.Client, engine: FakeEngine) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    assert http.post("/v1/chat/completions", json={**body, "prompt_token_ids": [5, 6, 7]}).status_code == 200
    assert engine.submitted[-1].prompt_token_ids == (5, 6, 7)
    for ids in ([999_999], [-1], ["x"], []):
        assert http.post("/v1/chat/completions", json={**body, "prompt_token_ids": ids}).status_code == 400
